"""Two-phase rounding of the stage program's relaxation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from checkmate.core.errors import OptionError
from checkmate.core.problem import Problem
from checkmate.core.result import Reason, Termination
from checkmate.solvers.milp import StageProgram
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.session import Session, searched

if TYPE_CHECKING:
    from checkmate.solvers.backends.program import Floats

_SWEEP: Final = (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8, 0.1, 0.9)
"""Thresholds, the paper's first; lower ones hold more, recompute less, and are more likely to break the budget."""


@dataclass(frozen=True, slots=True)
class LpRounding:
    """Solve the relaxation of `Milp`'s program, round which values are held, and compute the missing values.

    Jain et al. (2020), section 5.1 and algorithm 2: S is rounded, at a threshold or at random with S as the
    probability, and R has the fewest computations for that S. A rounded plan may break the budget, so the relaxation is
    solved at a share of the budget; the shares swept here, from the whole budget down, include the paper's 0.9.

    Attributes:
        threshold: Least S at which a value is held; None sweeps 0.1, 0.2, ... 0.9.
        samples: Random roundings for each share, from the seed of the limits.
        shares: Shares of the budget at which the relaxation is solved.
        max_ops: Larger graphs (views not counted) are refused: the program grows with the square of the ops.
    """

    threshold: float | None = None
    samples: int = 20
    shares: tuple[float, ...] = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6)
    max_ops: int = 200

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 < self.threshold < 1:
            raise OptionError(f"threshold={self.threshold!r} must be between 0 and 1, or None")
        if self.samples < 0:
            raise OptionError(f"samples={self.samples!r} must be zero or more")
        if not self.shares or not all(0 < share <= 1 for share in self.shares):
            raise OptionError(f"shares={self.shares!r} must be shares of the budget, each more than 0 and at most 1")

    def run(self, problem: Problem, session: Session) -> Termination:
        """Solve and round for one share after the other."""
        from checkmate.solvers.backends.highs import solve_linear

        fold = FoldViews.of(problem.graph)
        folded = fold.apply(problem)
        graph = folded.graph
        if len(graph.ops) > self.max_ops:
            return Termination(Reason.NOT_FOUND, detail=f"{len(graph.ops)} ops, and rounding stops at {self.max_ops}")
        random = np.random.default_rng(session.limits.seed)
        for share in self.shares:
            if session.left_s() <= 0 or session.gap <= 0:
                break
            budget = graph.resident_bytes + int(share * (folded.budget_bytes - graph.resident_bytes))
            stages = StageProgram(folded.replace_budget(budget))
            solved = solve_linear(stages.build(), time_s=session.left_s())
            if solved.solution is None:
                break
            if share == 1.0 and all(value.base is None for value in graph.values):
                bound = solved.bound * max(1, graph.cost) + fold.cost_offset
                session.remark(f"given-order bound, relaxation of stages of the graph's own order: {bound:.0f}")
            for held in self._roundings(stages.held(solved.solution), random):
                session.offer(fold.invert(stages.rounded(held)))
        return searched(session, "no rounding keeps the budget")

    def _roundings(self, share_held: Floats, random: np.random.Generator) -> Iterator[npt.NDArray[np.bool_]]:
        """Whether each value is held at each stage, for each threshold and each sample. Shapes ``[stage + 1, value]``."""
        for threshold in _SWEEP if self.threshold is None else (self.threshold,):
            yield share_held >= threshold
        for _ in range(self.samples):
            yield random.random(share_held.shape) < share_held
