"""A whole training step under a budget: ``prediction, loss = step(x, y)``."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from checkmate.core.budget import Budget
from checkmate.core.errors import CheckmateError, GraphError, OptionError
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Result
from checkmate.core.units import Amount, format_bytes
from checkmate.cost.device import Device, load_device
from checkmate.frontend.options import PlanSource
from checkmate.solvers.session import Solver
from checkmate.torch._compat.distributed import DistributedDataParallel, inside_ddp_forward, uses_fsdp
from checkmate.torch._compat.dynamo import DynamoTransparentError, Unsupported, dynamo_config
from checkmate.torch.backend import compile_graph
from checkmate.torch.compilation.compilation import Hooks
from checkmate.torch.distributed.wrappers import run_inside_ddp
from checkmate.torch.emulate.autocast import cuda_autocast_rules
from checkmate.torch.emulate.device import EmulatedDevice
from checkmate.torch.emulate.fake_inputs import fake_inputs
from checkmate.torch.graph.optimizer_ops import Updates, unsupported_reason
from checkmate.torch.joint.capture import Capture
from checkmate.torch.measure.optimizer_state import state_bytes
from checkmate.torch.measure.profiler import Profiler
from checkmate.torch.options import Checkpoints, Compiler, CostSource, Options, Outputs
from checkmate.torch.step.programs import Loss, Program, cut_evenly, forward_program, step_program, under_autocast

_log = logging.getLogger("checkmate.torch")
_SHAPES = 64  # shapes that one step may be compiled for; torch's own limit of 8 would then run unplanned
_TRACING = {"recompile_limit": _SHAPES, "trace_autograd_ops": True, "optimize_ddp": False}  # one graph, also under DDP
_LOGS = ("debug", "info", "warning", "error", "exception", "critical", "log")

Example = Sequence[Any] | Mapping[str, Any]
Finish = Callable[[Callable[[], Any]], tuple[Any, torch.Tensor]]
"""Runs what was compiled, and what a step has to do besides."""


class GraphBreakError(CheckmateError, RuntimeError):
    """The step cannot be traced as one graph."""


class _Done(Exception):
    """Stops a compilation or a run when what was wanted of it is there."""

    graph: Graph


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a step is made and run.

    Attributes:
        program: What is traced.
        finish: What is done with what it returns.
        whole: Whether the updates are in the program.
        micro_batches: Equal parts that the program cuts a batch into.
        wrapped: What the model is in that averages its gradients over ranks, if it is.
    """

    program: Program
    finish: Finish
    whole: bool
    micro_batches: int = 1
    wrapped: DistributedDataParallel | None = None

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """What the program is traced in, without a word to other ranks."""
        return contextlib.nullcontext() if self.wrapped is None else inside_ddp_forward(self.wrapped)


class Step:
    """A compiled training step. Make one with `checkmate.torch.compile`.

    Attributes:
        graph: The graph of the step for the example.
        plan: The plan that runs it.
        result: What the solver found, with its proof.
        whole: Whether the optimizer's updates are in the graph, each where its gradient is born.
    """

    graph: Graph
    plan: Plan
    result: Result
    whole: bool

    def __init__(self, recipe: Recipe, example: Example, options: Options, *, dynamic: bool = False) -> None:
        self.whole = recipe.whole
        self._finish = recipe.finish
        self._micro_batches = recipe.micro_batches
        self._armed = False
        self._planned: list[tuple[Capture, Result]] = []
        hooks = Hooks(planned=self._note, gate=self._gate, inference=False, whole=recipe.whole)
        given = options.plan

        def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            # A plan that was given is the example's; other shapes are planned.
            now = replace(options, plan=given if not self._planned else None)
            return compile_graph(gm, inputs, now, hooks)

        self._run = torch.compile(recipe.program, backend=backend, fullgraph=True, dynamic=dynamic)
        with contextlib.suppress(_Done), recipe.tracing():
            self._batch(example)
        if recipe.wrapped is not None:
            self._run = run_inside_ddp(recipe.wrapped, self._run)
        capture, result = self._planned[0]
        self.graph, self.plan, self.result = capture.graph, result.plan, result
        self._armed = True

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor]:
        """Run one step: forward, loss, backward, and the optimizer if there is one.

        Args:
            args: What the example was: the model's inputs, then the loss's target.
            kwargs: The model's inputs, if the example was a mapping.

        Returns:
            The prediction (None where the model computes its own loss) and the loss, both detached.

        Raises:
            CheckmateError: A new shape for which no plan keeps the budget.
            OptionError: The batch cannot be cut into ``micro_batches`` equal parts.
        """
        cut_evenly(kwargs or args, self._micro_batches)
        return self._finish(functools.partial(self._batch, kwargs or args))

    def _batch(self, batch: Example) -> Any:
        args, kwargs = ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
        return _traced(functools.partial(self._run, args, kwargs))

    def _gate(self) -> None:
        if not self._armed:
            raise _Done

    def _note(self, capture: Capture, result: Result) -> None:
        if self._planned:
            peak = format_bytes(result.peak_bytes)
            _log.warning("a new shape was compiled and planned in %.1f s: peak %s", result.elapsed_s, peak)
        self._planned.append((capture, result))


def compile(  # noqa: A001 - torch's own word for it
    model: torch.nn.Module,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    example: Example,
    budget: Amount | Budget | None = None,
    compiler: Compiler = "eager",
    whole: bool | None = None,
    micro_batches: int = 1,
    clip_norm: float | None = None,
    autocast: torch.dtype | None = None,
    solver: Solver | str | None = None,
    time_limit_s: float | None = 30.0,
    plan: PlanSource | None = None,
    outputs: Outputs = "held",
    reserve: Amount = 0,
    accumulate: bool = False,
    checkpoints: Checkpoints = "hints",
    costs: CostSource = "measured",
    dynamic: bool = False,
) -> Step:
    """A training step that keeps a memory budget: ``prediction, loss = step(x, y)``.

    The step is traced and planned here, from the example; nothing runs, and model, optimizer and random
    state stay as they are.

    Args:
        model: Called with all of a batch but its last element, or with a mapping's items by name.
        loss: Called with the prediction and the last element of a batch. None if the model returns its
            loss, itself or as ``.loss``; the prediction is then not kept and comes back as None.
        optimizer: Steps after every backward, and clears the gradients. None leaves them in ``.grad``.
        example: A batch: ``(x, y)``, or a mapping of the model's arguments.
        budget: See `Options`, as all that is not described here.
        compiler: ``"inductor"`` measures every compilation on the example: a step is run twice, and everything put back. It
            has no whole steps.
        whole: Whether the optimizer's updates are planned with the rest, each where its gradient is born, so that
            gradients are never there all at once. By default where they can be: for optimizers of torch that
            update each parameter by itself, such as SGD, Adam and AdamW. The arithmetic, the state and its
            ``state_dict`` are the optimizer's own, and its learning rate may change at any time.
        micro_batches: Equal parts that a batch is cut into and computed one after the other, their gradients added
            up: one step over the whole batch. Only in a whole step.
        clip_norm: The most that the norm of all gradients together may be. It needs every gradient before the first
            can be used, so that in a whole step too they are there all at once.
        autocast: ``torch.bfloat16`` or ``torch.float16``: model and loss run under `torch.autocast` for their device, the
            parameters stay as they are. Float16 needs a loss that is scaled, so that it cannot be with an optimizer.
        solver: Looks for the plan.
        time_limit_s: Seconds for the search.
        plan: A plan, or its file, to run instead.
        outputs: Whether the prediction is held until the backward is over; in a whole step it is.
        reserve: Memory to leave besides the optimizer's state, which is reserved for anyway.
        accumulate: Whether gradients stay from step to step; without an optimizer, and unless the caller clears them, they do.
        checkpoints: Whether regions under ``torch.utils.checkpoint`` are computed again in any case. Not in a whole step:
            it is where the backward begins that nothing of them may be held.
        costs: Where costs come from.
        dynamic: Whether one plan, made for the sizes of the example, serves all batches that are no larger; otherwise
            every shape is compiled and planned for itself.

    Raises:
        InfeasibleBudgetError: No plan keeps the budget.
        GraphBreakError: The step cannot be traced as one graph.
        OptionError: A whole step is asked for, and the optimizer or the options do not allow one.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> x, y = torch.ones(3, 4), torch.zeros(3, 2)
        >>> step = compile(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), example=(x, y))
        >>> prediction, loss = step(x, y)
        >>> prediction.shape, step.whole, step.plan.order == tuple(range(len(step.graph.ops)))
        (torch.Size([3, 2]), True, True)
    """
    options = Options(
        budget=budget,
        compiler=compiler,
        solver=solver,
        time_limit_s=time_limit_s,
        plan=plan,
        outputs=outputs,
        reserve=_with_state(reserve, optimizer),
        accumulate=accumulate,
        checkpoints=checkpoints,
        costs=costs,
    )
    if checkpoints == "respected":
        if whole:
            raise OptionError("checkpoints='respected' cannot be in a whole step", hint="leave out whole=True")
        whole = False
    if compiler == "inductor":
        # An update is one op that calls the optimizer, which would be a wall in the middle of what Inductor fuses.
        if whole or micro_batches > 1:
            raise OptionError("compiler='inductor' has no whole steps", hint="leave out whole=True and micro_batches")
        whole = False
    example = checked(example, loss)
    if autocast is torch.float16 and optimizer is not None:
        raise OptionError(
            "autocast=torch.float16 needs a scaled loss, or small gradients become zero",
            hint="use torch.bfloat16; or leave out the optimizer, scale in the loss, and step through torch.amp.GradScaler",
        )
    recipe = recipe_of(model, loss, optimizer, example, whole and not accumulate, micro_batches, clip_norm, autocast)
    return Step(recipe, example, options, dynamic=dynamic)


def capture(
    model: torch.nn.Module,
    loss: Loss | None = None,
    *,
    example: Example,
    optimizer: torch.optim.Optimizer | None = None,
    whole: bool | None = None,
    micro_batches: int = 1,
    clip_norm: float | None = None,
    autocast: torch.dtype | None = None,
    outputs: Outputs = "held",
    reserve: Amount = 0,
    costs: CostSource = "measured",
    device: Device | str | os.PathLike[str] | None = None,
) -> Graph:
    """The graph of a training step. Nothing runs and nothing is allocated, but for measuring costs.

    Args:
        model: As in `compile`, as all that is not described here.
        loss: The loss.
        example: A batch.
        optimizer: Its state counts as resident, and in a whole step its updates are ops of the graph.
        whole: Whether the updates are in the graph.
        micro_batches: Parts of a batch.
        clip_norm: The most that the norm of the gradients may be.
        autocast: Type of a region of `torch.autocast` around model and loss.
        outputs: Whether the prediction is held.
        reserve: Memory to leave.
        costs: ``"measured"`` runs every distinct op alone a few times; ``"estimated"`` runs nothing, and
            takes workspace as 0 (``"flops"``, the earlier name, means the same).
        device: A device that need not be there, by name (``"H100"``), as a profile or a file with one. The step is traced on the
            processor and then as it would be there: its attention, its allocator, with the least times that its
            arithmetic and traffic allow. Model and batch may be on the meta device. `fits` says what is not known.

    Raises:
        GraphBreakError: The step cannot be traced as one graph.
        OptionError: No such device is known.
    """
    target = None if device is None else EmulatedDevice(load_device(device), cpu_costs=Profiler())
    granule = 1 if target is None else target.device.granule_bytes
    options = Options(outputs=outputs, reserve=_with_state(reserve, optimizer, granule), costs=costs)
    with fake_inputs(checked(example, loss), model, loss, optimizer) as batch:
        recipe = recipe_of(model, loss, optimizer, batch, whole, micro_batches, clip_norm, autocast)
        return captured(recipe, batch, options, target)


def captured(recipe: Recipe, batch: Example, options: Options, target: EmulatedDevice | None = None) -> Graph:
    """The graph of a step, by a recipe.

    Args:
        recipe: How it is made.
        batch: The example.
        options: What is asked of the backend.
        target: The device that it is for, if not the one at hand.
    """

    def stop(graph: Graph) -> Result:
        done = _Done()
        done.graph = graph
        raise DynamoTransparentError(done)

    hooks = Hooks(planner=stop, inference=False, whole=recipe.whole, target=target)
    backend = functools.partial(compile_graph, options=options, hooks=hooks)
    run = torch.compile(recipe.program, backend=backend, fullgraph=True, dynamic=False)
    args, kwargs = ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
    rules = cuda_autocast_rules() if target is not None and target.device.kind == "cuda" else contextlib.nullcontext()
    try:
        with recipe.tracing(), rules:
            _traced(functools.partial(run, args, kwargs))
    except _Done as done:
        return done.graph
    raise GraphError("the step was not traced: torch.compile is off", hint="unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE")


def recipe_of(
    model: torch.nn.Module,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer | None,
    example: Example,
    whole: bool | None,
    micro_batches: int,
    clip_norm: float | None,
    autocast: torch.dtype | None,
) -> Recipe:
    """How a step is made and run, from what `compile` is given.

    Raises:
        OptionError: A whole step is asked for, and the optimizer or the options do not allow one.
    """
    cut_evenly(example, micro_batches)
    if clip_norm is not None and not clip_norm > 0:
        raise OptionError(f"clip_norm={clip_norm!r} must be more than zero")
    if uses_fsdp(model):
        raise OptionError(
            "fully_shard gathers parameters between the graphs of its modules, so that no one graph is the step",
            hint="torch.compile(model, backend='checkmate', options={'budget': ...}) plans the graph of each module",
        )
    wrapped = model if isinstance(model, DistributedDataParallel) else None
    model = model if wrapped is None else wrapped.module
    forward = forward_program(model, loss)
    if autocast is not None:
        forward = under_autocast(forward, _device_type(model, example), _half(autocast))
    reason = "there is no optimizer" if optimizer is None else unsupported_reason(optimizer, model)
    if wrapped is not None:
        reason = "DistributedDataParallel averages gradients in hooks of the backward"
    if whole is False:
        reason = "whole=False"
    if optimizer is not None and reason is None:
        updates = Updates(optimizer)
        program = step_program(forward, updates, micro_batches=micro_batches, clip_norm=clip_norm)
        if clip_norm is not None:
            _log.info("clip_norm needs the norm of all gradients: none can be used before the last is there")
        return Recipe(program, functools.partial(_finish_whole, updates), whole=True, micro_batches=micro_batches)
    if whole or micro_batches > 1:
        what = "whole=True" if whole else f"micro_batches={micro_batches} needs a whole step, which"
        raise OptionError(f"{what} cannot be: {reason}", hint="give an optimizer of torch.optim, such as AdamW, all parameters")
    if optimizer is not None and whole is None:
        _log.warning("the optimizer's step comes after the backward and is not planned with it: %s", reason)
    return Recipe(forward, functools.partial(_finish_split, optimizer, clip_norm), whole=False, wrapped=wrapped)


def _half(autocast: torch.dtype) -> torch.dtype:
    if autocast not in (torch.bfloat16, torch.float16):
        raise OptionError(f"autocast={autocast!r} is not a type of half precision", hint="give torch.bfloat16 or torch.float16")
    return autocast


def _device_type(model: torch.nn.Module, example: Example) -> str:
    tensors = (*model.parameters(), *pytree.tree_leaves(example))
    return next((t.device.type for t in tensors if isinstance(t, torch.Tensor)), "cpu")


def _finish_whole(updates: Updates, run: Callable[[], Any]) -> tuple[Any, torch.Tensor]:
    if any(p.grad is not None for p in updates.parameters):
        raise OptionError(
            "gradients of an earlier backward are there, and a whole step would not use them",
            hint="call optimizer.zero_grad(set_to_none=True) before the step, or compile it with whole=False",
        )
    prediction, loss, _ = run()
    updates.optimizer._opt_called = True  # type: ignore[attr-defined] # what learning-rate schedules look for
    return prediction, loss


def _finish_split(
    optimizer: torch.optim.Optimizer | None, clip_norm: float | None, run: Callable[[], Any]
) -> tuple[Any, torch.Tensor]:
    prediction, loss = run()
    loss.backward()
    if optimizer is not None:
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return prediction, loss.detach()


def _traced(run: Callable[[], Any]) -> Any:
    try:
        with torch.enable_grad(), dynamo_config.patch(**_TRACING, ignore_logger_methods=_logging()):
            return run()
    except Unsupported as error:
        raise GraphBreakError(
            f"the step cannot be traced as one graph: {_broken_at(error)}",
            hint="take out of the model what breaks the graph, or compile it with torch.compile(model, backend='checkmate'), "
            "which plans each part",
        ) from error


def _logging() -> set[Callable[..., Any]]:
    """Methods of loggers, and what libraries add to them (``warning_once``): a line of a log is no reason to break a graph."""
    return {method for name, method in vars(logging.Logger).items() if name.partition("_")[0] in _LOGS}


def _broken_at(error: Unsupported) -> str:
    """Why and where, in a line; torch's own page of advice stays as the cause."""
    why = str(error).split("\n", 1)[0]
    frame = next(reversed(error.real_stack or ()), None)
    return why if frame is None else f"{why}, at {frame.filename}:{frame.lineno}: `{frame.line}`"


def checked(example: Example, loss: Loss | None) -> Example:
    """The example, if it is a batch for the loss.

    Raises:
        OptionError: It is not.
    """
    if isinstance(example, Mapping):
        if loss is not None:
            raise OptionError("example is a mapping, so that the loss has no target", hint="give a tuple (x, y), or loss=None")
        return example
    if not isinstance(example, (tuple, list)) or len(example) < (1 if loss is None else 2):
        raise OptionError(f"example={type(example).__name__} is not a batch", hint="give a tuple (x, y), or a mapping")
    return example


def _with_state(reserve: Amount, optimizer: torch.optim.Optimizer | None, granule: int = 1) -> int:
    return Options(reserve=reserve).reserve_bytes + (0 if optimizer is None else state_bytes(optimizer, granule))
