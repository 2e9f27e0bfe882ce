"""The bound of a single event as a parametric minimum cut, for graphs on which the event's linear program takes too long.

For one event t the program of `event_cuts` has a Lagrangian that is a minimum cut. Let r[o] = 1 if op o runs after the event
begins, for the first time or again, and late[o] = 1 if it first runs then. In every plan, with `y` as in `event_cuts`, but 0
for ops first computed after the event,

    r[o] = 1 for t and ops surely after it;   late[o] = r[o] = 0 or 1 for an op that may run only once,
    late[o] <= r[o],    late[p] <= late[o] for a parent p of o,
    S[k] >= r[o] - r[producer of k] for each op o that reads k,
    cost >= sum of c_o (r[o] - late[o]),    sum of size_k S[k] <= budget less the bytes of t itself.

With a price of a byte, the last row moves into the objective. The other rows have only differences of two variables: a cut of a
graph with a node for each r, late and S (Picard 1976, "Maximal closure of a graph"). The value of *any* flow in this graph is at
most the cut. Therefore a flow in integers, with capacities rounded down, is a bound without any tolerance.
Intersecting tangents of the concave function finds the price (Kelley 1960, in one dimension).

The bound is at least as good as the linear program's for the same event, in which `y` and `1 - X` may share an op in fractions.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.max_flow import Network
from checkmate.solvers.clocks import Flag


class Line(NamedTuple):
    """A cut as a function of the price of a byte: cost of recomputation, and bytes held less the room for them."""

    cost: float
    excess: float


def single_event(model: CutModel, event: int, time_up: Flag) -> float:
    """Bound the recomputation of every plan after an event, as a share of computing every op once; infinite without a plan."""
    return segment(model, event, model.end, time_up)


def segment(model: CutModel, event: int, until: int, time_up: Flag) -> float:
    """As `single_event`, for the time until another event begins; bounds of disjoint segments add up."""
    network = EventNetwork(model, event, until, time_up)
    # At price 0 everything is held; at an infinite price as little as possible, whatever the cost.
    left = Line(0.0, float(network.held - network.room))
    if left.excess <= 0:
        return 0.0
    least, runs = network.least_bytes()
    if least > network.room:
        return math.inf
    right = network.line(runs)
    best = 0.0
    for _ in range(12):  # prices after the two extremes; each takes a maximum flow
        if time_up[0] or left.excess - right.excess <= 0:
            break
        price = (right.cost - left.cost) / (left.excess - right.excess)
        highest = left.cost + price * left.excess
        if highest - best <= 2e-5 * model.total:
            break
        value, runs = network.least_cost(price)
        best = max(best, value)
        line = network.line(runs)
        if line.excess > 0:
            left = line
        else:
            right = line
    return best / model.total


class EventNetwork:
    """The network of the cut for one event and the time until another: its arcs, and the cost or bytes of each.

    `held` are the bytes live at the event if nothing is computed again, without the event's own bytes. `room` are the bytes that
    the budget leaves for them, and `node` has the node of r of each op.
    """

    _LARGEST = 2.0**52  # flow to which capacities are scaled; rounding down loses at most one for each arc

    def __init__(self, model: CutModel, event: int, until: int, time_up: Flag) -> None:
        m = model
        self._time_up = time_up
        # Only the ancestors of the second event matter: it reads them directly or indirectly.
        inside = m.sides(until)[0].copy() if until != m.end else np.ones(m.end + 1, dtype=np.bool_)
        inside[until] = True
        above, below = m.sides(event)
        below = (below | m.descendants(event)) & inside
        reached = above.copy()
        reached[event] = True
        floating = ~reached & ~below & inside
        again = m.again_after(reached)
        self.node = np.full(m.end + 1, Network.SINK, dtype=np.int64)
        self.node[below] = Network.SOURCE
        self.node[event] = Network.SOURCE
        late = self.node.copy()
        free = np.flatnonzero((above & again & inside) | floating)
        self.node[free] = np.arange(len(free)) + Network.FIRST
        late[floating] = self.node[floating]
        both = np.flatnonzero(floating & again)
        late[both] = np.arange(len(both)) + Network.FIRST + len(free)
        self._nodes = Network.FIRST + len(free) + len(both)
        # An op that is computed again costs; a floating op costs if it was computed before the event.
        sure = np.flatnonzero(above & again & inside)
        paid = np.concatenate([sure, both])
        self._paid = self.node[paid], np.concatenate([np.full(len(sure), Network.SINK, dtype=np.int64), late[both]])
        self._paid_ops, self._paid_cost = paid, m.cost[paid]
        # late <= r, and late rises along the DAG.
        parents = m.parent_edges
        inside = floating[parents[:, 0]] & floating[parents[:, 1]]
        self._forced = [(late[both], self.node[both]), (late[parents[inside, 0]], late[parents[inside, 1]])]
        self._add_values(m, event)
        self._network = Network(self._nodes, (self._paid, self._held), self._forced)

    def _add_values(self, m: CutModel, event: int) -> None:
        own = np.zeros(len(m.size), dtype=np.bool_)
        own[[*m.inputs[event], *m.outputs[event]]] = True
        budget = m.problem.budget_bytes - m.problem.graph.resident_bytes
        self.room = budget - m.workspace[event] - int(m.size[own].sum())
        readers, maker = self.node[m.edge_op], self.node[m.producer]
        use = (
            (readers != Network.SINK) & ~own[m.edge_value] & (maker[m.edge_value] != Network.SOURCE) & (m.size[m.edge_value] > 0)
        )
        values, readers = m.edge_value[use], readers[use]
        # S of a value is the *or* over its readers: a separate node if there are several and none of them is sure.
        sure = np.zeros(len(m.size), dtype=np.bool_)
        sure[values[readers == Network.SOURCE]] = True
        many = np.bincount(values, minlength=len(m.size))
        reader = np.full(len(m.size), -1, dtype=np.int64)
        reader[values] = readers
        shared = (many > 1) & ~sure
        reader[shared] = np.arange(self._nodes, self._nodes + int(shared.sum()))
        reader[sure] = Network.SOURCE
        self._nodes += int(shared.sum())
        self._forced.append((readers[shared[values]], reader[values[shared[values]]]))
        held = np.flatnonzero(reader >= 0)
        # Values surely read later, and made by an op that does not run again, are live in every plan.
        always = (reader[held] == Network.SOURCE) & (maker[held] == Network.SINK)
        self.room -= int(m.size[held[always]].sum())
        held = held[~always]
        # The replay state of an op that has run is held if it runs again.
        states = np.flatnonzero(m.replay[self._paid_ops] > 0)
        runs, ran = self._paid
        self._held = np.append(reader[held], runs[states]), np.append(maker[held], ran[states])
        self._held_bytes = np.concatenate([m.size[held], m.replay[self._paid_ops[states]]])
        self.held = int(self._held_bytes[self._held[0] == Network.SOURCE].sum())

    def line(self, runs: npt.NDArray[np.bool_]) -> Line:
        """Cost and bytes of a cut, by the side of each node."""
        cost = self._paid_cost[runs[self._paid[0]] & ~runs[self._paid[1]]].sum()
        held = self._held_bytes[runs[self._held[0]] & ~runs[self._held[1]]].sum()
        return Line(float(cost), float(held - self.room))

    def least_bytes(self) -> tuple[int, npt.NDArray[np.bool_]]:
        """A lower bound on the bytes held at the event, whatever the cost, and the cut."""
        scale = min(1.0, self._LARGEST / max(1, self.held))
        flow, runs = self._flow(0.0, scale)
        return math.floor(flow / scale), runs

    def least_cost(self, price: float) -> tuple[float, npt.NDArray[np.bool_]]:
        """A lower bound on the cost for a price of a byte, in the graph's unit, and the cut."""
        # No cut of interest is larger than the cut in which nothing is computed again.
        scale = self._LARGEST / max(1.0, price * self.held)
        flow, runs = self._flow(scale, price * scale)
        return flow / scale - price * self.room, runs

    def _flow(self, of_cost: float, of_byte: float) -> tuple[int, npt.NDArray[np.bool_]]:
        """The largest flow for capacities that are rounded down, and the source's side of its cut."""
        scaled = np.concatenate([_rounded_down(self._paid_cost, of_cost), _rounded_down(self._held_bytes, of_byte)])
        return self._network.flow(np.minimum(scaled, Network.UNLIMITED).astype(np.int64), self._time_up)


def _rounded_down(amounts: npt.NDArray[Any], factor: float) -> npt.NDArray[np.float64]:
    """Amounts times a factor, as whole numbers that are no larger: the product itself may have been rounded up."""
    product = amounts * factor
    return np.floor(product if factor in (0.0, 1.0) else np.nextafter(product, 0.0))
