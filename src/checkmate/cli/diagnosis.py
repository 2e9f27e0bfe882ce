"""``checkmate doctor``, ``oom``, ``devices`` and ``solvers``: checks of an installation, a GPU that was full, and lists."""

from __future__ import annotations

import dataclasses
import json as json_format
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from checkmate.cli import terminal
from checkmate.cli.options import Count
from checkmate.core.errors import OptionError
from checkmate.core.units import format_bytes, parse_bytes
from checkmate.cost.device import FORMAT, Device, device_names, load_device
from checkmate.oom import OutOfMemory, of_snapshot, of_text, read_snapshot
from checkmate.solvers.registry import available

if TYPE_CHECKING:
    from checkmate.doctor import Check

_MARKS = {"ok": "ok", "note": "note", "failed": "FAILED"}


def doctor(*, device: Literal["cpu", "cuda"] | None = None, quick: bool = False, json: terminal.Json = False) -> int:
    """Check versions, caches and solvers, and run small training steps through every path.

    Each step runs with a plan and keeping everything: its measured peak is compared with the planned one and the budget, and its
    bits with those of keeping everything. The exit code is 0 if no check failed.

    Args:
        device: Where the steps run; the first GPU if PyTorch finds one, else the CPU.
        quick: Leave out the steps that Inductor compiles, which take most of the time.
        json: Print the report as one JSON object on stdout, to attach to a bug report.
    """
    from checkmate.doctor import examine

    with terminal.drawn("checking") as say:
        report = examine(device, quick=quick, on_check=(lambda check: None) if json else _tell, on_start=say)
    rows = [_step(check) for check in report.checks if "measured_bytes" in check.figures]
    counts = {verdict: sum(check.verdict == verdict for check in report.checks) for verdict in _MARKS}
    told = ", ".join(f"{count} {_MARKS[verdict].lower()}" for verdict, count in counts.items() if count)
    return terminal.VerbOutput(
        data=report.as_json(),
        header=("<step", "budget", "planned", "measured", "reserved", "bits", "time"),
        rows=rows,
        lines=[
            "peaks with everything that is allocated; time is relative to keeping everything" if rows else "",
            f"{len(report.checks)} checks in {report.elapsed_s:.0f} s: {told}",
        ],
        hint="" if report.holds else "cure what failed, from the first to the last; attach `doctor --json` to a bug report",
        code=0 if report.holds else 1,
    ).show(json)


def _tell(check: Check) -> None:
    """Print a check: a line with its verdict, and the action to take, if any."""
    indent = 25
    head = f"{_MARKS[check.verdict]:<9}{check.name:<{indent - 10}} "
    text = [check.detail] + ([f"do: {check.cure}"] if check.cure else [])
    wrapped = [line for part in text for line in textwrap.wrap(part, 80 - indent, break_on_hyphens=False)]
    terminal.say(*(f"{head if k == 0 else ' ' * indent}{line}" for k, line in enumerate(wrapped)))


def _step(check: Check) -> list[str]:
    figures = check.figures
    amounts = [figures[f"{name}_bytes"] for name in ("budget", "planned", "measured", "reserved")]
    return [
        check.name,
        *("-" if size_bytes is None else format_bytes(size_bytes) for size_bytes in amounts),
        {True: "equal", False: "DIFFER", None: "-"}[figures["identical"]],
        f"{figures['time_ratio']:.2f}x",
    ]


def oom(file: Path, /, *, device: int | None = None, limit: str = "2GiB", most: Count = 10, json: terminal.Json = False) -> int:
    """Tell what filled the memory of a GPU, why an allocation failed, and which budget would fit. No code of the file is run.

    Args:
        file: Memory snapshot of torch.cuda.memory._dump_snapshot, or the log of a run that ended with an out-of-memory error.
        device: Index of the device; by default that of the error, else that with the most reserved memory.
        limit: Largest snapshot to read. In memory it takes about ten times as much.
        most: Maximum number of lines in each list.
        json: Print one JSON object on stdout, with the complete lists.
    """
    log = _log(file)
    found = of_text(log) if log is not None else of_snapshot(read_snapshot(file, parse_bytes(limit)), device)
    return terminal.VerbOutput(data=_oom_data(found, file), lines=found.render(most).split("\n")).show(json)


def _log(path: Path) -> str | None:
    """The end of a text file; None for a pickle, which starts with a byte that no text has."""
    most_bytes = 64 << 20
    try:
        with path.open("rb") as file:
            if file.read(1) == b"\x80":
                return None
            file.seek(max(0, path.stat().st_size - most_bytes))
            return file.read(most_bytes).decode(errors="replace")
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror or error}", hint="give a memory snapshot or a log") from None


def _oom_data(found: OutOfMemory, file: Path) -> dict[str, Any]:
    sizes = ("requested", "missing", "total", "device_free", "allocated", "reserved", "cached", "largest_free")
    return {
        "file": str(file),
        **terminal.picked(found, "moment", "device", "cause", *(f"{size}_bytes" for size in (*sizes, "available"))),
        **terminal.picked(found, "budget", "line"),
        "advice": list(found.advice()),
        "by_kind": [terminal.picked(holder, "kind", "size_bytes", "blocks") for holder in found.by_kind()],
        "by_line": [holder._asdict() for holder in found.holders],
    }


def devices(name: str | None = None, /, *, json: terminal.Json = False) -> int:
    """List the devices that `checkmate fits` knows, or show one with the source of every figure.

    Args:
        name: Name of a device, or path of a profile.
        json: Print one JSON object on stdout; for a single device it is a profile that you can edit.
    """
    if name is not None:
        return _device(load_device(name)).show(json)
    known = [load_device(each) for each in device_names()]
    return terminal.VerbOutput(
        data={"devices": [_profile(device) for device in known]},
        header=("<device", "memory", "float32", "tf32", "bfloat16", "traffic"),
        rows=[
            [
                device.name,
                format_bytes(device.memory_bytes),
                *(_tera(device.peak_flop_per_s.get(dtype)) for dtype in ("float32", "tf32", "bfloat16")),
                f"{device.bytes_per_s / 1e9:g}",
            ]
            for device in known
        ],
        lines=["peak rates in TFLOP/s, dense; memory traffic in GB/s"],
        hint="list the sources of a device's figures with `checkmate devices H100`",
    ).show(json)


def _device(device: Device) -> terminal.VerbOutput:
    peaks = ", ".join(f"{dtype} {_tera(peak)}" for dtype, peak in device.peak_flop_per_s.items())
    figures = {name: value for name, value in _profile(device).items() if isinstance(value, int)}
    return terminal.VerbOutput(
        data=_profile(device),
        facts=[
            ("device", f"{device.name}, {device.about}"),
            ("peak_flop_per_s", f"in TFLOP/s: {peaks}"),
            *((name, _figure(name, value)) for name, value in figures.items()),
        ],
        lines=[
            f"{title:<11}{field}: {note}"
            for title, notes in (("published", device.sources), ("assumed", device.assumed))
            for field, note in sorted(notes.items())
        ],
        hint=f"write your own profile, starting from `checkmate devices {json_format.dumps(device.name)} --json`",
    )


def _figure(name: str, value: int) -> str:
    """A figure of a profile in the unit of its name."""
    if name.endswith("_bytes"):
        return format_bytes(value)
    return f"{value / 1e9:g} GB/s" if name.endswith("_per_s") else f"{value} {name.rpartition('_')[2]}"


def _tera(flop_per_s: int | None) -> str:
    return "-" if flop_per_s is None else f"{flop_per_s / 1e12:g}"


def _profile(device: Device) -> dict[str, object]:
    return {"format": FORMAT, **msgspec.to_builtins(device)}


def solvers(*, json: terminal.Json = False) -> int:
    """List the installed solvers with their options.

    Args:
        json: Print one JSON object on stdout.
    """
    listed = [
        (name, " ".join((kind.__doc__ or "").strip().partition("\n\n")[0].split()), kind) for name, kind in available().items()
    ]
    return terminal.VerbOutput(
        data={"solvers": [{"name": name, "about": about, "options": _options(kind)} for name, about, kind in listed]},
        header=("<solver", "<method", "<options"),
        rows=[(name, about, ", ".join(f"{o}={d}" for o, d in _options(kind).items())) for name, about, kind in listed],
        hint="choose one with `checkmate plan GRAPH --budget 8GiB --solver NAME`",
    ).show(json)


def _options(kind: type) -> dict[str, str]:
    if not dataclasses.is_dataclass(kind):
        return {}
    return {field.name: str(field.default) for field in dataclasses.fields(kind) if field.init}
