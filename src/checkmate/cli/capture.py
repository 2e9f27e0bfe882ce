"""``checkmate capture``: the graph of a training step, as a file."""

from __future__ import annotations

from pathlib import Path

from checkmate.cli import amounts, files, targets, terminal
from checkmate.cli.extras import needs
from checkmate.core.budget import keep_all_bytes
from checkmate.core.units import format_bytes, format_cost


def capture(target: str, /, *, batch: int | None = None, out: Path | None = None, json: terminal.Json = False) -> int:
    """Capture the training step of a PyTorch model as a graph file. Nothing is run.

    Args:
        target: FILE.py:FUNCTION or MODULE:FUNCTION; FUNCTION() returns (model, loss, example), example being (x, y).
        batch: Call FUNCTION(batch) instead of FUNCTION(): two captures give the largest batch (`checkmate max-batch`).
        out: Graph file to write; named after the file or module by default.
        json: Print one JSON object on stdout.

    Returns:
        The exit code.
    """
    needs("torch", "torch")
    import checkmate.torch

    function = targets.resolve(target)
    model, loss, example = targets.built(target, function if batch is None else lambda: function(batch))
    with targets.tracing(target):
        graph = checkmate.torch.capture(model, loss, example=example)
    where = target.rpartition(":")[0]
    stem = Path(where).stem if where.endswith(".py") else where.rpartition(".")[2]
    path = out or Path(stem + ("" if batch is None else f"-batch{batch}") + ".graph.json")
    files.save(graph, path)
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
            ("resident", f"{format_bytes(graph.resident_bytes)}: parameters and what else no plan can change"),
            ("keep-all", f"{format_bytes(keep_all)} at the peak, resident bytes included"),
            ("cost", f"{format_cost(graph.cost, graph.cost_unit)} for computing every op once"),
        ]
    )
    terminal.closing([path], f"plan it with `checkmate plan {path} --budget 50%`")
    return 0
