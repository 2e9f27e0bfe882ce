"""Plans with copies to and from the host, found jointly with recomputations."""

from __future__ import annotations

import math
from dataclasses import replace

from checkmate.core.problem import Problem
from checkmate.core.result import Reason, Termination
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.offload.joint import Joint
from checkmate.solvers.session import Session, Solver, searched


def run_with_host(problem: Problem, session: Session, alone: Solver) -> Termination:
    """Find the plan whose step ends first; never later than without copies, since `alone` first offers plans without."""
    alone_ns = _solve_alone(problem, session, alone)
    if session.cost == problem.graph.cost:
        session.remark("offload does not pay: the budget holds every value, so nothing is computed again or copied")
        return Termination(Reason.FEASIBLE)
    Joint(problem, session).run()
    if session.plan is not None and session.plan.host is None:
        session.remark("offload does not pay here: no plan with copies was found that ends earlier")
    elif session.plan is not None and alone_ns is not None:
        gain = (alone_ns - (session.cost or 0)) / alone_ns
        session.remark(f"copies to the host end the step {gain:.1%} earlier than the best plan without them")
    return searched(session, "no copies were found that fit")


def _solve_alone(problem: Problem, session: Session, solver: Solver) -> int | None:
    """The cost of the best plan without copies, in three tenths of the time."""
    left = session.left_s()
    if session.plan is not None and session.plan.host is None:  # the caller gave an initial plan
        return session.cost
    without = problem.without_host()
    if left <= 0 or floor(without.graph).peak_bytes > without.budget_bytes:
        return None
    inner = Session(without, replace(session.limits, time_s=left * 0.3 if math.isfinite(left) else None))
    try:
        solver.run(without, inner)
    finally:  # also if the user interrupts
        inner.close()
        if inner.plan is not None:
            session.offer_plan(inner.plan)
    return inner.cost
