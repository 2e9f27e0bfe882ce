"""A whole training step under a budget: ``prediction, loss = step(x, y)``."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from checkmate.core.errors import CheckmateError, GraphError, OptionError
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Result
from checkmate.core.units import Amount, format_bytes
from checkmate.solvers.session import Solver
from checkmate.torch.backend import Hooks, compile_graph
from checkmate.torch.capture import Capture
from checkmate.torch.compat import Carrier, Unsupported, dynamo_config
from checkmate.torch.optimizers import state_bytes
from checkmate.torch.options import CostSource, Options, Outputs

_log = logging.getLogger("checkmate.torch")
_SHAPES = 64  # shapes that one step may be compiled for; torch's own limit of 8 would then run unplanned

Example = Sequence[Any] | Mapping[str, Any]
Loss = Callable[..., torch.Tensor]


class GraphBreakError(CheckmateError, RuntimeError):
    """The step cannot be traced as one graph."""


class _Done(Exception):
    """Stops a compilation or a run when what was wanted of it is there."""

    graph: Graph


class Step:
    """A compiled training step. Make one with `checkmate.torch.compile`.

    Attributes:
        graph: The graph of the step for the example.
        plan: The plan that runs it.
        result: What the solver found, with its proof.
    """

    graph: Graph
    plan: Plan
    result: Result

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss | None,
        optimizer: torch.optim.Optimizer | None,
        example: Example,
        options: Options,
    ) -> None:
        self._optimizer = optimizer
        self._armed = False
        self._planned: list[tuple[Capture, Result]] = []
        hooks = Hooks(planned=self._note, gate=self._gate, inference=False)
        given = options.plan

        def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            # A plan that was given is the example's; other shapes are planned.
            now = replace(options, plan=given if not self._planned else None)
            return compile_graph(gm, inputs, now, hooks)

        self._run = torch.compile(_fresh(model, loss), backend=backend, fullgraph=True, dynamic=False)
        with contextlib.suppress(_Done):
            self._forward(example)
        capture, result = self._planned[0]
        assert result.plan is not None
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
        """
        prediction, loss = self._forward(kwargs or args)
        loss.backward()
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return prediction, loss.detach()

    def _forward(self, batch: Example) -> tuple[Any, torch.Tensor]:
        args, kwargs = ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
        return _traced(functools.partial(self._run, args, kwargs))

    def _gate(self) -> None:
        if not self._armed:
            raise _Done

    def _note(self, capture: Capture, result: Result) -> None:
        if self._planned:
            assert result.peak_bytes is not None
            peak = format_bytes(result.peak_bytes)
            _log.warning("a new shape was compiled and planned in %.1f s: peak %s", result.elapsed_s, peak)
        self._planned.append((capture, result))


def compile(  # noqa: A001 - torch's own word for it
    model: torch.nn.Module,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    example: Example,
    budget: Amount | None = None,
    solver: Solver | str | None = None,
    time_limit_s: float | None = 30.0,
    plan: Plan | str | None = None,
    outputs: Outputs = "held",
    reserve: Amount = 0,
    accumulate: bool = False,
    costs: CostSource = "measured",
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
        budget: See `Options`, as all that follow.
        solver: Looks for the plan.
        time_limit_s: Seconds for the search.
        plan: A plan, or its file, to run instead.
        outputs: Whether the prediction is held until the backward is over.
        reserve: Memory to leave besides the optimizer's state, which is reserved for anyway.
        accumulate: Whether gradients stay from step to step; without an optimizer, and unless the caller clears them, they do.
        costs: Where costs come from.

    Raises:
        InfeasibleBudgetError: No plan keeps the budget.
        GraphBreakError: The step cannot be traced as one graph.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> x, y = torch.ones(3, 4), torch.zeros(3, 2)
        >>> step = compile(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), example=(x, y))
        >>> prediction, loss = step(x, y)
        >>> prediction.shape, step.plan.order == tuple(range(len(step.graph.ops)))
        (torch.Size([3, 2]), True)
    """
    options = Options(
        budget=budget,
        solver=solver,
        time_limit_s=time_limit_s,
        plan=plan,
        outputs=outputs,
        reserve=_with_state(reserve, optimizer),
        accumulate=accumulate,
        costs=costs,
    )
    return Step(model, loss, optimizer, _checked(example, loss), options)


def capture(
    model: torch.nn.Module,
    loss: Loss | None = None,
    *,
    example: Example,
    optimizer: torch.optim.Optimizer | None = None,
    outputs: Outputs = "held",
    reserve: Amount = 0,
    costs: CostSource = "measured",
) -> Graph:
    """The graph of a training step. Nothing runs and nothing is allocated, but for measuring costs.

    Args:
        model: As in `compile`.
        loss: As in `compile`.
        example: As in `compile`.
        optimizer: Its state counts as resident.
        outputs: As in `compile`.
        reserve: As in `compile`.
        costs: ``"measured"`` runs every distinct op alone a few times; ``"flops"`` runs nothing, and
            knows no workspace.

    Raises:
        GraphBreakError: The step cannot be traced as one graph.
    """
    options = Options(outputs=outputs, reserve=_with_state(reserve, optimizer), costs=costs)

    def stop(graph: Graph) -> Result:
        done = _Done()
        done.graph = graph
        raise Carrier(done)

    backend = functools.partial(compile_graph, options=options, hooks=Hooks(plan=stop, inference=False))
    run = torch.compile(_fresh(model, loss), backend=backend, fullgraph=True, dynamic=False)
    batch = _checked(example, loss)
    args, kwargs = ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
    try:
        _traced(functools.partial(run, args, kwargs))
    except _Done as done:
        return done.graph
    raise GraphError("the step was not traced: torch.compile is off", hint="unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE")


def _fresh(model: torch.nn.Module, loss: Loss | None) -> Callable[..., Any]:
    """The forward of a step, with a code object of its own: Dynamo counts recompilations by code object."""

    def forward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        if loss is None:
            output = model(*args, **kwargs)
            return None, output if isinstance(output, torch.Tensor) else output.loss
        prediction = model(*args[:-1])
        value = loss(prediction, args[-1])
        # Detached, or its gradient of zeros would be allocated in full.
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, prediction), value

    return FunctionType(forward.__code__.replace(), forward.__globals__, forward.__name__, closure=forward.__closure__)


def _traced(run: Callable[[], Any]) -> Any:
    try:
        with torch.enable_grad(), dynamo_config.patch(recompile_limit=_SHAPES):
            return run()
    except Unsupported as error:
        raise GraphBreakError(
            f"the step cannot be traced as one graph: {_broken_at(error)}",
            hint="take out of the model what breaks the graph, or compile it with torch.compile(model, backend='checkmate'), "
            "which plans each part",
        ) from error


def _broken_at(error: Unsupported) -> str:
    """Why and where, in a line; torch's own page of advice stays as the cause."""
    why = str(error).split("\n", 1)[0]
    frame = next(reversed(error.real_stack or ()), None)
    return why if frame is None else f"{why}, at {frame.filename}:{frame.lineno}: `{frame.line}`"


def _checked(example: Example, loss: Loss | None) -> Example:
    if isinstance(example, Mapping):
        if loss is not None:
            raise OptionError("example is a mapping, so that the loss has no target", hint="give a tuple (x, y), or loss=None")
        return example
    if not isinstance(example, (tuple, list)) or len(example) < (1 if loss is None else 2):
        raise OptionError(f"example={type(example).__name__} is not a batch", hint="give a tuple (x, y), or a mapping")
    return example


def _with_state(reserve: Amount, optimizer: torch.optim.Optimizer | None) -> int:
    return Options(reserve=reserve).reserve_bytes + (0 if optimizer is None else state_bytes(optimizer))
