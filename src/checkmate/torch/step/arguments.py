"""Model, loss, optimizer, example and batches, checked before tracing, because Dynamo's errors do not tell the cause."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from checkmate.core.errors import OptionError, shortened

_log = logging.getLogger("checkmate.torch")

Loss = Callable[..., torch.Tensor]
Example = Sequence[Any] | Mapping[str, Any]
"""A batch: positional arguments with the loss's target last, or keyword arguments of the model."""


def validate_arguments(model: object, loss: Loss | None, optimizer: object, example: Example) -> None:
    """Check a model or a function, a loss, an optimizer and an example for a step."""
    if not isinstance(model, nn.Module) and (not callable(model) or isinstance(model, type)):
        hint = "give an instance of torch.nn.Module, or a function that computes the step"
        raise OptionError(f"model={_name(model)} is not a module", hint=hint)
    _check_loss(loss)
    _check_optimizer(optimizer)
    _check_example(example, loss is not None)
    refuse_inference_mode()
    if not isinstance(model, nn.Module):
        _check_function(model, loss is not None or optimizer is not None, example)
        return
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(parameter):
            raise OptionError(
                f"the model's {name!r} is of a lazy module, and has no size yet", hint="call the model once with a batch before"
            )
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise OptionError(
                f"module {path or 'model'!r} has a backward hook, which no one graph of a step can call",
                hint="remove the hook, or use torch.compile(model, backend='checkmate', options={'budget': ...})",
            )
    inputs, named = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
    if loss is not None:
        inputs = inputs[:-1]
        refused = _refused(loss.forward if isinstance(loss, nn.Module) else loss, (None, None), {})
        if refused:
            raise OptionError(
                f"loss={_name(loss)} is called with a prediction and the last element of a batch: {refused}",
                hint="give a function of both, such as loss=lambda prediction, y: ...",
            )
    refused = _refused(model.forward, inputs, named)
    if refused:
        rest = " but the last, which is the loss's target" if loss is not None else ""
        hint = "give the model's arguments one by one, such as example=(a, b, y), or by name, as a mapping"
        if loss is None and inputs and not _refused(model.forward, inputs[:-1], {}):
            hint = "give the loss that the last element is the target of, such as loss=torch.nn.functional.cross_entropy"
        raise OptionError(
            f"model={type(model).__name__} is called with the elements of the example{rest}: {refused}; "
            f"the example has {described(example)}",
            hint=hint,
        )


def _check_function(function: Callable[..., Any], has_more: bool, example: Example) -> None:
    if has_more:
        raise OptionError(
            f"model={_name(function)} is not a module; a function is the whole step, without a loss and an optimizer",
            hint="call loss.backward() and optimizer.step() in the function, or give an instance of torch.nn.Module",
        )
    refused = _refused(function, *(((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})))
    if refused:
        raise OptionError(
            f"{_name(function)} is called with the elements of the example: {refused}; the example has {described(example)}",
            hint="give the arguments of the function one by one, such as example=(x, y), or by name, as a mapping",
        )


def refuse_inference_mode() -> None:
    """Refuse inference mode, in which no tensor can have a gradient. Under `torch.no_grad` a step runs: it enables gradients."""
    if torch.is_inference_mode_enabled():
        raise OptionError(
            "a step trains, and under torch.inference_mode() nothing has a gradient",
            hint="call it outside of torch.inference_mode()",
        )


def refuse_untrainable(model: nn.Module) -> None:
    """Refuse to compile a step without memory to run in, or with tensors that cannot be changed."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise OptionError(
                f"the model's {name!r} is on the meta device and has no data, so that no step can run",
                hint="build it on the device that trains it; checkmate.torch.fits and capture(device=...) take one on meta",
            )
        if tensor.is_inference():
            raise OptionError(
                f"the model's {name!r} was made under torch.inference_mode(), and nothing can train it",
                hint="build the model outside of torch.inference_mode()",
            )


def warn_of_clipping(caller: CodeType) -> None:
    """Warn if a function calls a step with an optimizer and clips gradients: after the step there are none."""
    named = [name for name in ("clip_grad_norm_", "clip_grad_value_") if name in caller.co_names]
    if named:
        _log.warning(
            "%s is named in %s, which calls the step: after it the optimizer has stepped and no gradient is left, so that "
            "nothing is clipped\nhint: checkmate.torch.compile(..., clip_norm=1.0) clips inside of the step",
            named[0],
            caller.co_qualname,
        )


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The arguments of the batches of a step, known from its example."""

    example: str  # in words: names, types and shapes
    count: int | None  # elements of a batch by position; None if the example is a mapping
    names: tuple[str, ...]  # of a batch by keyword, in order
    tensors: tuple[bool, ...]  # whether each of them is a tensor

    @classmethod
    def of(cls, example: Example) -> BatchLayout:
        """The layout of an example."""
        names, values = (tuple(example), example.values()) if isinstance(example, Mapping) else ((), example)
        count = None if isinstance(example, Mapping) else len(example)
        return cls(described(example), count, names, tuple(isinstance(value, torch.Tensor) for value in values))

    def batch_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Example:
        """The batch of a call of the step, in the form of the example; it may be passed as one argument."""
        if self.count is None:
            whole = len(args) == 1 and not kwargs and isinstance(args[0], Mapping)
            batch: Any = args[0] if whole else kwargs
            if (args and not whole) or batch.keys() != set(self.names):
                raise self._refused((*args, *batch) if whole else args, batch)
            batch = {name: batch[name] for name in self.names}
            values: Sequence[Any] = tuple(batch.values())
        else:
            if len(args) == 1 != self.count and isinstance(args[0], (tuple, list)):
                args = tuple(args[0])
            if kwargs or len(args) != self.count:
                raise self._refused(args, kwargs)
            batch = values = args
        for number, (value, tensor) in enumerate(zip(values, self.tensors, strict=True)):
            if tensor and isinstance(value, (list, tuple, int, float, str, Mapping)):
                name = self.names[number] if self.names else f"argument {number + 1}"
                raise OptionError(
                    f"{name} of the step is a {type(value).__name__}, and that of the example is a tensor",
                    hint="give a tensor: torch.tensor(...) makes one of a list",
                )
        return batch

    def _refused(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OptionError:
        if self.count is not None:
            names = ["x", "y"] if self.count == 2 else [f"x{i + 1}" for i in range(self.count)]
            hint = f"call step({', '.join(names)}): all elements of a batch by position, the target of a loss last"
        else:
            hint = f"call step(**batch) with {', '.join(self.names)}"
        return OptionError(f"the step is called with {described(args, kwargs)}, and its example was {self.example}", hint=hint)


def described(batch: Example, kwargs: Mapping[str, Any] | None = None) -> str:
    """A batch in words, for example ``2 arguments: float32 (64, 32), int64 (64,)``."""
    named = {**(batch if isinstance(batch, Mapping) else {}), **(kwargs or {})}
    parts = [_described(value) for value in (() if isinstance(batch, Mapping) else batch)]
    parts += [f"{name}={_described(value)}" for name, value in named.items()]
    return f"{len(parts)} argument{'s' * (len(parts) != 1)}{': ' * bool(parts)}{', '.join(parts)}"


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        device = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{device}"
    if type(value) in (tuple, list) and len(value) <= 4 and not all(isinstance(v, (int, float)) for v in value):
        return f"({', '.join(map(_described, value))})"
    return type(value).__name__


def _check_example(example: Any, has_loss: bool) -> None:
    if isinstance(example, Mapping):
        if has_loss:
            raise OptionError("example is a mapping, so that the loss has no target", hint="give a tuple (x, y), or loss=None")
    elif not isinstance(example, (tuple, list)):
        loader = isinstance(example, Iterable) and not isinstance(example, torch.Tensor)
        hint = "give one batch of it: example=next(iter(loader))" if loader else "give a tuple (x, y), or a mapping"
        raise OptionError(f"example={type(example).__name__} is not a batch", hint=hint)
    elif len(example) < (least := 2 if has_loss else 1):
        what = "an input and a target" if has_loss else "an input"
        given = f"example with {len(example)} of at least {least} elements is not a batch" if example else "no example is given"
        raise OptionError(f"{given}: {what} must be in it", hint="write example=(x, y), or give a mapping")
    leaves = pytree.tree_leaves(example)
    sizes = [leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if sizes and not any(sizes):
        raise OptionError(f"example has no sample: {described(example)}", hint="give a batch of at least one")
    # Each number outside of tensors is a constant of the graph; tracing a list of thousands takes minutes.
    if len(numbers := [leaf for leaf in leaves if type(leaf) in (int, float, bool)]) > 64:
        raise OptionError(
            f"example has {len(numbers):,} numbers in lists, and each would be a constant of the graph",
            hint="give tensors: torch.tensor(...) makes one of a list",
        )


def _check_loss(loss: Any) -> None:
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise OptionError(f"loss={loss.__name__} is a class", hint=f"give an instance: loss=torch.nn.{loss.__name__}()")
    if isinstance(loss, torch.optim.Optimizer):
        hint = "give the loss before it: compile(model, loss, optimizer)"
        raise OptionError(f"loss is an optimizer, {type(loss).__name__}", hint=hint)
    if loss is not None and not callable(loss):
        raise OptionError(
            f"loss={shortened(repr(loss))} cannot be called with a prediction and a target",
            hint="give a function or a module, such as loss=torch.nn.functional.cross_entropy",
        )


def _check_optimizer(optimizer: Any) -> None:
    if optimizer is None or (not isinstance(optimizer, type) and hasattr(optimizer, "param_groups")):
        step: Any = getattr(type(optimizer), "step", None)  # the method of the class: schedulers wrap the method of the instance
        if step is not None and _refused(step, (optimizer,), {}):
            raise OptionError(
                f"optimizer={type(optimizer).__name__} runs the model as often as it likes, by a closure; a step runs it once",
                hint="give another, such as optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3)",
            )
        return
    name = optimizer.__name__ if isinstance(optimizer, type) else "AdamW"
    what = f"{optimizer.__name__} is a class" if isinstance(optimizer, type) else f"{optimizer!r} is not an optimizer"
    raise OptionError(
        f"optimizer={what}: which parameters it updates, and how fast, is not known",
        hint=f"give an instance: optimizer=torch.optim.{name}(model.parameters(), lr=1e-3)",
    )


def _refused(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The reason why a function cannot be called with these arguments; empty if it can, or its signature is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return f"{error}, and it takes {signature.replace(return_annotation=inspect.Signature.empty)}"
    return ""


def _name(value: object) -> str:
    return getattr(value, "__name__", type(value).__name__)
