"""The figures in the text of an out-of-memory error."""

from __future__ import annotations

import re
from dataclasses import dataclass

from checkmate.core.errors import FileFormatError, UnitError
from checkmate.core.units import parse_bytes

_AMOUNT = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?) (bytes|[KMGT]i?B)"
_ASKED = re.compile(rf"out of memory\. Tried to allocate {_AMOUNT}")
_DEVICE = re.compile(r"\bGPU (\d+)")
_FIGURES = {
    "total_bytes": (rf"total capacity of {_AMOUNT}", rf"{_AMOUNT} total capacity"),
    "device_free_bytes": (rf"of which {_AMOUNT} is free", rf"{_AMOUNT} free"),
    "process_bytes": (rf"(?:this process|Process \d+) has {_AMOUNT} memory in use",),
    "allowed_bytes": (rf"{_AMOUNT} allowed",),
    "allocated_bytes": (rf"{_AMOUNT} is allocated by PyTorch", rf"{_AMOUNT} already allocated"),
    "unallocated_bytes": (rf"{_AMOUNT} is reserved by PyTorch but unallocated",),
    "reserved_bytes": (rf"{_AMOUNT} reserved in total by PyTorch",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorText:
    """Figures in the text of an error, None where it says nothing. They are rounded to 0.01 of their unit.

    Attributes:
        requested_bytes: Bytes that were asked for.
        device: Index of the device.
        total_bytes: Memory of the device.
        device_free_bytes: Free bytes of the device.
        process_bytes: Bytes of this process, those outside PyTorch included.
        allowed_bytes: Limit set by `torch.cuda.set_per_process_memory_fraction`.
        allocated_bytes: Bytes in use by tensors.
        reserved_bytes: Bytes that PyTorch's allocator holds.
    """

    requested_bytes: int
    device: int | None
    total_bytes: int | None
    device_free_bytes: int | None
    process_bytes: int | None
    allowed_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None


def parse_error(text: str) -> ErrorText:
    """Read the last out-of-memory error in a text, such as a log. An amount that cannot be one is as good as not there.

    The forms of PyTorch 1.12 to 2.13 are known, of CUDA, ROCm and XPU devices.

    Raises:
        FileFormatError: The text has no such error.

    Examples:
        >>> found = parse_error("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8.00 GiB")
        >>> found.requested_bytes, found.device, found.total_bytes
        (20971520, 0, 8589934592)
    """
    errors = [(match.start(), requested) for match in _ASKED.finditer(text) if (requested := _bytes(match)) is not None]
    if not errors:
        raise FileFormatError(
            "no out-of-memory error of PyTorch is in the text",
            hint="give a memory snapshot, the log of the run, or the caught torch.OutOfMemoryError",
        )
    start, requested = errors[-1]
    said = " ".join(text[start : start + 2000].split())
    figures = {name: _first(said, patterns) for name, patterns in _FIGURES.items()}
    unallocated = figures.pop("unallocated_bytes")
    allocated = figures["allocated_bytes"]
    if allocated is not None and unallocated is not None:
        figures["reserved_bytes"] = allocated + unallocated
    device = _DEVICE.search(said)
    return ErrorText(requested_bytes=requested, device=None if device is None else int(device[1]), **figures)


def _first(text: str, patterns: tuple[str, ...]) -> int | None:
    found = next((match for pattern in patterns if (match := re.search(pattern, text))), None)
    return None if found is None else _bytes(found)


def _bytes(match: re.Match[str]) -> int | None:
    try:
        return parse_bytes(f"{match[1]}{'B' if match[2] == 'bytes' else match[2]}")
    except UnitError:
        return None
