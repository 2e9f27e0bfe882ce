"""``checkmate devices``: the devices that `checkmate fits` knows."""

from __future__ import annotations

import json as json_module

import msgspec

from checkmate.cli import terminal
from checkmate.core.units import format_bytes
from checkmate.cost.device import FORMAT, Device, device_names, load_device


def devices(name: str | None = None, /, *, json: terminal.Json = False) -> int:
    """List the devices that `checkmate fits` knows, or show one with the source of every figure.

    Args:
        name: Name of a device, or path of a profile.
        json: Print one JSON object on stdout; for a single device it is a profile that you can edit.

    Returns:
        The exit code.
    """
    if name is not None:
        return _one(load_device(name), json)
    known = [load_device(each) for each in device_names()]
    if json:
        terminal.emit({"devices": [_profile(device) for device in known]})
        return 0
    header = [("device", False), ("memory", True), ("float32", True), ("tf32", True), ("bfloat16", True), ("traffic", True)]
    terminal.table(header, [_row(device) for device in known])
    terminal.say("peak rates in TFLOP/s, dense; memory traffic in GB/s")
    terminal.closing([], "list the sources of a device's figures with `checkmate devices H100`")
    return 0


def _one(device: Device, json: bool) -> int:
    if json:
        terminal.emit(_profile(device))
        return 0
    peaks = ", ".join(f"{dtype} {_tera(peak)}" for dtype, peak in device.peak_flop_per_s.items())
    facts = [
        ("device", f"{device.name}, {device.about}"),
        ("memory_bytes", f"{format_bytes(device.memory_bytes)} available to a process"),
        ("context_bytes", format_bytes(device.context_bytes)),
        ("blas_workspace_bytes", format_bytes(device.blas_workspace_bytes)),
        ("granule_bytes", format_bytes(device.granule_bytes)),
        ("peak_flop_per_s", f"in TFLOP/s: {peaks}"),
        ("bytes_per_s", f"{device.bytes_per_s / 1e9:g} GB/s"),
        ("launch_ns", f"{device.launch_ns} ns"),
    ]
    if device.pcie_bytes_per_s is not None:
        facts.append(("pcie_bytes_per_s", f"{device.pcie_bytes_per_s / 1e9:g} GB/s one way"))
    for field in ("host_out_bytes_per_s", "host_in_bytes_per_s"):
        if (rate := getattr(device, field)) is not None:
            facts.append((field, f"{rate / 1e9:g} GB/s"))
    terminal.facts(facts)
    for title, notes in (("published", device.sources), ("assumed", device.assumed)):
        for field, note in sorted(notes.items()):
            terminal.say(f"{title:<11}{field}: {note}")
    terminal.closing([], f"write your own profile, starting from `checkmate devices {json_module.dumps(device.name)} --json`")
    return 0


def _row(device: Device) -> list[str]:
    peaks = [_tera(device.peak_flop_per_s[t]) if t in device.peak_flop_per_s else "-" for t in ("float32", "tf32", "bfloat16")]
    return [device.name, format_bytes(device.memory_bytes), *peaks, f"{device.bytes_per_s / 1e9:g}"]


def _tera(flop_per_s: int) -> str:
    return f"{flop_per_s / 1e12:g}"


def _profile(device: Device) -> dict[str, object]:
    return {"format": FORMAT, **msgspec.to_builtins(device)}
