"""A problem prepared for event cuts: the ops that the DAG puts before and after an event.

`event_cuts` builds programs from it, and `min_cut` builds minimum cuts. Terms and proofs: ``docs/explanation/event_cuts.md``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from checkmate.core.problem import Problem
from checkmate.solvers.bounds.floor import parents_of
from checkmate.solvers.reductions.fold_views import may_run_again
from checkmate.solvers.walks import reached

Mask = npt.NDArray[np.bool_]


class CutModel:
    """A problem prepared for event cuts; the programs of all its events share it.

    Views must be folded (`FoldViews`); a remaining view has no bytes and no cost here, which relaxes the bound.

    Without targets the bound holds for any order. Otherwise it holds only for plans in which first computations of the targets
    follow their order. END, the op with index `end`, comes after all others, reads every kept value and costs nothing. If the
    problem has a host, END does not read values that are on it before the step: a plan need not have them at the end.
    """

    def __init__(self, problem: Problem, targets: tuple[int, ...] | None = None) -> None:
        self.problem = problem
        self.targets = targets
        self._sides: dict[int, tuple[Mask, Mask]] = {}
        graph = self.problem.graph
        self.end = len(graph.ops)
        ends = [v for v, x in enumerate(graph.values) if x.kept and not (x.on_host and problem.host is not None)]
        self.inputs = inputs = [*(list(dict.fromkeys(op.inputs)) for op in graph.ops), ends]
        self.outputs = [*(list(op.outputs) for op in graph.ops), []]
        self.producer = np.array(graph.producer, dtype=np.int64)
        self.size = np.array([v.size_bytes for v in graph.values], dtype=np.int64)
        self.cost = np.array([*(op.cost for op in graph.ops), 0], dtype=np.float64)
        self.total = max(1.0, float(self.cost.sum()))  # cost of computing every op once; bounds are shares of it
        self.workspace = [*(op.workspace_bytes for op in graph.ops), 0]
        self.replay = np.array([*(op.replay_bytes for op in graph.ops), 0], dtype=np.int64)
        self.again = np.array([*(may_run_again(problem, o) for o in range(self.end)), False], dtype=np.bool_)
        self.clobbers = [*(op.clobbered_by for op in graph.ops), ()]
        self.edge_value = np.array([v for part in inputs for v in part], dtype=np.int64)
        self.edge_op = np.array([o for o, part in enumerate(inputs) for _ in part], dtype=np.int64)
        # For each op, the ops whose first computation comes before its own, and the converse.
        self.parents: list[list[int]] = [*(sorted(p) for p in parents_of(graph)), list(range(self.end))]
        self.children: list[list[int]] = [[] for _ in self.parents]
        for o, above in enumerate(self.parents):
            for p in above:
                self.children[p].append(o)
        pairs = [(p, o) for o, above in enumerate(self.parents) for p in above]
        self.parent_edges = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        self.clobbered = [o for o, clobbers in enumerate(self.clobbers) if clobbers]
        self.position = {} if self.targets is None else {o: t for t, o in enumerate(self.targets)}

    def sides(self, op: int) -> tuple[Mask, Mask]:
        """Ops surely computed before an op's event, and ops surely not (A and D of the proof), without the op itself."""
        if op not in self._sides:
            if self.targets is None or op not in self.position:
                self._sides[op] = self._reach([op], self.parents), self._reach([op], self.children)
            else:
                # In a given order every earlier target and its ancestors are surely computed: a superset of the
                # sides by the DAG alone, hence a sharper bound for a narrower class.
                t = self.position[op]
                earlier, later = list(self.targets[:t]), [*self.targets[t + 1 :], self.end]
                above, below = self._reach([*earlier, op], self.parents), self._reach(later, self.children)
                above[earlier] = True
                above[op] = False
                below[later] = True
                self._sides[op] = above, below
        return self._sides[op]

    def again_after(self, reached: Mask) -> Mask:
        """Ops that may be computed again after some have surely run: their inputs are not overwritten by these."""
        again = self.again.copy()
        for o in self.clobbered:
            again[o] &= not reached[list(self.clobbers[o])].any()
        return again

    def descendants(self, op: int) -> Mask:
        """Ops that come after an op by the DAG alone. In a given order `sides` may have fewer among ops that are not targets."""
        return self.sides(op)[1] if self.targets is None else self._reach([op], self.children)

    def comparable(self, a: int, b: int) -> bool:
        """Whether one of two ops surely comes before the other: then both can be events of one chain."""
        above, below = self.sides(a)
        return a == b or bool(above[b] or below[b])

    def any_order(self, cuts: Sequence[int]) -> bool:
        """Whether the bound of these events holds for any order although the model was built for a given one.

        It does if the DAG alone puts every op before or after each event: then the sides are the same in every order, and the
        program equals the program of a model without targets.
        """
        known = (self._reach([cut], self.parents) | self._reach([cut], self.children) for cut in cuts)
        return self.targets is None or all(np.delete(mask, cut).all() for cut, mask in zip(cuts, known, strict=True))

    def _reach(self, roots: list[int], adjacent: list[list[int]]) -> Mask:
        """Ops reached from the roots; a root counts only if another reaches it. Shape ``[op + 1]``."""
        mask = np.zeros(self.end + 1, dtype=np.bool_)
        mask[list(reached((o for root in roots for o in adjacent[root]), adjacent.__getitem__))] = True
        return mask
