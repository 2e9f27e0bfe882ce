"""Plan, compile, read the bytes of temporary values, and plan again until the budget is kept. Nothing runs.

XLA decides on the bytes of a function at compile time.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from checkmate.core.budget import Budget, fixed_bytes
from checkmate.core.errors import CheckmateError, InfeasibleBudgetError, PlanError, PlanNotFoundError
from checkmate.core.evaluate import evaluate
from checkmate.core.graph import Graph, Op
from checkmate.core.plan import Plan
from checkmate.core.result import Reason, Result
from checkmate.core.units import format_bytes
from checkmate.cost.store import OpCost, Store
from checkmate.frontend import calibration, progress
from checkmate.frontend.calibration import Calibration, Proportional, Trial
from checkmate.frontend.options import TIME_LIMIT_S, PlanningOptions
from checkmate.frontend.plan_store import MeasuredPlan, PlanStore, SolvedPlans, sources_digest
from checkmate.frontend.planner import Replanner, keep_everything, near_smallest, planner_for
from checkmate.frontend.step_memory import StepMemory
from checkmate.jax._compat import any_equation, as_varying, is_of_a_plan, lowered, varying_axes
from checkmate.jax.apply_plan import PlannedProgram
from checkmate.jax.graph.capture import Capture, Fusions, capture_trace
from checkmate.jax.graph.loops import Loops
from checkmate.jax.graph.trace import Equation, as_called, given_bytes
from checkmate.jax.profiler import environment, estimate, estimated_ns, quickly, signature

_log = logging.getLogger("checkmate.jax")

_LOOPS = "+loops="
"""In the digest of a plan, before the bytes that loops save for their derivatives."""


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A captured function with its plan."""

    capture: Capture
    result: Result
    budget_bytes: int | None
    temp_bytes: int | None  # None if it was not compiled
    as_it_is: bool = False  # whether the function without a plan keeps the budget, and runs without barriers

    @property
    def needed_bytes(self) -> int | None:
        """Bytes of arguments, results and temporary values as compiled; None if it was not compiled."""
        return None if self.temp_bytes is None else fixed_bytes(self.capture.graph) + self.temp_bytes


class Figures:
    """The figures of the newest plan of a function or a step."""

    _planned: Planned | None = None

    @property
    def graph(self) -> Graph:
        """The graph that was planned: of a step, or of a function and its derivative."""
        return self._newest.capture.graph

    @property
    def result(self) -> Result:
        """The solver's result, with its proof: overhead, bound and gap, which hold whatever loops save."""
        return self._newest.result

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self._newest.result.plan

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes, or None."""
        return self._newest.budget_bytes

    @property
    def temp_bytes(self) -> int | None:
        """Bytes of temporary values as XLA compiled the plan; None if it was not compiled."""
        return self._newest.temp_bytes

    @property
    def _newest(self) -> Planned:
        if self._planned is None:
            raise PlanError("nothing is planned yet", hint="call jax.value_and_grad of the function first")
        return self._planned


@dataclass(eq=False)
class Compilation:
    """Compiles each plan of one capture once, and stores the bytes for later processes.

    It compiles nothing if plans are not to be verified. A function with collectives is compiled for one device of a mesh with
    axes of the given sizes. ``given`` are the arguments of the captured function, to trace it again with other loops.
    """

    capture: Capture
    given: Sequence[Any]
    donated: Sequence[int] = ()
    _: KW_ONLY
    exact: bool
    verify: bool
    axes: Mapping[str, int] | None = None
    loop_bytes: int | None = None

    @functools.cached_property
    def loops(self) -> Loops:
        """The loops of the program with their derivatives."""
        return Loops(self.capture.trace, estimated_ns)

    def of(self, plan: Plan) -> Compilation:
        """The program that a plan was made for, with loops that save as many bytes."""
        saved = plan.graph_digest.partition(_LOOPS)[2]
        return self.saving(int(saved)) if saved.isdecimal() else self

    def saving(self, loop_bytes: int) -> Compilation:
        """The program whose loops save some bytes for their derivatives.

        Its loops cost as much more or less as estimated, because each of these programs would have other loops to measure.
        """
        plain, trace = self.capture, self.loops.saving(loop_bytes, self.given)
        known = {signature(c): op for c, op in zip(plain.members, plain.graph.ops, strict=True) if c}
        scans = [(op, chain) for chain, op in zip(plain.members, plain.graph.ops, strict=True) if op.kind == "scan"]
        ratio = sum(op.cost for op, _ in scans) / max(1, sum(estimated_ns(chain) for _, chain in scans))

        def cost(chain: tuple[Equation, ...]) -> OpCost:
            if (op := known.get(signature(chain))) is not None:
                return OpCost(op.cost, op.workspace_bytes)
            found = estimate(chain)
            return OpCost(int(ratio * found.cost_ns), found.workspace_bytes)

        given = len(trace.arguments) - len(plain.boundary.tangents if plain.boundary else ())
        boundary = plain.boundary and replace(plain.boundary, tangents=trace.arguments[given:])
        made = capture_trace(trace, lambda chains: list(map(cost, chains)), plain.graph.name, boundary=boundary)
        # Without the buffers of donated arguments that results reuse.
        resident = made.graph.resident_bytes + fixed_bytes(plain.graph) - fixed_bytes(made.graph)
        made = replace(made, graph=msgspec.structs.replace(made.graph, resident_bytes=resident))
        return replace(self, capture=made, loop_bytes=loop_bytes)

    @property
    def fusions(self) -> Fusions | None:
        """The fusions of the function without a plan; None if programs of it differ from it even if everything is kept."""
        return None if self.exact or self.donated else self.capture.fusions

    @functools.cached_property
    def key(self) -> str:
        """Text of everything that determines the plan and its compiled bytes."""
        if not self.verify:
            return self.capture.graph.digest
        program = signature(self.capture.trace.equations)
        graph, exact = self.capture.graph.digest, " exact" * self.exact
        settings = f"{sources_digest()} {graph} {tuple(self.donated)} {environment()}{exact} {self.axes or ''}"
        return hashlib.sha256(f"jax {settings}\n{program}".encode()).hexdigest()

    @functools.cached_property
    def known(self) -> dict[tuple[int, ...], int]:
        """Bytes of temporary values of each compiled plan, by its order."""
        return {plan.order: plan.memory.peak_bytes for plan in PlanStore(self.key).all()}

    def temp_bytes(self, result: Result) -> int:
        """Bytes of temporary values of a plan, with those of cotangents that the caller gives."""
        order = result.plan.order
        if order not in self.known:
            with progress.shown("compiling a plan"):
                made = self._compiled(PlannedProgram(self.capture, result.plan, exact=self.exact))
            self.known[order] = made + given_bytes(self.capture.boundary)
            PlanStore(self.key).add(MeasuredPlan(order, StepMemory.of_whole_step(self.known[order])))
        return self.known[order]

    def _compiled(self, program: PlannedProgram) -> int:
        compiled = functools.partial(temp_bytes, donated=self.donated)
        if not self.axes:
            return compiled(*as_called(program, self.capture.trace, self.capture.boundary))
        # A separate thread is outside of the transformations around this call, which have these axes already.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(compiled, _on_mesh(program, self.axes), as_called(program, self.capture.trace, None)[1]).result()


def _on_mesh(program: PlannedProgram, axes: Mapping[str, int]) -> Callable[..., Any]:
    """A program with collectives as a function of the arrays of one device, each of which has its own.

    The results of all devices are stacked, because a result need not be the same on each.
    """
    devices = np.array(jax.devices()[: math.prod(axes.values())]).reshape(tuple(axes.values()))
    trace = program.capture.trace
    varying = [varying_axes(trace.types[v]) for v in trace.arguments]
    checked = any(map(varying_axes, trace.types))

    def on_device(*arguments: Any) -> list[Any]:
        given = [as_varying(a, names) for a, names in zip(arguments, varying, strict=True)]
        return [jnp.reshape(r, r.shape or (1,)) for r in program(given)]

    spread = jax.sharding.PartitionSpec(tuple(axes))
    mesh = jax.sharding.Mesh(devices, tuple(axes))
    return jax.shard_map(on_device, mesh=mesh, in_specs=jax.sharding.PartitionSpec(), out_specs=spread, check_vma=checked)


def planned_within(compilation: Compilation, options: PlanningOptions) -> Planned:
    """The cheapest plan found whose compiled bytes keep the budget; the first plan found if none is compiled.

    Raises:
        InfeasibleBudgetError: No compiled plan keeps the budget.
    """
    graph = compilation.capture.graph
    try:
        if options.plan is not None or options.budget is None or not compilation.verify:
            chosen = compilation if options.plan is None else compilation.of(options.plan)
            wanted = options.budget and options.budget.with_total(options.budget.resolve(graph), graph)
            result = planner_for(replace(options, budget=wanted))(chosen.capture.graph)
            planned = _planned(compilation, chosen, result, wanted and result.budget_bytes)
            needed, limit = planned.needed_bytes, planned.budget_bytes
            if needed is not None and limit is not None and needed > limit:
                raise calibration.refusal(limit, needed)
            return planned
        return _as_it_is(compilation, options.budget) or _answered(compilation, options, options.budget)
    except InfeasibleBudgetError as error:
        raise _naming_the_loop(error, compilation.capture) from None


def _as_it_is(compilation: Compilation, wanted: Budget) -> Planned | None:
    """The function as XLA compiles it without a plan, if that is known and keeps the budget."""
    graph, fusions = compilation.capture.graph, compilation.fusions
    if fusions is None:
        return None
    fixed = fixed_bytes(graph)
    needed = fixed + fusions.temp_bytes
    budget = wanted.within(fixed_bytes=fixed, keep_all_bytes=needed)
    if needed > budget:
        return None
    result = keep_everything(graph)
    progress.planned(graph, result)
    return Planned(compilation.capture, result, budget, fusions.temp_bytes, as_it_is=True)


class _Answer(msgspec.Struct, frozen=True):
    """The plan for a budget whose compiled bytes keep it, or the arguments of the refusal."""

    budget_bytes: int
    result: Result | None = None
    refusal: dict[str, str | int | None] | None = None


def _answered(compilation: Compilation, options: PlanningOptions, wanted: Budget) -> Planned:
    """The answer of an earlier process to the same question if it still holds, or a new one, which is stored."""
    if SolvedPlans.of_user() is None:
        return _planned(compilation, *_calibrated(compilation, options, wanted))
    graph = compilation.capture.graph
    facts = [(op.cost, op.phase) for op in graph.ops], graph.resident_bytes, options
    key = hashlib.sha256(f"{compilation.key} {facts}".encode()).hexdigest()
    answers = Store("answers", _Answer, "plans are searched and compiled again in every process")
    known = answers.get([key]).get(key)
    if known is not None and (before := _found_before(compilation, known)) is not None:
        return before
    try:
        planned = _planned(compilation, *_calibrated(compilation, options, wanted))
    except InfeasibleBudgetError as error:
        if not compilation.loops.stacked_bytes:  # plans with other loops, which later calls compile, may keep the budget
            answers.add({key: _Answer(error.budget_bytes, refusal=vars(error))}, replace=True)
        raise
    answers.add({key: _Answer(planned.budget_bytes or 0, planned.result)}, replace=True)
    return planned


def _found_before(compilation: Compilation, known: _Answer) -> Planned | None:
    """A stored plan, checked and simulated, with its bytes; None if it does not hold, or a plan keeps the refused budget."""
    if known.result is None:
        smallest = min(compilation.known.values(), default=0) + fixed_bytes(compilation.capture.graph)
        if smallest <= known.budget_bytes:
            return None
        raise InfeasibleBudgetError(**known.refusal)  # pyright: ignore[reportArgumentType, reportCallIssue]
    chosen = compilation.of(known.result.plan)
    graph = chosen.capture.graph
    try:
        found = evaluate(graph, known.result.plan)
    except CheckmateError as error:
        _log.warning("a stored plan does not hold for its graph and is not used: %s", error)
        return None
    needed = chosen.temp_bytes(found)
    same = (found.cost, found.peak_bytes) == (known.result.cost, known.result.peak_bytes)
    if not same or fixed_bytes(graph) + needed > known.budget_bytes:
        return None
    progress.planned(graph, known.result)
    return Planned(chosen.capture, known.result, known.budget_bytes, needed)


def _planned(plain: Compilation, chosen: Compilation, result: Result, budget_bytes: int | None) -> Planned:
    needed = chosen.temp_bytes(result) if chosen.verify else None
    return Planned(chosen.capture, _of_any_loops(result, plain, chosen), budget_bytes, needed)


def _of_any_loops(result: Result, plain: Compilation, chosen: Compilation) -> Result:
    """The result of a program with its loops as chosen, among all programs: the bound and the overhead are of the plain one.

    A solver's bound holds for one choice of what loops save. Every program computes what the plain one does.
    """
    if not (plain.verify and plain.loops.stacked_bytes) and chosen is plain:
        return result
    cost, bound = result.cost, float(min(result.cost, plain.capture.graph.cost))
    plan = result.plan
    if chosen.loop_bytes is not None:
        plan = msgspec.structs.replace(plan, graph_digest=f"{chosen.capture.graph.digest}{_LOOPS}{chosen.loop_bytes}")
    found = _proven(msgspec.structs.replace(result, plan=plan, overhead=max(1.0, plain.capture.graph.overhead(cost))), bound)
    remark = f"the gap is {100 * result.gap:.2f} % among programs whose loops save the same values"
    return msgspec.structs.replace(found, remarks=(*result.remarks, remark))


def _naming_the_loop(error: InfeasibleBudgetError, capture: Capture) -> InfeasibleBudgetError:
    """The refusal, with a way to save less in a loop over batches if it needs more bytes than any other op."""
    graph = capture.graph

    def needs(op: Op) -> int:
        return op.workspace_bytes + sum(graph.values[v].size_bytes for v in {*op.inputs, *op.outputs})

    largest, chain = max(zip(graph.ops, capture.members, strict=True), key=lambda pair: needs(pair[0]))
    if largest.kind != "scan" or any(op.kind == "scan" and op.phase == "backward" for op in graph.ops):
        return error
    loop = f"the loop at {largest.source or largest.name}"
    planned = any(any_equation(e.eqn.params["jaxpr"], is_of_a_plan) for e in chain if e.kind == "scan")
    way = (
        f"lower the budget of checkmate.jax.remat in {loop}" if planned else f"put checkmate.jax.remat around the loss in {loop}"
    )
    return error.with_hint(f"{way}; or {error.hint}")


class _Programs:
    """The program of a compilation, and those whose loops save less, each with a separate planner."""

    def __init__(self, plain: Compilation, options: PlanningOptions) -> None:
        self.plain, self._options = plain, options
        self.by_graph: dict[str, tuple[Compilation, Replanner]] = {}
        self._add(plain)

    def of(self, result: Result) -> Compilation:
        """The compilation of the program that a plan is for."""
        return self.by_graph[result.plan.graph_digest][0]

    def cheapest(self, target_bytes: int) -> Result:
        """The cheapest plan within some live bytes: of the program as it is, or of one whose loops save less."""
        loops = self.plain.loops
        found: list[Result] = []
        failures: list[InfeasibleBudgetError | PlanNotFoundError] = []

        def plan(program: Compilation) -> None:
            try:
                found.append(self._add(program)(target_bytes))
            except (InfeasibleBudgetError, PlanNotFoundError) as error:
                failures.append(error)

        plan(self.plain)
        if loops.stacked_bytes and not (found and found[0].overhead == 1):
            kept, saved_bytes = self._with_loops(target_bytes)
            found += kept
            if saved_bytes < loops.carry_bytes:  # other ops that are computed again may cost less than nested loops
                plan(self.plain.saving(loops.carry_bytes))
            if not found:
                plan(self.plain.saving(0))
        if not found:
            raise failures[0]
        return min(found, key=lambda result: result.cost)

    def smallest(self, enough_bytes: int, *, alike: bool = False) -> Result:
        """A plan of nearly the smallest peak; a search ends if its plan takes at most some bytes.

        Measured costs differ from process to process, and the budget that a refusal names must not: they are estimated, or all
        ops cost alike, which gives another of many plans with this peak.
        """
        chosen, loops = self.plain, self.plain.loops
        if loops.stacked_bytes:
            programs = [self.plain.saving(saved_bytes) for saved_bytes in (loops.carry_bytes, 0)]
            chosen = min(programs, key=lambda program: keep_everything(program.capture.graph).peak_bytes)
        graph = self._add(chosen).graph
        costs = (int(alike) or (estimated_ns(chain) if chain else 0) for chain in chosen.capture.members)
        ops = tuple(msgspec.structs.replace(op, cost=cost) for op, cost in zip(graph.ops, costs, strict=True))
        time_s = (self._options.time_limit_s or TIME_LIMIT_S) / 4
        found = evaluate(graph, near_smallest(msgspec.structs.replace(graph, ops=ops), time_s, enough_bytes).plan)
        whole = keep_everything(graph)
        # Fences take bytes too: recomputations that save hardly any are left out.
        fixed = fixed_bytes(graph)
        fewer = found.peak_bytes - fixed < 0.97 * (whole.peak_bytes - fixed)
        return found if fewer else whole

    def _with_loops(self, target_bytes: int) -> tuple[list[Result], int]:
        """The plan that computes nothing again but in loops, if there is one, and about the bytes that these can save."""
        left, most = self.plain.loops.stacked_bytes, target_bytes - keep_everything(self.plain.capture.graph).peak_bytes
        best: list[Result] = []
        low, high, change = 0, left, min(0, most)
        for _ in range(4):
            left = min(high, max(low, left + change))
            result = keep_everything(self._add(self.plain.saving(left)).graph)
            change = target_bytes - result.peak_bytes
            if change >= 0:
                best, low = [min([*best, result], key=lambda result: result.cost)], left
            else:
                high, change = left - 1, min(change, -left // 20)  # one value fewer may be many bytes
            if 0 <= change <= 0.01 * target_bytes or low >= high:
                break
        return best, low

    def _add(self, compilation: Compilation) -> Replanner:
        graph = compilation.capture.graph
        return self.by_graph.setdefault(graph.digest, (compilation, Replanner(graph, self._options)))[1]


def _calibrated(compilation: Compilation, options: PlanningOptions, wanted: Budget) -> tuple[Compilation, Result, int]:
    """The cheapest plan found whose compiled bytes keep a budget, or a share of plain's, with its program and the budget."""
    graph, resident = compilation.capture.graph, fixed_bytes(compilation.capture.graph)
    whole = keep_everything(graph)
    most = resident + (compilation.temp_bytes(whole) if compilation.fusions is None else compilation.fusions.temp_bytes)
    budget = wanted.within(fixed_bytes=resident, keep_all_bytes=most)
    programs = _Programs(compilation, options)
    # A compilation takes seconds; saving 0.2 % of the cost repays it within a few thousand steps.
    policy = Proportional(resident_bytes=resident, least_cost=graph.cost, least_saving=0.002)
    trials: Calibration[Result | None] = Calibration(budget, policy)
    trials.record(Trial.of(budget, whole, most, whole))
    smallest: Result | None = None
    failure: InfeasibleBudgetError | PlanNotFoundError | None = None
    bounds: list[float] = []  # of plans within each target: the largest target has the lowest

    def replan(target_bytes: int) -> Result:
        nonlocal smallest, failure
        try:
            found = programs.cheapest(target_bytes)
            bounds.append(found.bound)
            return found
        except (InfeasibleBudgetError, PlanNotFoundError) as error:
            if smallest is not None or trials.best() is not None:
                raise
            failure, smallest = error, programs.smallest(target_bytes)  # XLA may need fewer bytes than planned
            over = min((trial.planned_bytes or 0 for trial in trials.trials[1:]), default=0)
            # The smallest plan is far more expensive than one in the middle between it and the plans that take too much.
            return smallest if over <= smallest.peak_bytes else programs.cheapest((smallest.peak_bytes + over) // 2)

    def compiled(target_bytes: int, result: Result) -> Trial[Result | None] | None:
        if result.cost > policy.worthwhile_cost(trials.trials, budget):
            return None
        needed = resident + programs.of(result).temp_bytes(result)
        amounts = (result.peak_bytes - resident, needed - resident, budget - resident)
        _log.info("planned %s, compiled %s of %s, overhead %.4f", *map(format_bytes, amounts), graph.overhead(result.cost))
        return Trial.of(target_bytes, result, needed, result)

    calibration.calibrate(trials, replan, compiled)
    for alike in (False, True):
        if trials.best() is None and len(trials.trials) <= policy.most_trials:
            least = programs.smallest(0, alike=alike)
            trials.record(Trial.of(budget, least, resident + programs.of(least).temp_bytes(least), least))
    if trials.best() is None:
        # Fall back on plans compiled before, like one that an earlier refusal named; they have no bound.
        for known, _ in programs.by_graph.values():
            for order, needed in known.known.items():
                result = evaluate(known.capture.graph, Plan.from_order(known.capture.graph, order))
                trials.record(Trial.of(budget, result, resident + needed, result))
    best = trials.best()
    if best is None or best.outcome is None:
        raise trials.refusal(failure)
    return programs.of(best.outcome), _proven(best.outcome, min([best.outcome.bound, *bounds])), budget


def _proven(result: Result, bound: float) -> Result:
    """A result with a lower bound on the cost, which then holds for plans of more live bytes too."""
    if bound == result.bound:
        return result
    gap, reason = (result.cost - bound) / max(1, result.cost), Reason.OPTIMAL if result.cost == bound else Reason.FEASIBLE
    return msgspec.structs.replace(
        result, bound=bound, gap=gap, termination=msgspec.structs.replace(result.termination, reason=reason)
    )


def temp_bytes(
    function: Callable[..., Any], arguments: Sequence[Any], donated: Sequence[int] = (), options: Mapping[str, str] | None = None
) -> int:
    """Bytes of temporary values that XLA allocates for a function of flat arrays, above its arguments and results.

    The function is compiled but not run. Results may reuse the buffers of donated arguments.
    """
    compiled: Any = lowered(function, arguments, donated).compile(compiler_options=quickly() | dict(options or {}))
    return int(compiled.memory_analysis().temp_size_in_bytes)
