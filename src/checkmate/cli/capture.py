"""``checkmate capture``: write the graph of a training step to a file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from checkmate.cli import amounts, files, targets, terminal
from checkmate.cli.extras import needs
from checkmate.core.budget import keep_all_bytes
from checkmate.core.graph import Graph
from checkmate.core.units import format_bytes, format_cost


def capture(
    target: str,
    /,
    *,
    batch: int | None = None,
    chunking: Literal["off", "exact", "auto"] = "off",
    out: Path | None = None,
    json: terminal.Json = False,
) -> int:
    """Write the graph of a training step of PyTorch or JAX to a file. Only single ops run, to measure their costs.

    Args:
        target: FILE.py:FUNCTION or MODULE:FUNCTION, where FUNCTION() returns (model, loss, example) and example is (x, y); for
            JAX (step, arguments), a function and the tuple of its arguments.
        batch: Call FUNCTION(batch) instead of FUNCTION(); `checkmate max-batch` finds the largest batch from two captures.
        chunking: Run those ops piece by piece that make the smallest peak lower: where no bit changes, or also with sums.
            PyTorch only.
        out: Graph file to write; by default the name comes from the file or module.
        json: Print one JSON object on stdout.

    Returns:
        The exit code.
    """
    if find_spec("jax") is None:
        needs("torch", "torch")
    function = targets.resolve(target)
    where = target.rpartition(":")[0]
    stem = Path(where).stem if where.endswith(".py") else where.rpartition(".")[2]
    path = out or Path(stem + ("" if batch is None else f"-batch{batch}") + ".graph.json")
    outputs = files.Outputs(targets.source(target))
    outputs.check(path)
    found = targets.returned(target, function if batch is None else lambda: function(batch))
    graph = _jax_graph(target, found) if targets.is_jax_step(found) else _torch_graph(target, found, chunking)
    outputs.save((graph, path))
    keep_all = keep_all_bytes(graph)
    if json:
        terminal.emit(
            {
                "graph": str(path),
                "graph_digest": graph.digest,
                "ops": len(graph.ops),
                "values": len(graph.values),
                "resident_bytes": graph.resident_bytes,
                "keep_all_bytes": keep_all,
                "cost": graph.cost,
                "cost_unit": graph.cost_unit,
            }
        )
        return 0
    terminal.facts(
        [
            ("graph", amounts.describe_graph(graph, path)),
            ("resident", f"{format_bytes(graph.resident_bytes)}: parameters and other memory that no plan changes"),
            ("keep-all", f"{format_bytes(keep_all)} at the peak, resident memory included"),
            ("cost", f"{format_cost(graph.cost, graph.cost_unit)} to compute every op once"),
        ]
    )
    terminal.closing([path], f"plan it with `checkmate plan {path} --budget 50%`")
    return 0


def _torch_graph(target: str, found: Any, chunking: Literal["off", "exact", "auto"]) -> Graph:
    needs("torch", "torch")
    import checkmate.torch

    model, loss, example = targets.checked(target, found)
    with targets.tracing(target):
        return checkmate.torch.capture(model, loss, example=example, chunking=chunking)


def _jax_graph(target: str, found: Any) -> Graph:
    import checkmate.jax

    step, arguments = found
    with targets.tracing(target):
        return checkmate.jax.capture(step, *arguments)
