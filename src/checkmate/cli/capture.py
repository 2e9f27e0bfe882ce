"""``checkmate capture``: write the graph of a training step to a file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from checkmate.cli import amounts, files, targets, terminal
from checkmate.cli.extras import needs
from checkmate.core.budget import keep_all_bytes
from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.units import format_bytes, format_cost


def capture(
    target: str,
    /,
    *,
    optimizer: str | None = None,
    whole: Annotated[bool, Parameter(negative="--plain-loop")] = True,
    device: str | None = None,
    batch: int | None = None,
    chunking: Literal["off", "exact", "auto"] = "off",
    out: Path | None = None,
    json: terminal.Json = False,
) -> int:
    """Write the graph of a training step of PyTorch or JAX to a file. Only single ops run, to measure their costs.

    Args:
        target: FILE.py:FUNCTION or MODULE:FUNCTION, where FUNCTION() returns (model, loss, example) or (model, loss, optimizer,
            example), and example is (x, y); for JAX (step, arguments), a function and the tuple of its arguments.
        optimizer: sgd, momentum, adam or adamw: its state counts as resident, and its updates are in the graph. By default that
            of FUNCTION, if it returns one.
        whole: Whether the graph is a step of checkmate.torch.compile, which takes a plan of it. With --plain-loop it is that of
            the model alone, and the backend takes a plan of it.
        device: Name of a device that need not be present, as listed by `checkmate devices`, or path of a profile.
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
    found = targets.returned(target, targets.with_batch(function, batch))
    if targets.is_jax_step(found):
        if optimizer or device or not whole:
            raise OptionError(
                f"{target} is a step of JAX, which has its updates in it", hint="leave out --optimizer, --device and --plain-loop"
            )
        graph = _jax_graph(target, found)
    else:
        needs("torch", "torch")
        graph = _torch_graph(targets.checked(target, found), target, optimizer, whole, device, chunking)
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


def _torch_graph(
    built: targets.Built,
    target: str,
    optimizer: str | None,
    whole: bool,
    device: str | None,
    chunking: Literal["off", "exact", "auto"],
) -> Graph:
    import checkmate.torch

    with targets.tracing(target):
        return checkmate.torch.capture(
            built.model,
            built.loss,
            example=built.example,
            optimizer=built.optimizer if optimizer is None else targets.optimizer_named(optimizer, built.model),
            plain_loop=not whole,
            device=device,
            chunking=chunking,
        )


def _jax_graph(target: str, found: Any) -> Graph:
    import checkmate.jax

    step, arguments = found
    with targets.tracing(target):
        return checkmate.jax.capture(step, *arguments)
