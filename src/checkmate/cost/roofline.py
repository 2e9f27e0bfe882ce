"""The least time that arithmetic and memory traffic take on a device."""

from __future__ import annotations

from checkmate.cost.device import Device


def roofline_ns(device: Device, *, flop: int, dtype: str, moved_bytes: int) -> int:
    """Least nanoseconds of an op: its launch, then its arithmetic or its memory traffic, whichever takes longer.

    The roofline model of Williams, Waterman and Patterson (2009), plus the launch. No kernel is faster; many are slower
    by a factor of two. Plans depend on which of two ops is the more expensive, and that the model tells well.

    Args:
        device: The device.
        flop: Floating-point operations.
        dtype: Their type, as a key of ``device.peak_flop_per_s``.
        moved_bytes: Bytes read and written.

    Examples:
        >>> from checkmate.cost import load_device
        >>> roofline_ns(load_device("H100"), flop=2 * 4096**3, dtype="bfloat16", moved_bytes=3 * 2 * 4096**2)
        142911
    """
    compute_ns = flop * 1e9 / device.flop_per_s(dtype)
    traffic_ns = moved_bytes * 1e9 / device.bytes_per_s
    return round(device.launch_ns + max(compute_ns, traffic_ns))
