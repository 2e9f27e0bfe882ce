"""A training step from a model, a loss and an optimizer: the program to trace, and the rest of each run."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from checkmate.core.errors import OptionError
from checkmate.torch._compat.distributed import DistributedDataParallel, uses_fsdp
from checkmate.torch.graph.host_weights import traced_on_device
from checkmate.torch.graph.optimizer_ops import GRADIENT_READY, UNSCALING, Updates, has_gradient_hook, unsupported_reason
from checkmate.torch.options import Outputs
from checkmate.torch.step.arguments import Example, Loss, validate_arguments
from checkmate.torch.step.function import owners

Program = Callable[..., tuple[Any, torch.Tensor]]

_CACHES = ("past_key_values", "cache_params")
"""Fields of the outputs of Hugging Face's models that only generation reads. They hold keys and values of every layer."""


def forward_program(model: torch.nn.Module, loss: Loss | None, *, outputs: bool = True) -> Program:
    """``program(args, kwargs) -> (prediction, loss)``; the prediction is detached.

    The prediction is None if the model returns only its loss, or if ``outputs`` is false.
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


def loss_of(output: Any) -> torch.Tensor:
    """The loss in the output of a model: the tensor itself, ``.loss``, ``["loss"]``, or the only number of a tuple."""
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
    """Refuse a value that is no differentiable scalar; a traced program contains no op of this check."""
    if not isinstance(value, torch.Tensor):
        raise OptionError(
            f"the loss is a {_kind(value)}, and not a tensor",
            hint="return one tensor with one number, without .item(); compute the rest from the prediction that step() returns",
        )
    if value.numel() != 1:
        raise OptionError(f"the loss has shape {tuple(value.shape)}, and is not one number", hint=hint)


def _kind(value: Any) -> str:
    """The type of a value; while tracing, numbers of `Tensor.item` have another one."""
    name, traced = type(value).__name__, isinstance(value, (torch.SymFloat, torch.SymInt, torch.SymBool))
    return name.removeprefix("Sym").lower() if traced else name


NO_LOSS = "give a loss, such as loss=torch.nn.functional.mse_loss with example=(x, y), or labels in the example"
"""Hint for a model that returns no loss, if none was given."""


def _detached(output: Any) -> Any:
    """An output whose tensors are detached.

    AOTAutograd allocates a gradient of zeros for every output that requires one, even if it is never used.
    """
    return _mapped(lambda parts: parts[0].detach() if isinstance(parts[0], torch.Tensor) else parts[0], [output])


def _mapped(of: Callable[[Sequence[Any]], Any], outputs: Sequence[Any]) -> Any:
    """Combine outputs of one structure leaf by leaf, dataclasses included, which PyTorch does not look into."""
    first = outputs[0]
    if hasattr(first, "__dataclass_fields__"):  # `is_dataclass` asks the class, which Dynamo of PyTorch 2.11 refuses
        names = [field.name for field in dataclasses.fields(first) if field.init and field.name not in _CACHES]
        return type(first)(**{name: _mapped(of, [getattr(o, name) for o in outputs]) for name in names})  # type: ignore[operator]
    leaves, structure = pytree.tree_flatten(first)
    if len(leaves) == 1 and leaves[0] is first:
        return of(outputs)
    columns = zip(*[pytree.tree_leaves(output) for output in outputs], strict=True)
    return pytree.tree_unflatten([_mapped(of, column) for column in columns], structure)


def step_program(
    forward: Program,
    updates: Updates,
    *,
    micro_batches: int = 1,
    clip_norm: float | None = None,
    scale: torch.Tensor | None = None,
) -> Program:
    """A whole step, with the gradients of micro batches added up: ``program(args, kwargs) -> (prediction, loss, marks)``.

    With a ``scale`` the gradients are those of the loss times the scale, until all are known to be finite.
    """
    parameters, key = updates.parameters, updates.key

    def gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, torch.Tensor, list[torch.Tensor | None]]:
        prediction, value = forward(args, kwargs)
        if micro_batches > 1:
            value = value / micro_batches
        scaled = value if scale is None else value * scale
        return prediction, value.detach(), list(torch.autograd.grad(scaled, parameters, allow_unused=True))

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
            if scale is not None:
                found = _unscaled(found, scale, key)
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
    """Refuse a number of micro batches that is not positive, or does not divide the rows of a batch."""
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
    """Concatenated rows; for scalars such as a loss the mean, in the arithmetic of the step's own loss."""
    first = parts[0]
    if len(parts) == 1 or not isinstance(first, torch.Tensor) or (first.ndim == 0 and not first.is_floating_point()):
        return first
    return torch.cat([*parts]) if first.ndim else functools.reduce(operator.add, [part / len(parts) for part in parts])


def _clipped(gradients: list[torch.Tensor | None], most: float) -> list[torch.Tensor | None]:
    """Gradients scaled as by `torch.nn.utils.clip_grad_norm_`, to the bit."""
    norms = [torch.linalg.vector_norm(g) for g in gradients if g is not None]
    scale = torch.clamp(most / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6), max=1.0)
    return [None if g is None else g * scale for g in gradients]


def _unscaled(gradients: list[torch.Tensor | None], scale: torch.Tensor, key: int) -> list[torch.Tensor | None]:
    """Gradients divided by a scale as by `torch.amp.GradScaler.unscale_`, to the bit."""
    norms = [torch.linalg.vector_norm(g, math.inf).double() for g in gradients if g is not None]
    factor = UNSCALING(scale, torch.stack(norms), key)
    return [None if g is None else (g * factor).to(g.dtype) for g in gradients]


_log = logging.getLogger("checkmate.torch")


class Scaling:
    """The scale of a `torch.amp.GradScaler` as an input of a whole step, and the overflow of the step as its scaler is told."""

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self.scaler = scaler
        self.scale = torch.ones((), device=device)
        self._told = torch.optim.SGD([torch.nn.Parameter(torch.zeros((), device=device))])

    @contextmanager
    def of_step(self, updates: Updates) -> Iterator[None]:
        """Context of a run of the step."""
        self.scale.copy_(self.scaler.scale(torch.ones_like(self.scale)))
        yield
        parameter = self._told.param_groups[0]["params"][0]
        parameter.grad = torch.full_like(parameter, math.inf if updates.skipped else 0.0)
        self.scaler.unscale_(self._told)
        self.scaler.update()


@dataclass(frozen=True, slots=True)
class StepSpec:
    """The programs of a step: to trace, and to run."""

    program: Program  # to trace
    forward: Program  # model and loss alone
    finish: Callable[[Callable[[], Any]], tuple[Any, torch.Tensor | None]]  # runs the compiled program and the rest of the step
    whole: bool = False  # whether the optimizer's updates are in the program
    traced: Callable[[], AbstractContextManager[None]] = nullcontext  # context in which it is traced
    flat: bool = False  # whether it takes its own gradients, and is traced with them without Dynamo


def refuse_for_function(given: Mapping[str, object], hint: str = "leave out {}") -> None:
    """Refuse options that need a model, if the step is a function; ``{}`` in the hint is the name of the first one given."""
    if named := [name for name, value in given.items() if value]:
        raise OptionError(f"{named[0]} is for a model, and the step is a function", hint=hint.format(named[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecipe:
    """A training step as a user describes it, by the arguments of `checkmate.torch.compile`."""

    model: torch.nn.Module | Callable[..., Any]  # or a function that is the step
    loss: Loss | None = None
    optimizer: torch.optim.Optimizer | None = None
    example: Example
    whole: bool | None = None
    micro_batches: int = 1
    clip_norm: float | None = None
    scaler: torch.amp.GradScaler | None = None
    autocast: torch.dtype | None = None
    outputs: Outputs = "held"
    on_host: bool = False  # whether frozen weights may stay on the host

    def __post_init__(self) -> None:
        validate_arguments(self.model, self.loss, self.optimizer, self.example)
        if self.scaler is not None and not isinstance(self.scaler, torch.amp.GradScaler):
            raise OptionError(f"scaler={self.scaler!r} is no gradient scaler", hint="give a torch.amp.GradScaler")

    def spec(self) -> StepSpec:
        """The step, whole if possible; refused if it has to be whole and cannot."""
        if not isinstance(self.model, torch.nn.Module):
            return self._spec_of_function(self.model)
        self._check()
        optimizer = self.optimizer
        forward = self._cast(forward_program(self.model, self.loss, outputs=self.outputs == "held"))
        reason = "there is no optimizer" if optimizer is None else unsupported_reason(optimizer, self.model)
        if self.whole is False:
            reason = "whole=False"
        if optimizer is not None and reason is None:
            updates = Updates(optimizer)
            scaling = None if self.active_scaler is None else Scaling(self.active_scaler, self.device)
            scale = None if scaling is None else scaling.scale
            program = step_program(forward, updates, micro_batches=self.micro_batches, clip_norm=self.clip_norm, scale=scale)
            if self.clip_norm is not None or scaling is not None:
                _log.info("clip_norm and scaler read all gradients: all of them are held until the last one is computed")
            finish = functools.partial(_finish_whole, updates, scaling)
            return StepSpec(program, forward, finish, whole=True, traced=self._traced)
        if self.whole or self.micro_batches > 1:
            what = "whole=True" if self.whole else f"micro_batches={self.micro_batches} needs a whole step, which"
            raise OptionError(
                f"{what} cannot be: {reason}",
                hint="leave it out; or give an optimizer of torch.optim, such as AdamW, all parameters, without hooks",
            )
        if optimizer is not None and self.whole is None:
            _log.warning("the optimizer's step comes after the backward and is not planned with it: %s", reason)
        scaler = self.scaler or torch.amp.GradScaler(enabled=False)
        return StepSpec(forward, forward, functools.partial(_finish_split, optimizer, self.clip_norm, scaler))

    def _spec_of_function(self, function: Callable[..., Any]) -> StepSpec:
        given = {n: getattr(self, n) is not None for n in ("whole", "clip_norm", "scaler", "autocast")}
        refuse_for_function(given | {"micro_batches": self.micro_batches != 1}, "write it into the function")
        return StepSpec(function, function, lambda run: (run(), None), whole=True, flat=True, traced=self._traced)

    def _traced(self) -> AbstractContextManager[None]:
        """Context in which the step is traced."""
        return traced_on_device(self.device) if self.on_host else nullcontext()

    def spec_of_model(self) -> StepSpec:
        """The model alone, called with the example; a plain loop compiles it."""
        model = self.model

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return model(*args, **kwargs)

        program = self._cast(with_unique_code(call))
        return StepSpec(program, program, lambda run: run())

    def _cast(self, program: Program) -> Program:
        """The same program under `torch.autocast`, if the recipe has it; clipping and updates of its gradients stay outside."""
        dtype = self.autocast
        if dtype is None:
            return program
        if dtype not in (torch.bfloat16, torch.float16):
            raise OptionError(f"autocast={dtype!r} is not a type of half precision", hint="give torch.bfloat16 or torch.float16")
        device_type = self.device.type

        def autocast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
            with torch.autocast(device_type, dtype):
                return program(args, kwargs)

        return with_unique_code(autocast)

    def owners(self) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
        """The modules and the optimizers of the step."""
        if not isinstance(self.model, torch.nn.Module):
            return owners(self.model)
        modules = [m for m in (self.model, self.loss) if isinstance(m, torch.nn.Module)]
        return modules, [] if self.optimizer is None else [self.optimizer]

    @property
    def device(self) -> torch.device:
        """The device of the step: of the batch and of all that is trained."""
        tensors = [t for t in pytree.tree_leaves(self.example) if isinstance(t, torch.Tensor)]
        tensors += [p for module in self.owners()[0] for p in module.parameters() if p.requires_grad]
        return next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))

    @property
    def active_scaler(self) -> torch.amp.GradScaler | None:
        """The scaler, unless it is off."""
        return self.scaler if self.scaler is not None and self.scaler.is_enabled() else None

    def _check(self) -> None:
        check_micro_batches(self.example, self.micro_batches)
        clip_norm = self.clip_norm
        if clip_norm is not None and (isinstance(clip_norm, (bool, str)) or not clip_norm > 0):
            raise OptionError(f"clip_norm={clip_norm!r} must be a number above zero", hint="give the largest norm: clip_norm=1.0")
        assert isinstance(self.model, torch.nn.Module)
        if isinstance(self.model, DistributedDataParallel) or uses_fsdp(self.model):
            raise OptionError(
                "DistributedDataParallel and fully_shard exchange gradients and parameters between graphs, so that no one graph "
                "is the step",
                hint="use torch.compile(model, backend='checkmate', options={'budget': ...}), which plans the graphs of a plain "
                "loop; or give model.module for a forecast",
            )


def _finish_whole(updates: Updates, scaling: Scaling | None, run: Callable[[], Any]) -> tuple[Any, torch.Tensor]:
    """Run a program that includes the updates; nothing else is left to do."""
    parameters = updates.parameters
    if any(p.grad is not None for p in parameters):
        raise OptionError(
            "gradients of an earlier backward are there, and a whole step would not use them",
            hint="call optimizer.zero_grad(set_to_none=True) before the step, or compile it with whole=False",
        )
    if any(map(has_gradient_hook, parameters)):
        raise OptionError(
            "a parameter has a hook that was registered after the step was compiled, and that no gradient would reach",
            hint="register it before checkmate.torch.compile, or compile with whole=False",
        )
    with nullcontext() if scaling is None else scaling.of_step(updates):
        prediction, loss, _ = run()
    # Learning-rate schedulers warn unless the optimizer's step() was called before theirs, and they read this flag.
    updates.optimizer._opt_called = True  # type: ignore[attr-defined]
    return prediction, loss


def _finish_split(
    optimizer: torch.optim.Optimizer | None, clip_norm: float | None, scaler: torch.amp.GradScaler, run: Callable[[], Any]
) -> tuple[Any, torch.Tensor]:
    """Run the program of a forward, then the backward and the optimizer."""
    prediction, loss = run()
    scaler.scale(loss).backward()
    if optimizer is not None:
        if clip_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return prediction, loss.detach()
