"""The Dynamo backend: ``torch.compile(model, backend="checkmate", options={"budget": "8GiB"})``."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from checkmate.core.errors import CheckmateError, GraphError, InfeasibleBudgetError, OptionError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, Result
from checkmate.core.simulate import simulate
from checkmate.core.units import format_bytes
from checkmate.solvers.given import run_order
from checkmate.studies.min_budget import min_budget
from checkmate.torch.accounts import Account
from checkmate.torch.agreement import plan_together
from checkmate.torch.capture import Capture, Costs
from checkmate.torch.compat import (
    BoxedRun,
    Carrier,
    aot_autograd,
    as_boxed,
    boxed,
    forgetting_this_frame,
    functorch_config,
)
from checkmate.torch.coordinator import IN_FLIGHT
from checkmate.torch.distributed import beside
from checkmate.torch.division import Choice
from checkmate.torch.options import Options
from checkmate.torch.partition import Task, partition, whole
from checkmate.torch.planning import plan_graph
from checkmate.torch.profile import Profiler
from checkmate.torch.ranks import ranks_of_job, stopping_together
from checkmate.torch.regions import inline_regions
from checkmate.torch.roofline import estimated
from checkmate.torch.shapes import settle_shapes
from checkmate.torch.sizes import present_bytes, unique_bytes
from checkmate.torch.target import Target

_log = logging.getLogger("checkmate.torch")
_SCALAR_BYTES = 16


def checkmate(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Backend for ``torch.compile`` that keeps a memory budget.

    Args:
        gm: The graph that Dynamo traced.
        example_inputs: Its traced inputs.
        mode: Not used; any value but None is refused.
        options: See `Options`.
        kwargs: Options given as keywords.

    Raises:
        CheckmateError: An option is wrong, or no plan keeps the budget; the model is untouched.
    """
    try:
        parsed = Options.of({**(options or {}), **kwargs})
        if mode is not None:
            raise OptionError(f"mode={mode!r} means nothing to backend 'checkmate'", hint="leave it out")
    except CheckmateError as error:
        raise Carrier(error) from error
    return compile_graph(gm, example_inputs, parsed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """How a caller inside this package takes part in a compilation.

    Attributes:
        plan: Finds the plan of a graph instead of the options.
        planned: Told the graph and its plan before anything runs.
        gate: Called before every run of a forward; may raise.
        inference: Whether graphs without gradients are compiled; otherwise they are refused.
        whole: Whether the graph is a whole step, its backward and its updates in it.
        target: The device that the step is planned for, where that is not the one at hand.
    """

    plan: Callable[[Graph], Result] | None = None
    planned: Callable[[Capture, Result], None] = lambda capture, result: None
    gate: Callable[[], None] | None = None
    inference: bool = True
    whole: bool = False
    target: Target | None = None


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    hooks: Hooks | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo under options.

    Raises:
        CheckmateError: No plan keeps the budget; carried through Dynamo, so that the user sees it as it is.
    """
    hooks = Hooks() if hooks is None else hooks
    settle_shapes(example_inputs)
    inline_regions(gm)
    target = hooks.target
    if target is not None:
        try:
            target.lower(gm)
        except CheckmateError as error:
            raise Carrier(error) from error
    accounts: list[Account] = []
    gradients = gradient_bytes(example_inputs, options.accumulate)
    wrapped = beside(example_inputs, options.accumulate)
    in_flight = IN_FLIGHT.held_bytes() if options.budget is not None else 0
    # On CUDA what is in flight, or held by wrappers, is among what is allocated.
    elsewhere = max(in_flight + wrapped.held_bytes, elsewhere_bytes(example_inputs, options))
    ranks = ranks_of_job() if options.ranks == "together" and options.budget is not None and hooks.plan is None else None

    forget = forgetting_this_frame()

    def gate() -> None:
        if hooks.gate is not None:
            hooks.gate()
        if ranks is not None:
            ranks.forward_begins()

    def plan(graph: Graph) -> tuple[Graph, Result]:
        nonlocal in_flight
        if hooks.plan is not None:
            return graph, hooks.plan(graph)
        if ranks is None:
            return graph, _plan(graph, in_flight, options)
        agreed = plan_together(
            ranks, graph, in_flight, f"a budget of {options.budget}", functools.partial(_plan, options=options)
        )
        in_flight = agreed.in_flight_bytes
        return agreed.graph, agreed.result

    def planned(capture: Capture, result: Result) -> None:
        # A whole step is over when it returns: nothing of it is in flight.
        if options.budget is not None and capture.boundary is not None:
            _mind_tangents(capture.graph, capture.boundary)
            graph, share = capture.graph, IN_FLIGHT.share(capture.graph, options.budget)
            assert result.plan is not None
            accounts.append(
                Account(
                    graph=graph,
                    boundary=capture.boundary,
                    choice=Choice.of(graph, result.plan, capture.boundary, wrapped.passing_bytes),
                    budget=options.budget,
                    budget_bytes=share.budget_bytes if share else Problem(graph, options.budget).budget_bytes,
                    resident_bytes=graph.resident_bytes - in_flight,
                    planned_gradient_bytes=gradients + wrapped.view_bytes,
                    passing_bytes=wrapped.passing_bytes,
                    time_limit_s=options.time_limit_s,
                    forget=forget,
                    ranks=ranks,
                )
            )
        hooks.planned(capture, result)

    task = Task(
        costs=target.costs if target is not None else costs_of(options),
        plan=plan,
        hold_outputs=options.outputs == "held",
        split_convolutions=options.split_convolutions,
        respect=options.checkpoints == "respected",
        no_recompute=frozenset(options.no_recompute),
        extra_resident_bytes=options.reserve_bytes + gradients + elsewhere,
        on_planned=planned,
    )
    if target is not None:
        task = replace(
            task, relabel=target.relabel, extra_resident_bytes=task.extra_resident_bytes + target.device.blas_workspace_bytes
        )
    compile_with_aot = aot_autograd(
        fw_compiler=lambda module, inputs: _forward(module, accounts, gate),
        bw_compiler=lambda module, inputs: _backward(module, accounts),
        inference_compiler=lambda module, inputs: _inference(module, task, hooks, gate),
        partition_fn=functools.partial(partition, task=task),
        keep_inference_input_mutations=True,
    )
    try:
        # A hit of AOTAutograd's cache would skip the partition function, and with it the plan.
        with functorch_config.patch(enable_autograd_cache=False), stopping_together(ranks):
            run = compile_with_aot(gm, example_inputs)
            if ranks is not None and (accounts or hooks.whole):
                ranks.decide("running it", b"", lambda said: b"")
            return run
    except CheckmateError as error:
        raise Carrier(error) from error


def _plan(graph: Graph, in_flight_bytes: int, options: Options) -> Result:
    """The plan that a division gave a graph, else one for it alone beside what is in flight."""
    share = IN_FLIGHT.share(graph, options.budget) if options.budget is not None else None
    if share is not None:
        return run_order(graph, share.order)
    try:
        return plan_graph(graph, options)
    except (InfeasibleBudgetError, PlanNotFoundError):
        if not in_flight_bytes:
            raise
        # Too much is in flight, which a division will mend once the step is over.
        smallest = min_budget(graph, limits=Limits(time_s=options.time_limit_s))
        assert options.budget is not None
        budget = Problem(graph, options.budget).budget_bytes
        if smallest.plan is None or simulate(graph, smallest.plan).peak_bytes - in_flight_bytes > budget:
            raise
        return run_order(graph, smallest.plan.order)


def _mind_tangents(graph: Graph, boundary: int) -> None:
    """Say what gradients of outputs beside a loss cost: AOTAutograd makes them even for outputs that nobody uses."""
    sizes = [graph.values[v].size_bytes for v in graph.ops[boundary].outputs]
    large = sum(size for size in sizes if size > _SCALAR_BYTES)
    if large and large < sum(sizes):
        _log.warning(
            "what the forward returns beside its loss has gradients of %s, zeros if nobody uses them: compile what returns "
            "the loss alone, or detach the rest",
            format_bytes(large),
        )


def _inference(module: fx.GraphModule, task: Task, hooks: Hooks, gate: Callable[[], None]) -> BoxedRun:
    if hooks.whole:
        return _forward(whole(module, task), [], gate)
    if not hooks.inference:
        raise GraphError(
            "nothing in this step requires a gradient, so that there is no backward to plan",
            hint="check requires_grad of the parameters, and that the loss depends on them",
        )
    return boxed(module)


def _forward(module: fx.GraphModule, accounts: list[Account], gate: Callable[[], None]) -> BoxedRun:
    run = boxed(module)

    def guarded(args: list[Any]) -> Any:
        gate()
        return IN_FLIGHT.forward(accounts[0], run, args) if accounts else run(args)

    return as_boxed(guarded)


def _backward(module: fx.GraphModule, accounts: list[Account]) -> BoxedRun:
    run = boxed(module)
    return as_boxed(lambda args: IN_FLIGHT.backward(run, args)) if accounts else run


def costs_of(options: Options) -> Costs:
    """Where the costs of ops come from."""
    return Profiler() if options.costs == "measured" else estimated


def gradient_bytes(example_inputs: Sequence[Any], accumulate: bool) -> int:
    """Bytes of gradients that are there when a graph is compiled, or may be there when it runs."""
    leaf = [t for t in example_inputs if isinstance(t, torch.Tensor) and t.is_leaf]
    coming = [t for t in leaf if t.requires_grad and t.grad is None] if accumulate else []
    return unique_bytes(t.grad for t in leaf if t.grad is not None) + unique_bytes(coming)


def elsewhere_bytes(example_inputs: Sequence[Any], options: Options) -> int:
    """Bytes allocated on the device that a graph does not show: known on CUDA, where the allocator says it."""
    tensors = [t for t in example_inputs if isinstance(t, torch.Tensor)]
    device = (
        torch.device(options.device) if options.device else next((t.device for t in tensors if t.device.type == "cuda"), None)
    )
    if device is None or device.type != "cuda":
        return 0
    seen = unique_bytes(tensors, present_bytes) + gradient_bytes(example_inputs, accumulate=False)
    return max(0, torch.cuda.memory_allocated(device) - seen)
