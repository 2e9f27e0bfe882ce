"""Costs of ops: measured, from a store that all processes of a user share, or estimated from device profiles."""

from __future__ import annotations

from checkmate.cost.device import Device, device_names, device_schema, load_device, roofline_ns
from checkmate.cost.store import CostStore, OpCost, cache_folder, quantise

__all__ = [
    "CostStore",
    "Device",
    "OpCost",
    "cache_folder",
    "device_names",
    "device_schema",
    "load_device",
    "quantise",
    "roofline_ns",
]
