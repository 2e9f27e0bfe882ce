"""Costs of ops: measured ones from a store that every process of a user shares, others from profiles of devices."""

from __future__ import annotations

from checkmate.cost.database import cache_folder
from checkmate.cost.device import Device, device_names, device_schema, load_device, roofline_ns
from checkmate.cost.store import CostStore, OpCost, quantise

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
