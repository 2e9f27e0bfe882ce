"""Find a plan, check it, and compute every number of the result."""

from __future__ import annotations

import math
from typing import Literal, NoReturn, overload

from checkmate.core.budget import Budget
from checkmate.core.errors import InfeasibleBudgetError, OptionError, PlanError, PlanNotFoundError, SolverError
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, MinBudget, NoPlan, Reason, Result, Termination
from checkmate.core.simulate import simulate
from checkmate.core.units import format_bytes
from checkmate.core.validate import validate
from checkmate.solvers.auto import Auto
from checkmate.solvers.bounds.floor import Floor, floor
from checkmate.solvers.evict.smallest import quick_peak, smallest_peak
from checkmate.solvers.session import OnProgress, Session, Solver


@overload
def solve(
    problem: Problem,
    solver: Solver | None = None,
    *,
    limits: Limits | None = None,
    initial: Plan | None = None,
    on_progress: OnProgress | None = None,
    raise_on_failure: Literal[True] = True,
) -> Result: ...
@overload
def solve(
    problem: Problem,
    solver: Solver | None = None,
    *,
    limits: Limits | None = None,
    initial: Plan | None = None,
    on_progress: OnProgress | None = None,
    raise_on_failure: bool,
) -> Result | NoPlan: ...
def solve(
    problem: Problem,
    solver: Solver | None = None,
    *,
    limits: Limits | None = None,
    initial: Plan | None = None,
    on_progress: OnProgress | None = None,
    raise_on_failure: bool = True,
) -> Result | NoPlan:
    """The cheapest plan that a solver finds within the budget, with a proven bound on the cost of all others.

    A solver's answer is a claim: its plan is validated and simulated here, and the simulation gives every
    number of the result. Ctrl-C returns the best plan so far.

    Args:
        problem: Graph and budget.
        solver: The solver and its options; `Auto` by default.
        limits: Time, gap, threads and seed.
        initial: A plan to start from, like one for a smaller budget; it counts as found if it keeps the budget.
        on_progress: Called with every improvement of the cost or the bound.
        raise_on_failure: Whether to raise an exception if there is no plan; otherwise a `NoPlan` is returned.

    Returns:
        The result.

    Raises:
        InfeasibleBudgetError: Proven: no plan keeps the budget.
        PlanNotFoundError: No plan was found within the limits.
        PlanError: The initial plan was made for another graph or breaks a rule of the problem.
        SolverError: The solver offered an invalid plan or bound; a bug of the solver.
        OptionError: The problem has a host, and the solver does not plan copies; or ``problem`` is no `Problem`.

    Examples:
        >>> import checkmate
        >>> chain = checkmate.Graph.from_dag(cost=[1, 1, 1], size_bytes=[4, 4, 4], edges=[(0, 1), (0, 2), (1, 2)])
        >>> checkmate.solve(checkmate.Problem(chain, 12)).overhead
        1.0
    """
    if not isinstance(problem, Problem):  # pyright: ignore[reportUnnecessaryIsInstance] - users give a graph
        hint = 'write checkmate.solve(checkmate.Problem(graph, "8GiB"))'
        raise OptionError(f"a problem is solved, a graph with its budget, and not {type(problem).__name__}", hint=hint)
    solver = Auto() if solver is None else solver
    if problem.host is not None and not getattr(solver, "copies", False):
        raise OptionError(f"{solver!r} plans no copies to a host", hint="use Auto(), or leave out the host")
    session = Session(problem, Limits() if limits is None else limits, on_progress)
    if initial is not None:
        _offer(initial, session)
    # Below the floor most solvers would search for their whole time limit. The floor takes hundredths of a second; on 100,000 ops
    # it takes as long as making a plan does, and that time is reserved for a refusal.
    with session.checking():
        lowest = floor(problem.graph, copies=problem.host is not None)
    try:
        termination = _below_floor(lowest, session) or solver.run(problem, session)
    except KeyboardInterrupt:
        if session.plan is None:
            raise
        termination = Termination(Reason.FEASIBLE, limit="interrupt", detail="interrupted; the best plan so far")
    except SystemExit as error:  # a plug-in is no program
        raise SolverError(
            f"{solver!r} ended the program: {error!r}", hint="update or uninstall the package that provides the solver"
        ) from error
    finally:
        session.close()
    if session.plan is not None:
        return _checked(problem, solver, session, session.plan, termination)
    failure = _failed(problem, solver, session, termination)
    if not raise_on_failure:
        return failure
    smallest = _smallest(problem, session, lowest)
    if isinstance(solver, Auto) and smallest.peak_bytes <= problem.budget_bytes and session.offer_plan(smallest.plan) is not None:
        return _checked(problem, solver, session, smallest.plan, Termination(Reason.FEASIBLE, limit="time"))
    _refuse(problem, failure, smallest)


def _below_floor(lowest: Floor, session: Session) -> Termination | None:
    """The proof that no plan keeps a budget below the floor, or None."""
    if lowest.peak_bytes <= session.problem.budget_bytes:
        return None
    session.prove(math.inf)
    return Termination(Reason.INFEASIBLE, detail=lowest.why)


def _offer(initial: Plan, session: Session) -> None:
    problem = session.problem
    broken = validate(problem.graph, initial, recompute=problem.recompute, reorder=problem.reorder, host=problem.host)
    if initial.host is not None and problem.host is None:
        raise PlanError(
            "the initial plan has copies to a host, and the problem has none", hint="give the problem host=HostMemory(...)"
        )
    if broken:
        raise PlanError(f"the initial plan does not hold: {broken[0].message}", hint="start from a plan of the same problem")
    if initial.host is None:
        session.offer(initial.order)
    else:
        session.offer_plan(initial)


def _checked(problem: Problem, solver: Solver, session: Session, plan: Plan, termination: Termination) -> Result:
    graph = problem.graph
    timeline = simulate(graph, plan, problem.host)
    cost = timeline.cost
    broken = validate(
        graph, plan, problem.budget_bytes, recompute=problem.recompute, reorder=problem.reorder, host=problem.host, cost=cost
    )
    if broken:
        error = SolverError(f"{solver!r} returned a plan that does not hold: {broken[0].message}")
        error.add_note(f"graph {graph.digest}, budget {problem.budget_bytes}; {len(broken)} violations")
        raise error
    # A bound above a valid plan's cost is wrong, and an error is better than a false proof of optimality.
    if session.bound > cost:
        raise SolverError(f"{solver!r} claims a bound of {session.bound}, above the cost {cost} of the plan that it found")
    # Bounds of integer programs are lowered by a millionth (`Session.prove`), and their budgets widened by two: a smaller gap
    # counts as none.
    proven = cost - session.bound < 1 or session.gap <= 2e-6
    reason = Reason.OPTIMAL if proven else Reason.FEASIBLE
    limit = "" if reason is Reason.OPTIMAL else termination.limit or _limit_met(session)
    return Result(
        plan=plan,
        cost=cost,
        overhead=graph.overhead(cost),
        peak_bytes=timeline.peak_bytes,
        budget_bytes=problem.budget_bytes,
        bound=session.bound,
        gap=session.gap,
        termination=Termination(reason, limit, termination.detail),
        solver=repr(solver),
        elapsed_s=session.elapsed_s(),
        history=tuple(session.history),
        remarks=tuple(session.remarks),
    )


def _failed(problem: Problem, solver: Solver, session: Session, termination: Termination) -> NoPlan:
    infeasible = math.isinf(session.bound)
    return NoPlan(
        budget_bytes=problem.budget_bytes,
        bound=session.bound,
        termination=Termination(
            Reason.INFEASIBLE if infeasible else Reason.NOT_FOUND, "" if infeasible else termination.limit, termination.detail
        ),
        solver=repr(solver),
        elapsed_s=session.elapsed_s(),
        history=tuple(session.history),
        remarks=tuple(session.remarks),
    )


def _limit_met(session: Session) -> str:
    if session.gap <= session.limits.gap:
        return "gap"
    if session.decided:
        return "target"
    return "time" if session.left_s() <= 0 else ""


def _refuse(problem: Problem, failure: NoPlan, smallest: MinBudget) -> NoReturn:
    budget = problem.describe_budget() + "," * problem.budget.is_share
    least = format_bytes(smallest.floor_bytes)
    found = f"the smallest budget a plan was found for is {format_bytes(smallest.peak_bytes)}"
    floor = f"no plan of any order takes less than {least}: {smallest.why}"
    at_least = problem.budget.at_least(smallest.peak_bytes, problem.graph)
    hint = f"{unit_question(problem.budget, problem.budget_bytes, smallest.peak_bytes)}raise the budget to at least {at_least}"
    hint += "" if problem.host is None else f" or the host's bytes, {format_bytes(problem.host.bytes)} now"
    hint += (
        ", lower the batch size, or give the search more time"
        if failure.termination.limit == "time"
        else ", or lower the batch size"
    )
    if failure.termination.reason is Reason.INFEASIBLE:
        below = "below the smallest possible peak" if problem.budget_bytes < smallest.floor_bytes else "proven too small"
        raise InfeasibleBudgetError(
            f"budget {budget} is {below}; {found}; {floor}",
            hint=hint,
            budget_bytes=problem.budget_bytes,
            floor_bytes=smallest.floor_bytes,
            smallest_bytes=smallest.peak_bytes,
            binding_op=smallest.binding_op,
        )
    detail = f" ({failure.termination.detail})" if failure.termination.detail else ""
    raise PlanNotFoundError(
        f"no plan was found within {budget} by {failure.solver}{detail}; {found}; {floor}",
        hint=hint,
        budget_bytes=problem.budget_bytes,
        smallest_bytes=smallest.peak_bytes,
    )


def _smallest(problem: Problem, session: Session, lowest: Floor) -> MinBudget:
    """The smallest peak found in the session's time; a quick search if the budget is below the floor, or no time is left.

    The search does not depend on the budget: a solve within the peak named by a refusal searches the same way, and finds it.
    """
    graph, left = problem.graph, min(session.left_s(), 20.0)
    near = 0
    if problem.budget_bytes < lowest.peak_bytes:
        # A user who asked for too little wants to know soon, and a peak 10 % above the floor is near enough. On over 30,000 ops
        # the search has more seconds, in proportion: on 100,000 it takes four to begin.
        near = graph.resident_bytes + int(1.1 * (lowest.peak_bytes - graph.resident_bytes))
        left = min(0.5 * left, 3.0 * max(1.0, len(graph.ops) / 30_000))
    seed, before = session.limits.seed, session.smallest
    if problem.host is not None:
        from checkmate.solvers.offload.streams import smallest_with_fetches

        return smallest_with_fetches(problem, Limits(time_s=max(left, 1.0), seed=seed), near=near)
    if left > 1.0:
        found = smallest_peak(problem, Limits(time_s=left, seed=seed), near=near)
    else:
        found = before or quick_peak(problem, Limits(time_s=1.0, seed=seed))
    return before if before is not None and before.peak_bytes < found.peak_bytes else found


def unit_question(budget: Budget, budget_bytes: int, needed_bytes: int = 0) -> str:
    """A question to the user: whether a budget that is too small for any step lacks its unit.

    Args:
        budget: The budget as it was written.
        budget_bytes: The budget in bytes.
        needed_bytes: A budget that a plan keeps; with the unit in the question the number is at least this budget.
    """
    if budget_bytes >= 1024 or not budget.has_no_unit:
        return ""
    written = budget_bytes or 50
    unit = "MiB" if written * 2**20 >= needed_bytes else "GiB"
    meant = f"'{written}%' or '{written}{unit}'" if written <= 100 else f"'{written}{unit}'"
    return f"{budget_bytes} is {budget_bytes} bytes; did you mean {meant}? Otherwise "
