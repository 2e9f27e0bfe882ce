"""``checkmate capture``: the graph of a training step, as a file."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkmate.cli import amounts, files, terminal
from checkmate.cli.extras import needs
from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.problem import keep_all_bytes
from checkmate.core.units import format_bytes, format_cost

_SHAPE = "give FILE.py:FUNCTION or MODULE:FUNCTION, where FUNCTION() returns (model, loss, example)"


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
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise OptionError(f"cannot read {target!r}", hint=_SHAPE)
    needs("torch", "torch")
    function = _function(where, name)
    built = _call(target, function if batch is None else lambda: function(batch))
    if not isinstance(built, tuple) or len(built) != 3:
        raise OptionError(f"{target} returned {_describe(built)}, not (model, loss, example)", hint=_SHAPE)
    model, loss, example = built
    graph = _traced(target, model, loss, example)
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


def _traced(target: str, model: Any, loss: Any, example: Any) -> Graph:
    """Capture the step; a model that fails while it is traced is bad input, said in the words of its error."""
    import torch

    import checkmate.torch

    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"{target} returned {_describe(model)} for the model, not a torch.nn.Module", hint=_SHAPE)
    logging.disable(logging.ERROR)  # torch logs a traceback of what is raised anyway
    try:
        return checkmate.torch.capture(model, loss, example=example)
    except Exception as error:
        if not type(error).__module__.startswith("torch."):
            raise
        text = " ".join(re.split(r"Hint:|from user code", str(error))[0].split())
        raise OptionError(f"{target}: the step cannot be traced: {text}", hint="see that loss(model(x), y) runs") from error
    finally:
        logging.disable(logging.NOTSET)


def _function(where: str, name: str) -> Callable[..., object]:
    module = _from_file(Path(where)) if where.endswith(".py") else _from_name(where)
    function = getattr(module, name, None)
    if not callable(function):
        raise OptionError(f"{where} has no function {name!r}", hint=_SHAPE)
    return function


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise OptionError(f"{path}: no such file", hint=_SHAPE)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    loader = spec.loader
    assert loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        _call(str(path), lambda: loader.exec_module(module))
    finally:
        sys.path.pop(0)
    return module


def _from_name(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return _call(name, lambda: importlib.import_module(name))
    finally:
        sys.path.pop(0)


def _call(what: str, function: Callable[[], Any]) -> Any:
    """Call the user's code; what goes wrong in it is bad input, named with the place."""
    try:
        return function()
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = "" if frame.filename == __file__ else f" at {frame.filename}:{frame.lineno}"
        raise OptionError(f"{what} raised {type(error).__name__}{place}: {error}", hint=_SHAPE) from error


def _describe(built: object) -> str:
    return f"a tuple of {len(built)}" if isinstance(built, tuple) else f"{type(built).__name__}"
