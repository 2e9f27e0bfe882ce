"""``checkmate capture``: write the graph of a training step to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from checkmate.cli import amounts, files, targets, terminal
from checkmate.cli.extras import needs
from checkmate.core.budget import keep_all_bytes
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
    """Write the graph of a PyTorch model's training step to a file. Only single ops run, to measure their costs.

    Args:
        target: FILE.py:FUNCTION or MODULE:FUNCTION, where FUNCTION() returns (model, loss, example) and example is (x, y).
        batch: Call FUNCTION(batch) instead of FUNCTION(); `checkmate max-batch` finds the largest batch from two captures.
        chunking: Run those ops piece by piece that make the smallest peak lower: where no bit changes, or also with sums.
        out: Graph file to write; by default the name comes from the file or module.
        json: Print one JSON object on stdout.

    Returns:
        The exit code.
    """
    needs("torch", "torch")
    import checkmate.torch

    function = targets.resolve(target)
    where = target.rpartition(":")[0]
    stem = Path(where).stem if where.endswith(".py") else where.rpartition(".")[2]
    path = out or Path(stem + ("" if batch is None else f"-batch{batch}") + ".graph.json")
    outputs = files.Outputs(targets.source(target))
    outputs.check(path)
    model, loss, example = targets.built(target, function if batch is None else lambda: function(batch))
    with targets.tracing(target):
        graph = checkmate.torch.capture(model, loss, example=example, chunking=chunking)
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
