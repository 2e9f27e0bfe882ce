"""The programs that are traced: the forward of a step, or a whole step with its updates."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from checkmate.core.errors import OptionError
from checkmate.torch.graph.optimizer_ops import GRADIENT_READY, Updates

Loss = Callable[..., torch.Tensor]
Program = Callable[..., tuple[Any, torch.Tensor]]

_CACHES = ("past_key_values", "cache_params")
"""Fields of the outputs of Hugging Face's models that only generation reads. They hold keys and values of every layer."""


def forward_program(model: torch.nn.Module, loss: Loss | None, *, outputs: bool = True) -> Program:
    """``program(args, kwargs) -> (prediction, loss)``; the prediction is detached.

    It is None where the model returns its loss alone, and where ``outputs`` asks for no more.
    """

    def forward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        if loss is None:
            output = model(*args, **kwargs)
            value = loss_of(output)
            _check_loss(value, NO_LOSS)
            return None if value is output or not outputs else _detached(output), value
        prediction = model(*args[:-1])
        value = loss(prediction, args[-1])
        _check_loss(value)
        return _detached(prediction) if outputs else None, value

    return with_unique_code(forward)


def model_program(model: torch.nn.Module) -> Callable[..., Any]:
    """``program(args, kwargs)`` that returns what the model does."""

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return model(*args, **kwargs)

    return with_unique_code(call)


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a model returns: the tensor itself, ``.loss``, ``["loss"]``, or the only number of a tuple."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, (tuple, list)) and not hasattr(output, "loss"):
        found = [t for t in output if isinstance(t, torch.Tensor) and t.ndim == 0 and t.requires_grad]
        value = found[0] if len(found) == 1 else None
    else:
        value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if value is None:
        raise OptionError(f"the model returned a {_kind(output)} without a loss", hint=NO_LOSS)
    return value


def _check_loss(value: Any, hint: str = "give a loss that returns one, such as reduction='mean'") -> None:
    """Refuse what has no gradient of one number; nothing of it is left in a traced program."""
    if not isinstance(value, torch.Tensor):
        raise OptionError(
            f"the loss is a {_kind(value)}, and not a tensor",
            hint="return one tensor with one number, without .item(); compute the rest from the prediction that step() returns",
        )
    if value.numel() != 1:
        raise OptionError(f"the loss has shape {tuple(value.shape)}, and is not one number", hint=hint)


def _kind(value: Any) -> str:
    """The type of a value; numbers of `Tensor.item` have another while they are traced."""
    name, traced = type(value).__name__, isinstance(value, (torch.SymFloat, torch.SymInt, torch.SymBool))
    return name.removeprefix("Sym").lower() if traced else name


NO_LOSS = "give a loss, such as loss=torch.nn.functional.mse_loss with example=(x, y), or labels in the example"
"""Hint where a model returns no loss, and none was given."""


def _detached(output: Any) -> Any:
    """An output whose tensors are detached.

    AOTAutograd allocates a gradient of zeros for every output that requires one, even if it is never used.
    """
    return _mapped(lambda parts: parts[0].detach() if isinstance(parts[0], torch.Tensor) else parts[0], [output])


def _mapped(of: Callable[[Sequence[Any]], Any], outputs: Sequence[Any]) -> Any:
    """Outputs of one structure made one, each leaf of theirs; PyTorch does not look into dataclasses, and this does."""
    first = outputs[0]
    if dataclasses.is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first) if field.init and field.name not in _CACHES]
        return type(first)(**{name: _mapped(of, [getattr(o, name) for o in outputs]) for name in names})  # type: ignore[operator]
    leaves, structure = pytree.tree_flatten(first)
    if len(leaves) == 1 and leaves[0] is first:
        return of(outputs)
    columns = zip(*[pytree.tree_leaves(output) for output in outputs], strict=True)
    return pytree.tree_unflatten([_mapped(of, column) for column in columns], structure)


def under_autocast(program: Program, device_type: str, dtype: torch.dtype) -> Program:
    """The same program under `torch.autocast`; clipping and updates of its gradients stay outside."""

    def autocast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        with torch.autocast(device_type, dtype):
            return program(args, kwargs)

    return with_unique_code(autocast)


def step_program(forward: Program, updates: Updates, *, micro_batches: int = 1, clip_norm: float | None = None) -> Program:
    """A whole step, with the gradients of micro batches added up: ``program(args, kwargs) -> (prediction, loss, marks)``."""
    parameters, key = updates.parameters, updates.key

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
        return _mapped(_joined, predictions), value, marks

    return with_unique_code(step)


def with_unique_code(program: Any) -> Any:
    """A copy of the program with a new code object: Dynamo counts recompilations by code object, over all models."""
    return FunctionType(program.__code__.replace(), program.__globals__, program.__name__, closure=program.__closure__)


def check_micro_batches(batch: Any, micro_batches: int) -> None:
    """Refuse a number of parts that is not positive, or does not divide the rows of a batch."""
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise OptionError(
            f"micro_batches={micro_batches!r} is not a whole number of at least 1",
            hint="give the number of equal parts, such as micro_batches=4, or leave it out",
        )
    batched = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    rows = {t.shape[0] for t in batched} if micro_batches > 1 else set[int]()
    if len(rows) > 1 or any(n % micro_batches for n in rows):
        shown = ", ".join(map(str, sorted(rows)))
        raise OptionError(
            f"micro_batches={micro_batches} does not cut a batch of {shown} rows into equal parts",
            hint="give every tensor of the batch the same number of rows, a multiple of micro_batches",
        )


def _cut(batch: Any, parts: int) -> list[Any]:
    if parts == 1:
        return [batch]
    leaves, structure = pytree.tree_flatten(batch)
    cut = [leaf.chunk(parts) if isinstance(leaf, torch.Tensor) and leaf.ndim else [leaf] * parts for leaf in leaves]
    return [pytree.tree_unflatten([each[i] for each in cut], structure) for i in range(parts)]


def _joined(parts: Sequence[Any]) -> Any:
    """Rows one after the other; of numbers, such as a loss, the mean, by the arithmetic of the step's own loss."""
    first = parts[0]
    if len(parts) == 1 or not isinstance(first, torch.Tensor) or (first.ndim == 0 and not first.is_floating_point()):
        return first
    return torch.cat([*parts]) if first.ndim else functools.reduce(operator.add, [part / len(parts) for part in parts])


def _clipped(gradients: list[torch.Tensor | None], most: float) -> list[torch.Tensor | None]:
    """Gradients scaled as by `torch.nn.utils.clip_grad_norm_`, to the bit."""
    norms = [torch.linalg.vector_norm(g) for g in gradients if g is not None]
    scale = torch.clamp(most / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6), max=1.0)
    return [None if g is None else g * scale for g in gradients]
