"""The smallest budget that `min_budget` finds for training steps, beside the proven floor of every plan's peak.

    python benchmarks/smallest_budgets.py                  # three minutes on one core
    python benchmarks/smallest_budgets.py --only "vit step" unet   # these only; the others keep their rows

The steps: those of `graphs/`, captured from PyTorch and of the paper's cost model, and steps captured here from the models of
`models.py` and from `examples/gpt2.py`. Each has the 20 seconds that `min_budget` takes by default, most end earlier. Sizes
are exact, and costs do not matter.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import checkmate
import checkmate.torch
from checkmate import Graph

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from models import MODELS, build
from solvers import GRAPHS, read

from examples.gpt2 import build as build_example

RESULTS = HERE / "results" / "smallest_budgets.json"
EXAMPLE = "examples/gpt2.py"
CLOSE = 0.005
"""How far above its floor a budget may be to count as close to it, as a share of the floor."""


@dataclass(frozen=True, slots=True)
class Row:
    """One step.

    Attributes:
        resident_bytes: Parameters and other memory that no plan changes.
        floor_bytes: Proven: no plan has a smaller peak. Resident bytes are included, as in all peaks.
        smallest_bytes: The smallest peak for which a plan was found.
        op: The op that sets the floor, or "" if the values that stay at the end do.
        elapsed_s: Wall seconds of the search.
    """

    step: str
    ops: int
    resident_bytes: int
    floor_bytes: int
    smallest_bytes: int
    op: str
    elapsed_s: float

    @property
    def excess(self) -> float:
        """Share of the floor by which the smallest budget found is above it."""
        return self.smallest_bytes / self.floor_bytes - 1

    @property
    def step_excess(self) -> float:
        """The same of what is above resident bytes."""
        return (self.smallest_bytes - self.resident_bytes) / (self.floor_bytes - self.resident_bytes) - 1


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


def measure(step: str, graph: Graph) -> Row:
    """The smallest budget of one step."""
    found = checkmate.min_budget(graph)
    return Row(
        step=step,
        ops=len(graph.ops),
        resident_bytes=graph.resident_bytes,
        floor_bytes=found.floor_bytes,
        smallest_bytes=found.peak_bytes,
        op=found.binding_op,
        elapsed_s=round(found.elapsed_s, 1),
    )


def main() -> None:
    """Measure the steps and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of steps")
    options = parser.parse_args()
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": [], "where": {}}
    rows = {row["step"]: Row(**row) for row in stored["rows"]}
    stored["where"] = {
        "cpu": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "numba", "numpy")},
    }
    for step, graph in steps(options.only):
        rows[step] = measure(step, graph)
        print(*asdict(rows[step]).values(), f"{100 * rows[step].excess:.2f} %", file=sys.stderr, flush=True)
        RESULTS.write_text(
            json.dumps({"where": stored["where"], "rows": [asdict(row) for row in rows.values()]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
