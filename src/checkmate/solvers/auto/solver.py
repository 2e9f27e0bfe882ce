"""The default solver: local search and event cuts take turns until the gap is met.

Neither is enough alone. Search finds no proof, and its plans can be far off: ResNet-50 at half of its memory stayed at an
overhead of 1.249 until the solution of an integer program with a few event cuts gave a start at 1.131. The cuts find no
plan where memory binds between events. Each round (`rounds.refine`) gives one what the other found; ``docs/decisions/0004``
has the measurements behind the order of the phases.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from checkmate.core.problem import Problem
from checkmate.core.result import Reason, Termination
from checkmate.solvers.auto import phases
from checkmate.solvers.auto.phases import Phase
from checkmate.solvers.session import Session

if TYPE_CHECKING:
    from checkmate.solvers.auto.run import Run
    from checkmate.solvers.states.exploration import Exploration


@dataclass(frozen=True, slots=True)
class Auto:
    """Local search for plans and event cuts for the proof, each started from what the other found.

    `PHASES` has the phases and their times; the logger ``checkmate.solvers.auto`` shows them at level DEBUG.

    Attributes:
        rounds: Most rounds of refinement; each costs some seconds on a thousand ops.
    """

    rounds: int = 6

    copies: ClassVar[bool] = True
    """Whether it plans copies to a host."""

    def run(self, problem: Problem, session: Session) -> Termination:
        """Search and prove until a limit of the session is met."""
        if problem.host is not None:
            session.prepare(_load_engines)
            from checkmate.solvers.offload.joint import run_with_host

            return run_with_host(problem, session, self)
        session.offer(range(len(problem.graph.ops)))
        if session.done:
            return Termination(Reason.FEASIBLE)
        session.prepare(_load_phases)
        from checkmate.solvers.auto.run import Run

        _solve(Run(problem, session), self.rounds)
        if session.plan is None:
            return Termination(
                Reason.NOT_FOUND, limit="time" if session.left_s() <= 0 else "", detail="search and cuts found none"
            )
        return Termination(Reason.FEASIBLE)


def _load_phases() -> None:
    """Import numba and scipy, which takes a second, and the compiled kernels."""
    importlib.import_module("checkmate.solvers.auto.rounds")


def _load_engines() -> None:
    """Import the engine and numba, which takes a second, and the compiled kernels."""
    for module in ("backends.highs", "offload.joint"):
        importlib.import_module(f"checkmate.solvers.{module}")


def _solve(run: Run, rounds: int) -> None:
    """All phases, one after another, until the session is done."""
    from checkmate.solvers.auto.first_plans import first_plans
    from checkmate.solvers.auto.rounds import best_chain, best_single, final_search, refine, search_orders
    from checkmate.solvers.bounds.events.chains import Chain
    from checkmate.solvers.bounds.row import row_bound

    session = run.session
    searches = first_plans(run)
    if session.done:
        return
    session.prove(run.fold.original.cost + row_bound(run.folded))
    if session.done:
        return
    event = best_single(run, run.any_order, searches)
    if session.done or event is None:
        return
    exploration = _explore(run)
    if session.done:
        return
    if len(run.graph.ops) <= phases.PARAMETERS.many_ops:
        chain = best_chain(run, searches, event) if run.folded.reorder else Chain([event])
        if session.done:
            return
        searches[0] = search_orders(run, searches[0], run.until(Phase.SEQUENCES))
        if session.done:
            return
        # A* may still close the gap; one round gives it a better plan, and so a lower limit.
        under_way = exploration is not None and exploration.ended is None
        refine(run, searches, chain, 1 if under_way else rounds)
    if exploration is not None and not session.done:
        exploration.run(run.begin(Phase.STATES))
    final_search(run, searches)
    best = min(searches, key=lambda search: search.best_cost)
    if best.order_bound > 0 and run.folded.reorder:
        least = 1 + best.order_bound
        session.remark(
            f"given-order bound: no plan with its first computations, each of them read, has an overhead below {least:.5f}"
        )


def _explore(run: Run) -> Exploration | None:
    """Search the states of a small graph for a moment; None for graphs that it does not take."""
    from checkmate.solvers.states.exploration import Exploration
    from checkmate.solvers.states.packed_problem import pack

    packed = pack(run.folded)
    if isinstance(packed, str):
        return None
    exploration = Exploration(run.fold, packed, run.session, phases.PARAMETERS.max_states)
    exploration.run(run.begin(Phase.FIRST_STATES))
    return exploration
