"""``checkmate fits``: whether a step fits a device that need not be present."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from checkmate.cli import files, targets, terminal
from checkmate.cli.configurations import causal_model
from checkmate.cli.extras import needs
from checkmate.cli.progress import drawn
from checkmate.core.errors import OptionError
from checkmate.core.units import parse_bytes
from checkmate.cost.device import load_device


def fits(
    target: str = "",
    /,
    *,
    device: str,
    config: str | None = None,
    seq: int | None = None,
    optimizer: str | None = None,
    batch: int | None = None,
    whole: Annotated[bool, Parameter(negative="--plain-loop")] = True,
    autocast: Literal["bfloat16", "float16"] | None = None,
    memory: str | None = None,
    headroom: float = 0.03,
    sequence_dim: int | None = None,
    chunking: Literal["off", "auto", "exact"] = "off",
    host: str | None = None,
    time_limit: float = 60.0,
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
        optimizer: sgd, momentum, adam or adamw; by default that of FUNCTION, if it returns one.
        batch: Call FUNCTION(batch) instead of FUNCTION(); with --config, sequences of a batch, one by default.
        whole: Whether each parameter is updated as soon as its gradient is computed; a plain loop updates after the backward.
        autocast: Type of a torch.autocast region around model and loss, with the device's rules; none by default.
        memory: Memory of the device, such as 24GiB, instead of the figure in its profile.
        headroom: Share of the memory to leave free.
        sequence_dim: Sequence dimension of the example's tensors, to find the longest sequence besides the largest batch.
        chunking: With auto, ops on large tensors may run piece by piece; exact cannot be answered for a device that is not there.
        host: Memory of the host that values can be copied to over the device's bus, such as 32GiB; none by default.
        time_limit: Time limit in seconds of wall time.
        out: Graph file to write, of the step on the device; none by default.
        json: Print one JSON object on stdout.

    Returns:
        The exit code: 0 if the step fits, 1 if it does not fit or the answer is not known.
    """
    load_device(device)
    if memory is not None:
        parse_bytes(memory)
    needs("torch", "torch")
    if (config is None) == (not target) or (seq is not None and config is None):
        raise OptionError(
            "give either a function or --config; --seq belongs to --config",
            hint="give FILE.py:FUNCTION, or a configuration such as --config config.json --seq 2048",
        )
    source = Path(config) if config is not None and Path(config).is_file() else None
    outputs = files.Outputs(Path(device) if device.endswith(".json") else None, source)
    if config is not None:
        outputs.check(out)
        built, target = causal_model(config, 1 if batch is None else batch, seq), f"--config {config}"
    else:
        function = targets.resolve(target)
        outputs = files.Outputs(targets.source(target), Path(device) if device.endswith(".json") else None)
        outputs.check(out)
        built = targets.without_memory(target, targets.with_batch(function, batch))
    import torch

    import checkmate.torch

    with drawn("tracing the step and looking for plans"), targets.tracing(target):
        answer = checkmate.torch.fits(
            built.model,
            built.loss,
            example=built.example,
            device=device,
            optimizer=optimizer or built.optimizer,
            whole=None if whole else False,
            autocast=None if autocast is None else getattr(torch, autocast),
            memory=memory,
            headroom=headroom,
            sequence_dim=sequence_dim,
            chunking=chunking,
            host=host,
            time_limit_s=time_limit,
        )
    if out is not None:
        outputs.save((answer.graph, out))
    if json:
        terminal.emit(_as_json(answer, out))
        return 0 if answer else 1
    terminal.facts(answer.rows())
    terminal.say("", *answer.remarks)
    terminal.closing([] if out is None else [out], _next(answer, target, out))
    return 0 if answer else 1


def _next(answer: Any, target: str, out: Path | None) -> str:
    if out is not None:
        return f"plan it with `checkmate plan {out} --budget {answer.available_bytes}`"
    if answer:
        return f"write the graph with `checkmate fits {target} ... --out step.graph.json`"
    return "try a smaller batch, or another --optimizer, --memory or --device"


def _as_json(answer: Any, out: Path | None) -> dict[str, Any]:
    result = answer.result
    return {
        "verdict": answer.verdict,
        "fits": bool(answer),
        "device": answer.device.name,
        "memory_bytes": answer.memory_bytes,
        "context_bytes": answer.device.context_bytes,
        "headroom_bytes": answer.headroom_bytes,
        "available_bytes": answer.available_bytes,
        "resident_bytes": answer.graph.resident_bytes,
        "parameter_bytes": answer.parameter_bytes,
        "state_bytes": answer.state_bytes,
        "keep_all_bytes": answer.keep_all_bytes,
        "smallest_bytes": answer.smallest_bytes,
        "floor_bytes": answer.floor_bytes,
        "why": answer.why,
        "whole": answer.whole,
        "overhead": None if result is None else result.overhead,
        "peak_bytes": None if result is None else result.peak_bytes,
        "reserved_bytes": answer.reserved_bytes,
        "cost": None if result is None else result.cost,
        "cost_unit": answer.graph.cost_unit,
        "batch": _dimension(answer.batch, answer.largest_batch),
        "sequence": _dimension(answer.sequence, answer.longest_sequence),
        "remarks": list(answer.remarks),
        "graph": None if out is None else str(out),
        "elapsed_s": round(answer.elapsed_s, 3),
    }


def _dimension(now: int | None, largest: Any) -> dict[str, Any] | None:
    if now is None:
        return None
    if largest is None:
        return {"asked": now, "largest": None, "upper_bound": None, "why": None, "overhead": None, "remarks": []}
    return {
        "asked": now,
        "largest": largest.batch,
        "upper_bound": largest.upper_bound,
        "why": largest.why,
        "overhead": largest.result.overhead,
        "remarks": list(largest.result.remarks),
    }
