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
from checkmate.torch.step.arguments import Example, validate_arguments
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


@dataclass(frozen=True, slots=True)
class StepSpec:
    """How a step is traced and run."""

    program: Program  # what is traced
    forward: Program  # model and loss alone
    finish: Callable[[Callable[[], Any]], tuple[Any, torch.Tensor]]  # runs the compiled program and whatever is not in it
    updates: Updates | None = None  # those in the program; None where the step is not whole
    wrapped: DistributedDataParallel | None = None  # the module around the model

    @property
    def whole(self) -> bool:
        """Whether the optimizer's updates are in the program."""
        return self.updates is not None

    def tracing_context(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the program is traced as inside a forward of ``wrapped``, without communication between ranks."""
        return contextlib.nullcontext() if self.wrapped is None else inside_ddp_forward(self.wrapped)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecipe:
    """A training step as a user describes it, by the arguments of `checkmate.torch.compile`."""

    model: torch.nn.Module
    loss: Loss | None = None
    optimizer: torch.optim.Optimizer | None = None
    example: Example
    whole: bool | None = None
    micro_batches: int = 1
    clip_norm: float | None = None
    autocast: torch.dtype | None = None
    outputs: Outputs = "held"

    def __post_init__(self) -> None:
        validate_arguments(self.model, self.loss, self.optimizer, self.example)

    def spec(self) -> StepSpec:
        """The step, whole where it can be; refused where it has to be and cannot."""
        self._check()
        optimizer = self.optimizer
        wrapped = self.model if isinstance(self.model, DistributedDataParallel) else None
        model: torch.nn.Module = self.model if wrapped is None else wrapped.module
        forward = forward_program(model, self.loss, outputs=self.outputs == "held")
        if self.autocast is not None:
            forward = under_autocast(forward, _device_type(model, self.example), self.autocast)
        reason = "there is no optimizer" if optimizer is None else unsupported_reason(optimizer, model)
        if wrapped is not None:
            reason = "DistributedDataParallel averages gradients in hooks of the backward"
        if self.whole is False:
            reason = "whole=False"
        if optimizer is not None and reason is None:
            updates = Updates(optimizer)
            program = step_program(forward, updates, micro_batches=self.micro_batches, clip_norm=self.clip_norm)
            if self.clip_norm is not None:
                _log.info("clip_norm needs the norm of all gradients: all of them are held until the last one is computed")
            return StepSpec(program, forward, functools.partial(_finish_whole, updates), updates)
        if self.whole or self.micro_batches > 1:
            what = "whole=True" if self.whole else f"micro_batches={self.micro_batches} needs a whole step, which"
            raise OptionError(
                f"{what} cannot be: {reason}",
                hint="leave it out; or give an optimizer of torch.optim, such as AdamW, all parameters, without hooks",
            )
        if optimizer is not None and self.whole is None:
            _log.warning("the optimizer's step comes after the backward and is not planned with it: %s", reason)
        return StepSpec(forward, forward, functools.partial(_finish_split, optimizer, self.clip_norm), wrapped=wrapped)

    def spec_of_model(self) -> StepSpec:
        """The model alone, which a plain loop compiles, called with the example."""
        self._check()
        program = model_program(self.model)
        if self.autocast is not None:
            program = under_autocast(program, _device_type(self.model, self.example), self.autocast)
        return StepSpec(program, program, lambda run: run())

    def _check(self) -> None:
        check_micro_batches(self.example, self.micro_batches)
        clip_norm = self.clip_norm
        if clip_norm is not None and (isinstance(clip_norm, (bool, str)) or not clip_norm > 0):
            raise OptionError(f"clip_norm={clip_norm!r} must be a number above zero", hint="give the largest norm: clip_norm=1.0")
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise OptionError(
                f"autocast={self.autocast!r} is not a type of half precision", hint="give torch.bfloat16 or torch.float16"
            )
        if uses_fsdp(self.model):
            raise OptionError(
                "fully_shard gathers parameters between the graphs of its modules, so that no one graph is the step",
                hint="use torch.compile(model, backend='checkmate', options={'budget': ...}), which plans the graph of each "
                "module",
            )


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
