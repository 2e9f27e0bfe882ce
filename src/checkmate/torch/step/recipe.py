"""How a training step is made from a model, a loss and an optimizer: the program to trace, and what follows each run."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from checkmate.core.errors import OptionError
from checkmate.torch._compat.distributed import DistributedDataParallel, inside_ddp_forward, uses_fsdp
from checkmate.torch.graph.optimizer_ops import Updates, has_gradient_hook, unsupported_reason
from checkmate.torch.options import Outputs
from checkmate.torch.step.batch import Example
from checkmate.torch.step.programs import (
    Loss,
    Program,
    check_micro_batches,
    forward_program,
    model_program,
    step_program,
    under_autocast,
)

_log = logging.getLogger("checkmate.torch")

Finish = Callable[[Callable[[], Any]], tuple[Any, torch.Tensor]]
"""Runs the compiled program and whatever part of the step is not in it; returns the prediction and the loss."""


@dataclass(frozen=True, slots=True)
class StepSpec:
    """How a step is traced and run.

    Attributes:
        program: The function to trace.
        forward: Its model and loss alone.
        finish: Runs the compiled program and the rest of the step.
        whole: Whether the optimizer's updates are in the program.
        micro_batches: Equal parts into which the program cuts a batch.
        own_loss: Whether the model computes its loss.
        unclipped: Whether gradients are used and cleared without being clipped.
        wrapped: The enclosing DistributedDataParallel module, or None.
    """

    program: Program
    forward: Program
    finish: Finish
    whole: bool
    micro_batches: int = 1
    own_loss: bool = False
    unclipped: bool = False
    wrapped: DistributedDataParallel | None = None

    def tracing_context(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the program is traced as inside a forward of ``wrapped``, without communication between ranks."""
        return contextlib.nullcontext() if self.wrapped is None else inside_ddp_forward(self.wrapped)


def spec_of_step(
    model: torch.nn.Module,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer | None,
    example: Example,
    whole: bool | None,
    micro_batches: int,
    clip_norm: float | None,
    autocast: torch.dtype | None,
    outputs: Outputs = "held",
) -> StepSpec:
    """The specification of a step, from the arguments of `checkmate.torch.compile`.

    Args:
        model: The model.
        loss: The loss, or None if the model returns it.
        optimizer: The optimizer, if any.
        example: A batch.
        whole: Whether the updates are in the program; None for wherever they can be.
        micro_batches: Equal parts into which the batch is cut.
        clip_norm: Largest norm of all gradients together, if it is limited.
        autocast: Type of `torch.autocast` around model and loss, if any.
        outputs: Whether the prediction is returned.

    Raises:
        OptionError: A whole step is asked for, and the optimizer or the options do not allow one.
    """
    check_micro_batches(example, micro_batches)
    if clip_norm is not None and (isinstance(clip_norm, (bool, str)) or not clip_norm > 0):
        raise OptionError(f"clip_norm={clip_norm!r} must be a number above zero", hint="give the largest norm: clip_norm=1.0")
    if uses_fsdp(model):
        raise OptionError(
            "fully_shard gathers parameters between the graphs of its modules, so that no one graph is the step",
            hint="use torch.compile(model, backend='checkmate', options={'budget': ...}), which plans the graph of each module",
        )
    wrapped = model if isinstance(model, DistributedDataParallel) else None
    model = model if wrapped is None else wrapped.module
    forward = forward_program(model, loss, outputs=outputs == "held")
    if autocast is not None:
        forward = under_autocast(forward, _device_type(model, example), _half(autocast))
    reason = "there is no optimizer" if optimizer is None else unsupported_reason(optimizer, model)
    if wrapped is not None:
        reason = "DistributedDataParallel averages gradients in hooks of the backward"
    if whole is False:
        reason = "whole=False"
    unclipped = optimizer is not None and clip_norm is None
    if optimizer is not None and reason is None:
        updates = Updates(optimizer)
        program = step_program(forward, updates, micro_batches=micro_batches, clip_norm=clip_norm)
        if clip_norm is not None:
            _log.info("clip_norm needs the norm of all gradients: all of them are held until the last one is computed")
        finish = functools.partial(_finish_whole, updates)
        return StepSpec(
            program,
            forward,
            finish,
            whole=True,
            micro_batches=micro_batches,
            own_loss=loss is None,
            unclipped=unclipped,
        )
    if whole or micro_batches > 1:
        what = "whole=True" if whole else f"micro_batches={micro_batches} needs a whole step, which"
        raise OptionError(
            f"{what} cannot be: {reason}",
            hint="leave it out; or give an optimizer of torch.optim, such as AdamW, all parameters, without hooks",
        )
    if optimizer is not None and whole is None:
        _log.warning("the optimizer's step comes after the backward and is not planned with it: %s", reason)
    finish = functools.partial(_finish_split, optimizer, clip_norm)
    return StepSpec(forward, forward, finish, whole=False, own_loss=loss is None, unclipped=unclipped, wrapped=wrapped)


def spec_of_model(model: torch.nn.Module, inputs: Example, autocast: torch.dtype | None) -> StepSpec:
    """The specification of what a plain loop compiles: the model alone.

    Args:
        model: The model.
        inputs: Its inputs.
        autocast: Type of `torch.autocast` around the model, if any.
    """
    program = model_program(model)
    if autocast is not None:
        program = under_autocast(program, _device_type(model, inputs), _half(autocast))
    return StepSpec(program, program, lambda run: run(), whole=False)


def _half(autocast: torch.dtype) -> torch.dtype:
    if autocast not in (torch.bfloat16, torch.float16):
        raise OptionError(f"autocast={autocast!r} is not a type of half precision", hint="give torch.bfloat16 or torch.float16")
    return autocast


def _device_type(model: torch.nn.Module, example: Example) -> str:
    tensors = (*model.parameters(), *pytree.tree_leaves(example))
    return next((t.device.type for t in tensors if isinstance(t, torch.Tensor)), "cpu")


def _finish_whole(updates: Updates, run: Callable[[], Any]) -> tuple[Any, torch.Tensor]:
    """Run a program with the updates in it; nothing is left to do."""
    if any(p.grad is not None for p in updates.parameters):
        raise OptionError(
            "gradients of an earlier backward are there, and a whole step would not use them",
            hint="call optimizer.zero_grad(set_to_none=True) before the step, or compile it with whole=False",
        )
    if any(map(has_gradient_hook, updates.parameters)):
        raise OptionError(
            "a parameter has a hook that was registered after the step was compiled, and that no gradient would reach",
            hint="register it before checkmate.torch.compile, or compile with whole=False",
        )
    prediction, loss, _ = run()
    # Learning-rate schedulers warn unless the optimizer's step() was called before theirs, and it is this flag that they read.
    updates.optimizer._opt_called = True  # type: ignore[attr-defined]
    return prediction, loss


def _finish_split(
    optimizer: torch.optim.Optimizer | None, clip_norm: float | None, run: Callable[[], Any]
) -> tuple[Any, torch.Tensor]:
    """Run a program that is a forward, then the backward and the optimizer."""
    prediction, loss = run()
    loss.backward()
    if optimizer is not None:
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return prediction, loss.detach()
