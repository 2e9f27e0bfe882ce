"""``checkmate capture`` and ``fits``: the graph of a training step, and whether the step fits a device."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from checkmate.cli import files, targets, terminal
from checkmate.cli.options import Amounts
from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.units import format_bytes, parse_bytes
from checkmate.cost.device import load_device

if TYPE_CHECKING:
    import checkmate.torch


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
    """
    if find_spec("jax") is None:
        targets.needs("torch", "torch")
    function = targets.resolve(target, batch)
    where = target.rpartition(":")[0]
    stem = Path(where).stem if where.endswith(".py") else where.rpartition(".")[2]
    path = out or Path(stem + ("" if batch is None else f"-batch{batch}") + ".graph.json")
    outputs = files.Outputs(targets.source(target))
    outputs.check(path)
    found = targets.returned(target, function)
    if targets.is_jax_step(found):
        if optimizer or device or not whole:
            raise OptionError(
                f"{target} is a step of JAX, which has its updates in it", hint="leave out --optimizer, --device and --plain-loop"
            )
        graph = _jax_graph(target, found)
    else:
        targets.needs("torch", "torch")
        graph = _torch_graph(
            target, targets.checked(target, found), optimizer, plain_loop=not whole, device=device, chunking=chunking
        )
    outputs.save((graph, path))
    return _captured(Amounts(path, graph)).show(json)


def _torch_graph(target: str, built: targets.Built, optimizer: str | None, **options: Any) -> Graph:
    import checkmate.torch
    from checkmate.torch.forecast.tracer import optimizer_class

    with targets.tracing(target):
        if optimizer is not None:
            trained = [p for p in built.model.parameters() if p.requires_grad]
            built = built._replace(optimizer=optimizer_class(optimizer)(trained))
        return checkmate.torch.capture(built.model, built.loss, example=built.example, optimizer=built.optimizer, **options)


def _jax_graph(target: str, found: Any) -> Graph:
    import checkmate.jax

    step, arguments = found
    with targets.tracing(target):
        return checkmate.jax.capture(step, *arguments)


def _captured(amounts: Amounts) -> terminal.VerbOutput:
    graph, path = amounts.graph, amounts.path
    return terminal.VerbOutput(
        data={
            **amounts.data(),
            "ops": len(graph.ops),
            "values": len(graph.values),
            "cost": graph.cost,
        },
        facts=[
            ("graph", str(amounts)),
            ("resident", f"{format_bytes(graph.resident_bytes)}: parameters and other memory that no plan changes"),
            ("keep-all", f"{format_bytes(amounts.keep_all_bytes)} at the peak, resident memory included"),
            ("cost", f"{amounts.cost(graph.cost)} to compute every op once"),
        ],
        wrote=[path],
        hint=f"plan it with `checkmate plan {path} --budget 50%`",
    )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The step as it would run on the device.

    Attributes:
        optimizer: sgd, momentum, adam or adamw; by default that of FUNCTION, if it returns one.
        batch: Call FUNCTION(batch) instead of FUNCTION(); with --config, sequences of a batch, one by default.
        whole: Whether each parameter is updated as soon as its gradient is computed; a plain loop updates after the backward.
        autocast: Type of a torch.autocast region around model and loss, with the device's rules; none by default.
        memory: Memory of the device, such as 24GiB, instead of the figure in its profile.
        headroom: Share of the memory to leave free.
        sequence_dim: Sequence dimension of the example's tensors, to find the longest sequence besides the largest batch.
        host: Memory of the host that values may be copied to, and from which frozen weights may be fetched; none by default.
        time_limit: Time limit in seconds of wall time.
    """

    optimizer: str | None = None
    batch: int | None = None
    whole: Annotated[bool, Parameter(negative="--plain-loop")] = True
    autocast: Literal["bfloat16", "float16"] | None = None
    memory: str | None = None
    headroom: float = 0.03
    sequence_dim: int | None = None
    host: str | None = None
    time_limit: float = 60.0


def fits(
    target: str = "",
    /,
    *,
    device: str,
    config: str | None = None,
    seq: int | None = None,
    conditions: Conditions = Conditions(),
    out: Path | None = None,
    json: terminal.Json = False,
) -> int:
    """Tell whether a training step fits a device that need not be present: exact in bytes, approximate in time.

    Args:
        target: FILE.py:FUNCTION or MODULE:FUNCTION, where FUNCTION() returns (model, loss, example) or (model, loss, optimizer,
            example), and example is (x, y). It is called with fake tensors, which have shapes but no memory, and again with real
            ones if it needs values.
        device: Name of a device, as listed by `checkmate devices`, or path of a profile.
        config: Configuration of a language model of Hugging Face, in place of FUNCTION: its config.json, the folder of it, or a
            name on the hub. The model is made without memory, in the type that the configuration names.
        seq: Tokens of each sequence, with --config; the longest that the model has positions for by default.
        conditions: The step as it would run on the device.
        out: Graph file to write, of the step on the device; none by default.
        json: Print one JSON object on stdout.
    """
    load_device(device)
    if conditions.memory is not None:
        parse_bytes(conditions.memory)
    targets.needs("torch", "torch")
    if (config is None) == (not target) or (seq is not None and config is None):
        raise OptionError(
            "give either a function or --config; --seq belongs to --config",
            hint="give FILE.py:FUNCTION, or a configuration such as --config config.json --seq 2048",
        )
    profile, batch = Path(device) if device.endswith(".json") else None, conditions.batch
    if config is not None:
        outputs = files.Outputs(profile, Path(config) if Path(config).is_file() else None)
        outputs.check(out)
        built, target = targets.causal_model(config, 1 if batch is None else batch, seq), f"--config {config}"
    else:
        function = targets.resolve(target, batch)
        outputs = files.Outputs(targets.source(target), profile)
        outputs.check(out)
        built = targets.without_memory(target, function)
    answer = _answer(target, built, device, conditions)
    outputs.save((answer.graph, out))
    return terminal.VerbOutput(
        data=_fits_data(answer, out),
        facts=answer.rows(),
        lines=["", *answer.remarks],
        wrote=[out],
        hint=_next(answer, target, out),
        code=0 if answer else 1,
    ).show(json)


def _answer(target: str, built: targets.Built, device: str, conditions: Conditions) -> checkmate.torch.Fits:
    import torch

    import checkmate.torch

    with terminal.drawn("tracing the step and looking for plans"), targets.tracing(target):
        return checkmate.torch.fits(
            built.model,
            built.loss,
            example=built.example,
            device=device,
            optimizer=conditions.optimizer or built.optimizer,
            whole=None if conditions.whole else False,
            autocast=None if conditions.autocast is None else getattr(torch, conditions.autocast),
            time_limit_s=conditions.time_limit,
            **terminal.picked(conditions, "memory", "headroom", "sequence_dim", "host"),
        )


def _next(answer: checkmate.torch.Fits, target: str, out: Path | None) -> str:
    if out is not None:
        return f"plan it with `checkmate plan {out} --budget {answer.available_bytes}`"
    if answer:
        return f"write the graph with `checkmate fits {target} ... --out step.graph.json`"
    return "try a smaller batch, --host for frozen weights, or another --optimizer, --memory or --device"


def _fits_data(answer: checkmate.torch.Fits, out: Path | None) -> dict[str, Any]:
    return {
        "verdict": answer.verdict,
        "fits": bool(answer),
        "device": answer.device.name,
        "memory_bytes": answer.memory_bytes,
        "context_bytes": answer.device.context_bytes,
        **terminal.picked(answer, "headroom_bytes", "available_bytes"),
        "resident_bytes": answer.graph.resident_bytes,
        **terminal.picked(answer, "parameter_bytes", "state_bytes", "keep_all_bytes", "smallest_bytes", "floor_bytes"),
        **terminal.picked(answer, "why", "whole"),
        **{name: getattr(answer.result, name, None) for name in ("overhead", "peak_bytes", "cost")},
        "reserved_bytes": answer.reserved_bytes,
        "cost_unit": answer.graph.cost_unit,
        "batch": _dimension(answer.batch, answer.largest_batch),
        "sequence": _dimension(answer.sequence, answer.longest_sequence),
        "remarks": list(answer.remarks),
        "graph": None if out is None else str(out),
        "elapsed_s": round(answer.elapsed_s, 3),
    }


def _dimension(asked: int | None, largest: Any) -> dict[str, Any] | None:
    if asked is None:
        return None
    return {
        "asked": asked,
        "largest": getattr(largest, "batch", None),
        **{name: getattr(largest, name, None) for name in ("upper_bound", "why")},
        "overhead": None if largest is None else largest.result.overhead,
        "remarks": [] if largest is None else list(largest.result.remarks),
    }
