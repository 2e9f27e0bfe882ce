"""The programs that are traced: the forward of a step, or a whole step with its updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from checkmate.core.errors import OptionError
from checkmate.torch.graph.optimizer_ops import GRADIENT_READY, Updates

Loss = Callable[..., torch.Tensor]
Program = Callable[..., tuple[Any, torch.Tensor]]
_NORM_EPSILON = 1e-6  # the value in torch.nn.utils.clip_grad_norm_, whose results have to be matched


def forward_program(model: torch.nn.Module, loss: Loss | None) -> Program:
    """``program(args, kwargs) -> (prediction, loss)``; the prediction is detached, and None where the model returns its loss."""

    def forward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        if loss is None:
            output = model(*args, **kwargs)
            return None, output if isinstance(output, torch.Tensor) else output.loss
        prediction = model(*args[:-1])
        value = loss(prediction, args[-1])
        # Detached: AOTAutograd allocates a gradient of zeros for every output that requires one, even if it is never used.
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, prediction), value

    return with_unique_code(forward)


def model_program(model: torch.nn.Module) -> Callable[..., Any]:
    """``program(args, kwargs)`` that returns what the model does."""

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return model(*args, **kwargs)

    return with_unique_code(call)


def under_autocast(program: Program, device_type: str, dtype: torch.dtype) -> Program:
    """The same program under `torch.autocast`; clipping and updates of its gradients stay outside."""

    def autocast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        with torch.autocast(device_type, dtype):
            return program(args, kwargs)

    return with_unique_code(autocast)


def step_program(forward: Program, updates: Updates, *, micro_batches: int = 1, clip_norm: float | None = None) -> Program:
    """A whole step: ``program(args, kwargs) -> (prediction, loss, marks)``.

    Args:
        forward: A program of `forward_program`.
        updates: The optimizer's updates.
        micro_batches: Equal parts into which the batch is cut; their gradients are added up.
        clip_norm: Largest norm of all gradients together, or None.
    """
    parameters = updates.parameters
    key = updates.key

    def gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, torch.Tensor, list[torch.Tensor | None]]:
        prediction, value = forward(args, kwargs)
        if micro_batches > 1:
            value = value / micro_batches
        return prediction, value.detach(), list(torch.autograd.grad(value, parameters, allow_unused=True))

    def step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, torch.Tensor, list[torch.Tensor]]:
        parts = _cut((args, kwargs), micro_batches)
        prediction, value, found = gradients(*parts[0])
        predictions = [prediction]
        for part in parts[1:]:
            prediction, more, added = gradients(*part)
            predictions.append(prediction)
            value = value + more
            found = [a if b is None else b if a is None else a + b for a, b in zip(found, added, strict=True)]
        with torch.no_grad():
            if clip_norm is not None:
                found = _clipped(found, clip_norm)
            marks = [
                GRADIENT_READY(p, g, key, i) for i, (p, g) in enumerate(zip(parameters, found, strict=True)) if g is not None
            ]
        return _joined(predictions), value, marks

    return with_unique_code(step)


def with_unique_code(program: Any) -> Any:
    """A copy of the program with a new code object: Dynamo counts recompilations by code object, over all models."""
    return FunctionType(program.__code__.replace(), program.__globals__, program.__name__, closure=program.__closure__)


def check_micro_batches(batch: Any, micro_batches: int) -> None:
    """Check that a batch can be cut into equal parts.

    Raises:
        OptionError: The number of parts is not positive, or does not divide the rows.
    """
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise OptionError(
            f"micro_batches={micro_batches!r} is not a whole number of at least 1",
            hint="give the number of equal parts, such as micro_batches=4, or leave it out",
        )
    rows = {t.shape[0] for t in _batched(batch)} if micro_batches > 1 else set[int]()
    if len(rows) > 1 or any(n % micro_batches for n in rows):
        shown = ", ".join(map(str, sorted(rows)))
        raise OptionError(
            f"micro_batches={micro_batches} does not cut a batch of {shown} rows into equal parts",
            hint="give every tensor of the batch the same number of rows, a multiple of micro_batches",
        )


def _batched(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim]


def _cut(batch: Any, parts: int) -> list[Any]:
    if parts == 1:
        return [batch]
    leaves, structure = pytree.tree_flatten(batch)
    cut = [leaf.chunk(parts) if isinstance(leaf, torch.Tensor) and leaf.ndim else [leaf] * parts for leaf in leaves]
    return [pytree.tree_unflatten([each[i] for each in cut], structure) for i in range(parts)]


def _joined(predictions: Sequence[Any]) -> Any:
    if len(predictions) == 1:
        return predictions[0]
    flat = [pytree.tree_flatten(prediction) for prediction in predictions]
    columns = zip(*[leaves for leaves, _ in flat], strict=True)
    return pytree.tree_unflatten([torch.cat(c) if isinstance(c[0], torch.Tensor) else c[0] for c in columns], flat[0][1])


def _clipped(gradients: list[torch.Tensor | None], most: float) -> list[torch.Tensor | None]:
    """Gradients scaled as by `torch.nn.utils.clip_grad_norm_`."""
    norms = [torch.linalg.vector_norm(g) for g in gradients if g is not None]
    scale = torch.clamp(most / (torch.linalg.vector_norm(torch.stack(norms)) + _NORM_EPSILON), max=1.0)
    return [None if g is None else g * scale for g in gradients]
