"""Checks of model, loss, optimizer and example before anything is traced: Dynamo would tell what it met, not the cause."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch
from torch import nn

from checkmate.core.errors import OptionError, shortened
from checkmate.torch.step.batch import Example, described, validate_example
from checkmate.torch.step.programs import Loss

_log = logging.getLogger("checkmate.torch")


def warn_of_clipping(caller: CodeType) -> None:
    """Warn where a function that calls a step with an optimizer clips gradients as well: there are none after the step.

    Args:
        caller: The code of the function.
    """
    named = [name for name in ("clip_grad_norm_", "clip_grad_value_") if name in caller.co_names]
    if named:
        _log.warning(
            "%s is named in %s, which calls the step: after it the optimizer has stepped and no gradient is left, so that "
            "nothing is clipped\nhint: checkmate.torch.compile(..., clip_norm=1.0) clips inside of the step",
            named[0],
            caller.co_qualname,
        )


def validate_arguments(model: nn.Module, loss: Loss | None, optimizer: object, example: Example) -> Example:
    """The example, checked with model, loss and optimizer to be what a step can be made of.

    Args:
        model: The model.
        loss: The loss, or None.
        optimizer: The optimizer, or None.
        example: The example.

    Raises:
        OptionError: One of them is not what it has to be, or they do not fit together.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(f"model={_name(model)} is not a module", hint="give an instance of torch.nn.Module")
    _check_loss(loss)
    _check_optimizer(optimizer)
    example = validate_example(example, loss is not None)
    refuse_inference_mode()
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
    return example


def refuse_inference_mode() -> None:
    """Refuse to train where no tensor can have a gradient. Under `torch.no_grad` a step runs: it switches gradients on.

    Raises:
        OptionError: `torch.inference_mode` is on.
    """
    if torch.is_inference_mode_enabled():
        raise OptionError(
            "a step trains, and under torch.inference_mode() nothing has a gradient",
            hint="call it outside of torch.inference_mode()",
        )


def refuse_untrainable(model: nn.Module) -> None:
    """Refuse to compile a step that has no memory to run in, or whose tensors nothing can change.

    Args:
        model: The model.

    Raises:
        OptionError: A parameter or a buffer is on the meta device, or was made in inference mode.
    """
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
        step: Any = getattr(type(optimizer), "step", None)  # that of the class: schedulers wrap the instance's
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
    """Why a function cannot be called with so many arguments; empty where it can, or its signature is not known."""
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
