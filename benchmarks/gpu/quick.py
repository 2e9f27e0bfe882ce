"""The evidence from a GPU in 13 minutes: every promise measured on the card at hand, by plans that were made elsewhere.

    python benchmarks/gpu/quick.py --make-plans         # before, on a machine without a GPU
    python benchmarks/gpu/quick.py                      # the schedule; the last line names the parts that are still to run
    python benchmarks/gpu/quick.py --parts peaks:unet --seconds 480
    python benchmarks/gpu/quick.py --device cpu --tiny  # a rehearsal without a GPU

Each part is a process of its own, and none runs beside it. It leaves one JSON with what it ran on, and more in the folder:
histories of the allocator, and a device profile with measured costs, by which `--make-plans` plans if it is there. Nothing is
downloaded. Exit status 1 if a promise is broken or a part failed.
"""

from __future__ import annotations

import argparse
import contextlib
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

from fresh import ROOT

SCHEDULE = {
    "tests:gpu": 40,
    "reserved:resnet50": 50,
    "reserved:mixtral": 70,
    "peaks:bert": 45,
    "peaks:mixtral": 50,
    "peaks:gpt2": 35,
    "front:resnet50": 75,
    "front:gpt2": 60,
    "inductor:gpt2": 140,
    "updates:gpt2": 50,
    "offload:gpt2": 35,
    "offload:resnet50": 35,
    "graphs:gpt2": 35,
    **{f"costs:{model}": 15 for model in ("llama_1b", "vit_l", "unet", "dit")},
}
"""Parts in their order, and the seconds that each may take: 13 minutes in all."""

MODELS = ("gpt2", "llama_1b", "bert", "vit_l", "resnet50", "unet", "dit", "mixtral")
KINDS = ("peaks", "reserved", "front", "inductor", "updates", "offload", "graphs", "costs")
PARTS = ("tests:gpu", *(f"{kind}:{model}" for kind in KINDS for model in MODELS))

FORMAT = "checkmate.gpu/1"

CLOCK = 1.03
"""How much slower ours may seem at another's peak: times of one step differ by as much from run to run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, or make their plans."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of milliseconds, to rehearse")
    parser.add_argument("--parts", nargs="+", choices=PARTS, metavar="PART", help="of the schedule, or peaks:unet, for example")
    parser.add_argument("--seconds", type=float, help="limit of each part, in place of the schedule's")
    parser.add_argument("--minutes", type=float, default=13.0, help="limit of all parts together")
    parser.add_argument("--out", type=Path, help="folder of the results; benchmarks/gpu/results for a GPU")
    parser.add_argument("--plans", type=Path, default=HERE / "plans", help="folder of the plans")
    parser.add_argument("--make-plans", action="store_true", help="make the plans that are missing, 15 s each")
    parser.add_argument("--here", action="store_true", help="run parts in this process, to debug")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu needs --tiny: the models at full size are for a GPU")
    options.out = options.out or HERE / ("rehearsal" if options.tiny else "results")
    options.out.mkdir(parents=True, exist_ok=True)
    chosen, until = options.parts or list(SCHEDULE), time.perf_counter() + 60 * options.minutes
    if options.make_plans:
        import parts

        measured, shipped = options.out / parts.PROFILE, "H100" if options.device == "cuda" else "CPU"
        profile, time_s = measured if measured.exists() else shipped, 1 if options.tiny else 15
        parts.make_plans(options.plans, chosen, profile, options.device, tiny=options.tiny, time_s=time_s)
        return 0
    broken: list[str] = []
    while chosen and time.perf_counter() + (limit_s := options.seconds or SCHEDULE.get(chosen[0], 60)) <= until:
        part = chosen.pop(0)
        broken += [f"{part}: {line}" for line in verdict(run_part(part, options, limit_s))]
    print("\n".join(broken) or "all promises hold in these parts")
    if chosen:
        print("still to run: --parts", *chosen)
    return bool(broken)


def run_part(part: str, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """Run a part, in a process of its own or here, and return what it left."""
    began, path = time.perf_counter(), options.out / f"{part.replace(':', '-')}.json"
    if options.here:
        measured(part, options, limit_s, path)
    else:
        path.write_text(json.dumps({"format": FORMAT, "part": part, "failed": "it ended before it measured anything"}))
        command = [sys.executable, "-W", "ignore", __file__, "--here", "--parts", part, "--seconds", str(limit_s - 5)]
        command += ["--device", options.device, "--out", str(options.out), "--plans", str(options.plans)]
        settings = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CHECKMATE_CACHE": str(options.out.resolve() / "cache")}
        command += ["--tiny"] if options.tiny else []
        with contextlib.suppress(subprocess.TimeoutExpired):
            quiet = subprocess.DEVNULL
            subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, stdout=quiet, timeout=limit_s, check=False)
    known = json.loads(path.read_text())
    state = "failed" if "failed" in known else f"{len(known['left_out'])} remarks" if known["left_out"] else "done"
    print(f"{part}: {state}, {time.perf_counter() - began:.0f} s", flush=True)
    return known


def measured(part: str, options: argparse.Namespace, limit_s: float, path: Path) -> None:
    """Measure a part in this process; its file is written after every row, and is what is left if the process is ended."""
    began = time.perf_counter()  # imports count
    import logging

    import measure
    import parts

    logging.disable(logging.WARNING)
    kind, _, model = part.partition(":")
    ran = {"format": FORMAT, "part": part, "device": options.device, "tiny": options.tiny}
    ran |= {"hardware": measure.machine(options.device), "versions": measure.software()}

    def keep(**facts: Any) -> None:
        left_out = setting.left_out if facts else [*setting.left_out, "the rest: the process was ended"]
        found = {**ran, "result": setting.rows, "left_out": left_out, "elapsed_s": round(time.perf_counter() - began, 1)}
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps({**found, **facts}, indent=1) + "\n")
        draft.replace(path)

    setting = parts.Setting(
        options.device, options.tiny, began + limit_s, 1 if options.tiny else 5, options.plans, options.out, keep
    )
    try:
        keep(facts=parts.KINDS[kind](setting, model))
    except Exception as error:  # noqa: BLE001 - what a GPU raises is what the part is there to show
        keep(failed=f"{type(error).__name__}: {error}"[:2000], traceback=traceback.format_exc()[-4000:])


def verdict(known: dict[str, Any]) -> list[str]:
    """Promises that a part's rows break, in words."""
    if "failed" in known:
        return [f"failed: {known['failed']}"]
    kind, rows, broken = known["part"].partition(":")[0], known["result"], list[str]()
    if kind == "tests" and known.get("facts", {}).get("status") not in (0, 5):
        broken.append("a test failed, as tests.log says")
    times = {row["name"]: row["time_s"] for row in rows}
    for row in rows if kind in ("peaks", "offload", "reserved") else ():
        # Plans with copies are in bytes as requested, others in blocks.
        allocated = row["requested_bytes" if kind == "offload" else "allocated_bytes"]
        name, planned, reserved = row["name"], row["planned_bytes"], row.get("reserved_bytes", 0)
        if kind == "reserved" and name != "keep all" and reserved > planned:
            broken.append(f"{name}: reserved {reserved}, budget {planned}")
        if kind != "reserved" and (allocated > planned + 64 or allocated < 0.99 * planned):  # some scalars are nobody's
            broken.append(f"{name}: measured {allocated}, planned {planned}")
        if kind == "peaks" and reserved > 1.05 * row["predicted_reserved_bytes"]:
            broken.append(f"{name}: reserved {reserved}, predicted {row['predicted_reserved_bytes']}")
        if row.get("bits_again", row.get("bits")) != row.get("bits"):
            broken.append(f"{name}: other bits in a second step")
        if row.get("identical") is False:
            broken.append(f"{name}: not equal to the bit to keeping everything")
        if row.get("host_bytes", row["planned_host_bytes"]) != row["planned_host_bytes"]:
            broken.append(f"{name}: {row['host_bytes']} bytes on the host, planned {row['planned_host_bytes']}")
        if not known["tiny"] and name == "10% host" and row["time_s"] > CLOCK * times.get("10%", math.inf):
            broken.append(f"{name}: {row['time_s']:.4f} s, without copies {times['10%']:.4f} s")
    return broken + (beaten(rows, known["left_out"]) if kind in ("front", "inductor") and not known["tiny"] else [])


def beaten(rows: list[dict[str, Any]], left_out: Sequence[str] = ()) -> list[str]:
    """Other ways that take less memory than any plan, or less time than the fastest plan at their peak, if one was tried."""
    broken: list[str] = []
    for other in (row for row in rows if not row["ours"]):
        peak, time_s = other["allocated_bytes"], other["time_s"]
        best = min((row["time_s"] for row in rows if row["ours"] and row["allocated_bytes"] <= peak), default=math.inf)
        if best == math.inf and f"ours, {peak}: no time left" not in left_out:
            broken.append(f"{other['name']} takes {peak} bytes, and no plan as little")
        elif CLOCK * time_s < best < math.inf:
            broken.append(f"{other['name']}: {time_s:.4f} s, the fastest plan at its peak {best:.4f} s")
    return broken


if __name__ == "__main__":
    sys.exit(main())
