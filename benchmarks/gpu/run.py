"""The evidence from a GPU: every promise measured on the card at hand, in parts that can be resumed.

    python benchmarks/gpu/run.py                        # all parts on the first GPU; a second call continues
    python benchmarks/gpu/run.py --parts peaks:gpt2     # some of them
    python benchmarks/gpu/run.py --device cpu --tiny    # a rehearsal without a GPU

Each part is a process of its own that takes at most eight minutes, and leaves one JSON with what it ran on. Nothing is
downloaded. A part that is there already, from the same versions and hardware, is not run again. Exit status 1 if a promise is
broken or a part failed. `python benchmarks/table.py` prints the results.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "src")]

MODELS = ("gpt2", "llama_1b", "bert", "vit_l", "resnet50", "unet", "dit", "mixtral")
KINDS = ("peaks", "front", "reserved", "offload", "inductor")
PARTS = tuple(f"{kind}:{model}" for kind in KINDS for model in MODELS)
"""All parts, in the order in which they are run: what decides most comes first."""

FORMAT = "checkmate.gpu/1"

CLOCK = 1.03
"""How much slower ours may seem at another's peak: times of one step differ by as much from run to run."""

GRACE_S = 45.0
"""Seconds beyond its limit after which a part is ended: it looks at the clock between variants."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of milliseconds, to rehearse")
    parser.add_argument(
        "--parts", nargs="+", default=None, metavar="PART", help="kinds, models or parts: peaks, gpt2, peaks:gpt2"
    )
    parser.add_argument("--out", type=Path, default=None, help="folder of the results; benchmarks/gpu/results for a GPU")
    parser.add_argument("--minutes", type=float, default=8.0, help="limit of a part")
    parser.add_argument("--here", action="store_true", help="run parts in this process, to debug")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu needs --tiny: the models at full size are for a GPU")
    folder = options.out or HERE / ("results" if options.device == "cuda" and not options.tiny else "rehearsal")
    if options.child:
        write(folder, options.child, measured(options.child, options))
        return 0
    chosen = chosen_parts(options.parts, parser)
    found = [known_or_run(part, folder, options) for part in chosen]
    broken = [f"{part}: {line}" for part, known in zip(chosen, found, strict=True) for line in verdict(known)]
    print("\n".join(broken) or f"all promises hold in {len(chosen)} parts")
    return bool(broken)


def known_or_run(part: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What a part left before with this device, size and versions, or what it leaves now."""
    known = read(folder, part)
    if known is None or "failed" in known or not same_setting(known, options):
        return run_part(part, folder, options)
    return known


def chosen_parts(asked: Sequence[str] | None, parser: argparse.ArgumentParser) -> list[str]:
    """The parts that are asked for, in the order of `PARTS`."""
    unknown = [a for a in asked or () if not any(a == p or a in p.split(":") for p in PARTS)]
    if unknown:
        parser.error(f"no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    return [p for p in PARTS if asked is None or any(a == p or a in p.split(":") for a in asked)]


def same_setting(known: dict[str, Any], options: argparse.Namespace) -> bool:
    """Whether a result is from this device, size and versions."""
    import measure

    settings = {"device": options.device, "tiny": options.tiny, "versions": measure.software()}
    gpus = [hardware.get("gpu", {}).get("name") for hardware in (known.get("hardware", {}), measure.machine(options.device))]
    return all(known.get(name) == value for name, value in settings.items()) and gpus[0] == gpus[1]


def run_part(part: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a part, in a process of its own or here, and return what it left."""
    began = time.perf_counter()
    if options.here:
        write(folder, part, measured(part, options))
    else:
        command = [sys.executable, "-W", "ignore", __file__, "--child", part, "--device", options.device]
        command += ["--minutes", str(options.minutes), "--out", str(folder), *(["--tiny"] if options.tiny else [])]
        path_of(folder, part).unlink(missing_ok=True)
        try:
            settings, limit_s = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, 60 * options.minutes + GRACE_S
            code = subprocess.run(command, env=settings, timeout=limit_s, check=False).returncode
            reason = f"it ended with status {code}"
        except subprocess.TimeoutExpired:
            reason = f"it took more than {options.minutes:g} minutes"
        if read(folder, part) is None:
            write(folder, part, {"format": FORMAT, "part": part, "failed": reason})
    known = read(folder, part)
    assert known is not None
    state = "failed" if "failed" in known else f"{len(known.get('left_out', []))} left out" if known.get("left_out") else "done"
    print(f"{part}: {state}, {time.perf_counter() - began:.0f} s", flush=True)
    return known


def measured(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """The result of a part, measured in this process."""
    import logging

    import measure
    import parts

    logging.disable(logging.WARNING)
    kind, _, model = part.partition(":")
    limit_s = 60 * options.minutes
    setting = parts.Setting(
        device=options.device,
        tiny=options.tiny,
        deadline=time.perf_counter() + limit_s,
        solve_s=3.0 if options.tiny else 15.0,
        rounds=2 if options.tiny else 5,
    )
    began = time.perf_counter()
    result: dict[str, Any] = {"format": FORMAT, "part": part, "device": options.device, "tiny": options.tiny}
    result |= {"hardware": measure.machine(options.device), "versions": measure.software()}
    try:
        result["result"] = parts.KINDS[kind](setting, model)
    except Exception as error:  # noqa: BLE001 - what a GPU raises is what the part is there to show
        result["failed"] = f"{type(error).__name__}: {error}"[:2000]
        result["traceback"] = traceback.format_exc()[-4000:]
    return {**result, "left_out": setting.left_out, "elapsed_s": round(time.perf_counter() - began, 1)}


def verdict(known: dict[str, Any]) -> list[str]:
    """Promises that a part's rows break, in words."""
    if "failed" in known:
        return [f"failed: {known['failed']}"]
    kind, result = known["part"].partition(":")[0], known["result"]
    broken: list[str] = []
    if kind == "peaks":
        for row in result["points"]:
            broken += not_as_planned(row["budget"], row)
            if row.get("reserved_bytes", 0) > 1.05 * row["planned_bytes"]:
                broken.append(f"{row['budget']}: reserved {row['reserved_bytes']}, planned {row['planned_bytes']}")
    if kind in ("front", "inductor") and not known["tiny"]:
        broken += beaten(result["variants"], known["left_out"])
    if kind == "offload":
        broken += copied(result["points"], tiny=known["tiny"])
    if kind == "reserved":
        for row in result["points"]:
            if row.get("reserved_bytes", 0) > row["budget_bytes"]:
                broken.append(f"{row['budget']}: reserved {row['reserved_bytes']}, budget {row['budget_bytes']}")
    return broken


def not_as_planned(name: str, row: dict[str, Any]) -> list[str]:
    """What is wrong with the peak or the bits of a step."""
    broken: list[str] = []
    if name != "keep all" and row["allocated_bytes"] > row["budget_bytes"]:
        broken.append(f"{name}: measured {row['allocated_bytes']}, budget {row['budget_bytes']}")
    if abs(row["allocated_bytes"] - row["planned_bytes"]) > 0.01 * row["planned_bytes"]:
        broken.append(f"{name}: measured {row['allocated_bytes']}, planned {row['planned_bytes']}")
    if row.get("bits_again", row.get("bits")) != row.get("bits"):
        broken.append(f"{name}: other bits in a second step")
    if row.get("identical") is False:
        broken.append(f"{name}: not equal to the bit to keeping everything")
    return broken


def copied(points: list[dict[str, Any]], *, tiny: bool) -> list[str]:
    """Steps that copy to the host and break a budget, a bit or a count of bytes, or are slower than those that do not."""
    broken: list[str] = []
    times = {row["name"]: row["time_s"] for row in points}
    for row in points:
        name = row["name"]
        broken += not_as_planned(name, row)
        if row.get("host_bytes") != row.get("planned_host_bytes"):
            broken.append(f"{name}: {row['host_bytes']} bytes on the host, planned {row['planned_host_bytes']}")
        alone = times.get(name.replace(", host", ", alone"))
        if not tiny and name.endswith(", host") and alone is not None and row["time_s"] > CLOCK * alone:
            broken.append(f"{name}: {row['time_s']:.4f} s, without copies {alone:.4f} s")
    return broken


def beaten(variants: list[dict[str, Any]], left_out: Sequence[str] = ()) -> list[str]:
    """Other ways that take less memory than any plan, or less time than the fastest plan at their peak.

    A peak at which no plan was tried for want of time, as ``left_out`` says, is not judged.
    """
    broken: list[str] = []
    for other in (v for v in variants if not v.get("ours")):
        peak, time_s = other["allocated_bytes"], other["time_s"]
        best = min((v["time_s"] for v in variants if v.get("ours") and v["allocated_bytes"] <= peak), default=math.inf)
        if best == math.inf and f"ours, {peak}: no time left" not in left_out:
            broken.append(f"{other['name']} takes {peak} bytes, and no plan as little")
        elif CLOCK * time_s < best < math.inf:
            broken.append(f"{other['name']}: {time_s:.4f} s, the fastest plan at its peak {best:.4f} s")
    return broken


def path_of(folder: Path, part: str) -> Path:
    """The file of a part."""
    return folder / f"{part.replace(':', '-')}.json"


def read(folder: Path, part: str) -> dict[str, Any] | None:
    """What a part left; None if it has not run, or left something else."""
    try:
        found = json.loads(path_of(folder, part).read_text())
    except (OSError, ValueError):
        return None
    return found if found.get("format") == FORMAT else None


def write(folder: Path, part: str, result: dict[str, Any]) -> None:
    """Write what a part measured: the whole file or none."""
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, part)
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(result, indent=1) + "\n")
    draft.replace(path)


if __name__ == "__main__":
    sys.exit(main())
