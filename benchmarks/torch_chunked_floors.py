"""How far chunking lowers what a step needs at least: floors and smallest peaks of networks, with and without.

A *floor* is proven: no plan of any order peaks lower. With ``chunking="auto"`` it is the lowest of all sets of regions that were
tried. The *smallest peak* is that of a plan that was found, and that is run here. In `unet` the step is forward, loss and
backward, and gradients are kept; in `unet_updated` SGD updates the parameters in it, each gradient as soon as it is there. Each
row has a fresh process on one thread.

The promises checked: measured peaks are the planned ones, to 64 bytes, and floors and smallest peaks fall by at least what
`ASKED` has. Exit status 1 if one breaks.

    python benchmarks/torch_chunked_floors.py [--models unet] [--time-limit 10]
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from fresh import by_model, child, mib, ran_on
from models import build

UPDATED = "_updated"
NETWORKS = ("unet", "resnet50", "mobilenet_v2", "vit", "gpt2")
MODELS = tuple(network + kind for network in NETWORKS for kind in ("", UPDATED))
ASKED = {"unet": 0.25, "unet_updated": 0.25, "mobilenet_v2": 0.25, "mobilenet_v2_updated": 0.25, "gpt2": 0.25}
"""Least share of the floor above the resident memory by which it falls."""
ROUNDING_BYTES = 64


def main() -> int:
    """Run the benchmark, or one child of it."""
    return by_model(__file__, str(__doc__), MODELS, run=run, table=table, verdict=verdict)


def run(name: str, time_limit_s: float, rounds: int) -> dict[str, Any]:
    """Child: a model without and with chunking, each in a process of its own, or one of them."""
    if name in MODELS:
        return {how: child(__file__, f"{name}-{how}", str(time_limit_s), str(rounds)) for how in ("off", "auto")}
    import torch

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    return smallest(*name.split("-"), time_limit_s)


def smallest(name: str, chunking: str, time_limit_s: float) -> dict[str, Any]:
    """Floor and smallest peak of a step, above what is resident, and the peak of the step that runs within that."""
    import torch

    import checkmate.torch
    from checkmate import InfeasibleBudgetError

    case = build(name.removesuffix(UPDATED))
    optimizer = torch.optim.SGD(case.model.parameters(), 0.01) if name.endswith(UPDATED) else None
    options: dict[str, Any] = {"example": case.batch, "optimizer": optimizer}
    resident = checkmate.torch.capture(case.model, costs="estimated", **options).resident_bytes
    options |= {"chunking": chunking, "time_limit_s": time_limit_s}
    try:
        checkmate.torch.compile(case.model, budget=resident + 1, **options)
    except InfeasibleBudgetError as refused:
        found = refused
    else:
        raise RuntimeError(f"{name} needs no memory")
    assert found.smallest_bytes is not None
    step = checkmate.torch.compile(case.model, budget=found.smallest_bytes, **options)
    for _ in range(2):
        step(**case.batch)
        case.model.zero_grad(set_to_none=True)
    return {
        "resident_bytes": resident,
        "floor_bytes": found.floor_bytes - resident,
        "binding_op": found.binding_op,
        "smallest_bytes": found.smallest_bytes - resident,
        "planned_bytes": step.result.peak_bytes - resident,
        "overhead": step.result.overhead,
        "remarks": [remark for remark in step.result.remarks if "pieces" in remark],
        "peak_bytes": checkmate.torch.measure_peak(lambda: step(**case.batch)[1]),
    }


def verdict(name: str, row: dict[str, Any]) -> list[str]:
    """Promises that a row breaks, in words."""
    broken = [
        f"{name}, {chunking}: measured {found['peak_bytes']} bytes, planned {found['planned_bytes']}"
        for chunking, found in row.items()
        if abs(found["peak_bytes"] - found["planned_bytes"]) > ROUNDING_BYTES
    ]
    if name in ASKED and fall(row, "floor_bytes") < ASKED[name]:
        broken.append(f"{name}: the floor falls by {fall(row, 'floor_bytes'):.1%}, asked {ASKED[name]:.0%}")
    if fall(row, "smallest_bytes") < 0:
        broken.append(f"{name}: the smallest peak is larger with chunking")
    return broken


def fall(row: dict[str, Any], what: str) -> float:
    """By which share of itself a figure falls with chunking."""
    return 1 - row["auto"][what] / row["off"][what]


def table(report: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "# Floors with and without chunking",
        "",
        "Made by `benchmarks/torch_chunked_floors.py`; do not edit. MiB above the resident memory (parameters, buffers, batch),",
        "which every plan has besides. *Floor* is proven: no plan of any order peaks lower; with chunks it is the lowest of all",
        "sets of regions that were tried. *Smallest* is the peak of a plan that was found, *measured* that of its run. *Time*",
        "is the planned one, of keeping everything without chunks. In rows with *updated* SGD is part of the step, so that no",
        "gradient is kept to its end.",
        "",
        ran_on(report),
        "",
        "| model | resident | floor | with chunks | | smallest | with chunks | | measured | time | set by | with chunks |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    for name, row in report["models"].items():
        off, auto = row["off"], row["auto"]
        lines.append(
            f"| {name.replace('_updated', ', updated')} | {mib(off['resident_bytes'])} | {mib(off['floor_bytes'])} | "
            f"{mib(auto['floor_bytes'])} | {-fall(row, 'floor_bytes'):+.0%} | {mib(off['smallest_bytes'])} | "
            f"{mib(auto['smallest_bytes'])} | {-fall(row, 'smallest_bytes'):+.0%} | {mib(auto['peak_bytes'])} | "
            f"{auto['overhead']:.2f} | {binding(off)} | {binding(auto)} |"
        )
    return "\n".join([*lines, ""])


def binding(found: dict[str, Any]) -> str:
    """What sets a floor."""
    return f"`{found['binding_op']}`" if found["binding_op"] else "kept gradients"


if __name__ == "__main__":
    sys.exit(main())
