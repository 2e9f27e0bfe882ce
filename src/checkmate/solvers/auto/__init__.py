"""The default solver: local search and event cuts take turns until the gap is met.

Neither is enough alone. Search finds no proof, and its plans can be far from optimal: ResNet-50 at half of its memory stayed at
an overhead of 1.249 until the solution of an integer program with a few event cuts gave a start at 1.131. The cuts find no
plan if memory binds between events. Search and cuts pass their results to each other; ``docs/decisions/0004`` has the
measurements behind the order of the phases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from checkmate.core.problem import Problem
from checkmate.core.result import Reason, Termination
from checkmate.solvers.brute_force import BruteForce
from checkmate.solvers.clocks import preparing
from checkmate.solvers.session import Session, searched


@dataclass(frozen=True, slots=True)
class Auto:
    """Local search for plans and event cuts for the proof, each started from what the other found.

    The logger ``checkmate.solvers.auto`` shows the phases and their times at level DEBUG.

    Attributes:
        rounds: Most rounds of refinement; each costs some seconds on a thousand ops.
    """

    rounds: int = 6

    copies: ClassVar[bool] = True
    """Whether it plans copies to a host."""

    def run(self, problem: Problem, session: Session) -> Termination:
        """Search and prove until a limit of the session is met."""
        if problem.host is not None:
            with preparing():
                from checkmate.solvers.offload import run_with_host

            return run_with_host(problem, session, self)
        session.offer(range(len(problem.graph.ops)))
        if session.done:
            return Termination(Reason.FEASIBLE)
        # A tiny graph is solved in less time than loading or compiling kernels takes.
        if len(problem.graph.ops) <= 7 and len(problem.graph.values) <= 10:
            return BruteForce().run(problem, session)
        with preparing():  # numba and scipy: takes a second
            from checkmate.solvers.auto.phases import solve_in_phases

        solve_in_phases(problem, session, self.rounds)
        return searched(session, "search and cuts found none")
