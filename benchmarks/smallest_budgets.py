"""The smallest budget that `min_budget` finds for training steps, beside the proven floor of every plan's peak.

    python benchmarks/smallest_budgets.py                  # three minutes on one core
    python benchmarks/smallest_budgets.py --only "vit step" unet   # these only; the others keep their rows

The steps: those of `graphs/`, captured from PyTorch and of the paper's cost model, and steps captured here from the models of
`models.py` and from `examples/gpt2.py`. Each has the 20 seconds that `min_budget` takes by default, most end earlier. Sizes
are exact, and costs do not matter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from fresh import add_rows, parser
from models import MODELS, build
from solvers import GRAPHS, read

import checkmate
import checkmate.torch
from checkmate import Graph
from examples.gpt2 import build as build_example

EXAMPLE = "examples/gpt2.py"


def steps(only: list[str] | None) -> Iterator[tuple[str, Graph]]:
    """Names and graphs; those of PyTorch are captured when their turn comes."""
    for name in sorted(path.name.removesuffix(".graph.json") for path in GRAPHS.glob("*.graph.json")):
        if only is None or name in only:
            yield name, read(name)
    if only is None or EXAMPLE in only:
        model, loss, example = build_example()
        yield EXAMPLE, checkmate.torch.capture(model, loss, example=example, costs="estimated")  # pyright: ignore[reportArgumentType]
    for name in MODELS:
        if only is None or f"{name} step" in only:
            case = build(name)
            yield f"{name} step", checkmate.torch.capture(case.model, example=case.batch, costs="estimated")


def measure(step: str, graph: Graph) -> dict[str, Any]:
    """The smallest budget of one step, and the op that sets the floor, or "" if the values that stay at the end do."""
    found = checkmate.min_budget(graph)
    return {
        "step": step,
        "ops": len(graph.ops),
        "resident_bytes": graph.resident_bytes,
        "floor_bytes": found.floor_bytes,
        "smallest_bytes": found.peak_bytes,
        "op": found.binding_op,
        "elapsed_s": round(found.elapsed_s, 1),
    }


def main() -> None:
    """Measure the steps and write the JSON."""
    command = parser(__doc__)
    command.add_argument("--only", nargs="*", help="names of steps")
    rows = (measure(step, graph) for step, graph in steps(command.parse_args().only))
    for row in add_rows(__file__, rows, ("step",), packages=("torch", "transformers", "numba")):
        print(f"{row['step']}: {row['smallest_bytes'] / row['floor_bytes'] - 1:.2%} above the floor")


if __name__ == "__main__":
    main()
