"""``checkmate oom``: what filled a device's memory when it ran out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkmate.cli import terminal
from checkmate.core.errors import OptionError
from checkmate.core.units import parse_bytes
from checkmate.oom import OutOfMemory, of_snapshot, of_text, read_snapshot

_LOG_BYTES = 64 << 20  # of the end of a log


def oom(file: Path, /, *, device: int | None = None, limit: str = "2GiB", most: int = 10, json: terminal.Json = False) -> int:
    """Tell what filled the memory of a GPU, why an allocation failed, and which budget would fit. No code of the file is run.

    Args:
        file: Memory snapshot of torch.cuda.memory._dump_snapshot, or the log of a run that ended with an out-of-memory error.
        device: Index of the device; by default that of the error, else that with the most reserved memory.
        limit: Largest snapshot to read. In memory it takes about ten times as much.
        most: Maximum number of lines in each list.
        json: Print one JSON object on stdout, with the complete lists.

    Returns:
        The exit code.
    """
    if most < 1:
        raise OptionError(f"--most {most} must be one or more", hint="give the number of lines, such as --most 10")
    log = _log(file)
    found = of_text(log) if log is not None else of_snapshot(read_snapshot(file, parse_bytes(limit)), device)
    if json:
        terminal.emit(_as_json(found, file))
        return 0
    terminal.say(*found.render(most).split("\n"))
    return 0


def _log(path: Path) -> str | None:
    """The end of a text file; None if the file is a pickle, whose first byte no text has."""
    try:
        with path.open("rb") as file:
            if file.read(1) == b"\x80":
                return None
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            return file.read(_LOG_BYTES).decode(errors="replace")
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror or error}", hint="give a memory snapshot or a log") from None


def _as_json(found: OutOfMemory, file: Path) -> dict[str, Any]:
    return {
        "file": str(file),
        "moment": found.moment,
        "device": found.device,
        "cause": found.cause,
        "requested_bytes": found.requested_bytes,
        "missing_bytes": found.missing_bytes,
        "total_bytes": found.total_bytes,
        "device_free_bytes": found.device_free_bytes,
        "outside_bytes": found.outside_bytes,
        "allocated_bytes": found.allocated_bytes,
        "reserved_bytes": found.reserved_bytes,
        "cached_bytes": found.cached_bytes,
        "largest_free_bytes": found.largest_free_bytes,
        "available_bytes": found.available_bytes,
        "budget": found.budget,
        "line": found.line,
        "advice": list(found.advice()),
        "by_kind": [{"kind": h.kind, "size_bytes": h.size_bytes, "blocks": h.blocks} for h in found.by_kind()],
        "by_line": [holder._asdict() for holder in found.holders],
    }
