"""Draw the pictures of the documents: `python docs/images/make.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import checkmate
import checkmate.torch
from checkmate.doctor import digits
from checkmate.plot import memory_timeline, schedule, themed_svg

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "examples"))
import large_vocabulary  # noqa: E402 - beside the documents, not in a package


def main() -> None:
    torch.set_num_threads(1)
    demo()
    one_large_array()


def one_large_array() -> None:
    """Memory of `examples/large_vocabulary.py`, with and without pieces."""
    _, _, whole = large_vocabulary.compiled("off", budget="100%")
    _, _, step = large_vocabulary.compiled("auto", large_vocabulary.SMALL)
    keep_all, mine = (
        checkmate.simulate(each.graph, each.result.plan) for each in (whole, step)
    )
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    memory_timeline(
        figure.subplots(),
        mine,
        keep_all=keep_all,
        budget_bytes=step.result.budget_bytes,
        title="A vocabulary of 32,000: head and loss piece by piece",
    )
    (HERE / "one_large_array.svg").write_text(themed_svg(figure))


def demo() -> None:
    """Memory and schedule of `checkmate demo`."""
    (x, y), _ = digits.data()
    model = digits.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    example = (x[: digits.BATCH], y[: digits.BATCH])
    graph = checkmate.torch.capture(
        model, nn.CrossEntropyLoss(), example=example, optimizer=optimizer
    )
    problem = checkmate.Problem(graph, "50%")
    result = checkmate.solve(problem)
    keep_all = checkmate.simulate(
        graph, checkmate.Plan.from_order(graph, range(len(graph.ops)))
    )
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    memory_timeline(
        figure.subplots(),
        checkmate.simulate(graph, result.plan),
        keep_all=keep_all,
        budget_bytes=problem.budget_bytes,
        title=f"One training step of checkmate demo: half of its activations, {result.overhead:.2f}x the cost",
    )
    (HERE / "memory.svg").write_text(themed_svg(figure))
    raster = Figure(figsize=(8.4, 5.0), layout="constrained")
    schedule(
        raster.subplots(),
        graph,
        result.plan,
        title="The schedule: ops computed in each stage, values held at its start",
    )
    (HERE / "schedule.svg").write_text(themed_svg(raster))


if __name__ == "__main__":
    main()
