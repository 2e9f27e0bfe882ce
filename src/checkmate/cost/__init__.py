"""Costs of ops: measured ones are kept in a store that every process of a user shares."""

from __future__ import annotations

from checkmate.cost.store import CostStore, OpMeasure, cache_folder, quantise

__all__ = ["CostStore", "OpMeasure", "cache_folder", "quantise"]
