"""Event cuts where values may be copied to the host and back: a lower bound on the time at which any such step ends.

One event, the first computation of op t, as in `event_cuts`. Write T for the end of the step and split it at the moment at
which t begins: T = b + a. A value that a plan needs after the event and that is neither live at it nor computed again is fetched
after it: z[i] = 1. Its storage was released before the event, and a release waits for the copies of the storage, so that the
copy out was done by then. Hence every plan satisfies, beside the rows of `event_cuts` with z added to each supply row,

    a >= time of the copies back of all i with z[i] = 1,        b >= time of their copies out,
    a >= cost of t, of its descendants and of y,                b >= cost of the ancestors of t,
    b + a >= cost of every op once and of y,                    bytes of all i with z[i] = 1 <= those of the host,

and more sharply, for a descendant k and an ancestor j of t:

    a >= copies back of the i that ops up to k read first + cost of k and its descendants: they are read by then,
    b >= cost of j and its ancestors + copies out of the i that j or its descendants compute: they begin after that.

An i that z stands for has S[i] = y[i] = 0, so that a first computation which reads it has to wait for the copy. The least
b + a is a bound on the time of every plan, in any order, with any number of recomputations and copies. What is left out
(which copies run when, the bytes between events) only loosens it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from checkmate.core.plan import HostMemory
from checkmate.solvers.backends.program import Floats
from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.events.event_cuts import CutBuilder, CutProgram

LONGEST: Final = 8.0
"""Highest value of b and a, as a share of the cost of every op once. A bound from the program may be no higher (`proven_ns`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCutParameters:
    """Parameters of the programs.

    Attributes:
        ops: Ops on each side of the event whose place in time gives a row. Chosen by hand.
        slack: Share of the cost by which bounds of integer programs are lowered: four times the feasibility tolerance of the
            engine, since two rows of times add up, each within it.
    """

    ops: int = 24
    slack: float = 4e-6


PARAMETERS = CopyCutParameters()


def build_with_host(model: CutModel, event: int, host: HostMemory, least_ns: int) -> CutProgram:
    """The program of an event with copies. It minimises T less ``least_ns``, the cost of every op once, as a share of the cost.

    The model is for any order, and costs of views are not priced into those of ops (`FoldViews.of`): times are absolute here.
    """
    return CutBuilder(model, (event,), True, copies=True).build(lambda cut: _Times(cut, event, host, least_ns).add())


def proven_ns(bound: float, model: CutModel, least_ns: int) -> float:
    """The bound on the end of every step that a bound on the program proves."""
    total = max(1.0, float(model.cost.sum()))
    # A plan with a larger b or a than the columns allow takes longer than LONGEST as a whole.
    return min(least_ns + total * max(0.0, bound), max(least_ns, LONGEST * total))


class _Times:
    def __init__(self, cut: CutBuilder, event: int, host: HostMemory, least_ns: int) -> None:
        self.cut, self.event, self.host = cut, event, host
        self.model = cut.model
        self.total = max(1.0, float(self.model.cost.sum()))
        self.least = least_ns / self.total

    def add(self) -> None:
        cut, m, t = self.cut, self.model, self.event
        builder = cut.builder
        values = np.flatnonzero(cut.live[0] >= 0)
        cut.fetched[values] = builder.add_columns(np.zeros(len(values)))
        before, after = builder.add_columns(np.zeros(2), high=LONGEST, integral=False)
        (wait,) = builder.add_columns(np.ones(1), high=2 * LONGEST, integral=False)
        redo = cut.recomputed[0, 1]
        again = np.flatnonzero(redo >= 0)
        columns, costs = redo[again], m.cost[again] / self.total
        # b + a is at most the cost of all computations and the waits, which the objective sums.
        self._row([wait, before, after], [1.0, -1.0, -1.0], columns, costs, -self.least)
        above, below = m.sides(t)
        self._row([after], [1.0], columns, -costs, (m.cost[t] + m.cost[below].sum()) / self.total)
        self._row([before], [1.0], columns[:0], costs[:0], m.cost[above].sum() / self.total)
        size = m.size[values].astype(np.float64)
        room = self.host.bytes * (1 + 2e-6) / max(1, self.host.bytes)
        builder.add_row(cut.fetched[values], size / max(1, self.host.bytes), high=room)
        copy_in = np.array([self.host.in_ns(int(s)) for s in size]) / self.total
        copy_out = np.array([self.host.out_ns(int(s)) for s in size]) / self.total
        for k in self._some(np.flatnonzero(below)[:-1]):
            upto, behind = m.sides(k)
            readers = upto & below
            readers[k] = True
            needed = np.isin(values, m.edge_value[readers[m.edge_op]])
            self._row(
                [after], [1.0], cut.fetched[values[needed]], -copy_in[needed], (m.cost[k] + m.cost[behind].sum()) / self.total
            )
        self._row([after], [1.0], cut.fetched[values], -copy_in, 0.0)
        for j in self._some(np.flatnonzero(above)):
            ahead, following = m.sides(j)
            made = following[m.producer[values]] | (m.producer[values] == j)
            self._row([before], [1.0], cut.fetched[values[made]], -copy_out[made], (m.cost[j] + m.cost[ahead].sum()) / self.total)
        self._row([before], [1.0], cut.fetched[values], -copy_out, 0.0)

    def _some(self, ops: np.ndarray) -> list[int]:
        """Ops spread evenly over a side of the event."""
        if len(ops) <= PARAMETERS.ops:
            return ops.tolist()
        return ops[np.linspace(0, len(ops) - 1, PARAMETERS.ops).astype(int)].tolist()

    def _row(self, times: list[int], factors: list[float], columns: np.ndarray, entries: Floats, low: float) -> None:
        """One row: the times and the columns, each with its factor, sum to ``low`` or more."""
        self.cut.builder.add_row(
            np.concatenate([np.array(times, dtype=np.int64), columns]), np.concatenate([np.array(factors), entries]), low=low
        )
