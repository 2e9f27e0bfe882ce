"""A floor on the peak of every plan: the bytes in memory when the last of some ops runs for the last time.

`floor` looks at one op at a time. It is loose if many values are kept, for example the gradients of all parameters: the ops
that make the last of them need much memory in addition to the others. Take any set M of ops. Every plan computes each of
them, and one of them, t, runs last. From then on no op of M runs again. Therefore all results of M that kept values still
need are in memory by then, and

    workspace of t + its inputs and outputs + sum of size_k S[k] <= peak,

where S[k] = 1 if value k is live while t runs, and r[o] = 1 if op o, not in M, runs after t:

    S[k] + r[producer of k] >= 1      for kept values k,
    S[k] + r[producer of k] >= r[o]   for inputs k of o,

with r = 0 on M and on ancestors of M that may run only once, none of which is t. The outputs of t have no rows: they are live.
The least left side is a minimum cut (`min_cut` has the same network with costs), and the least over all t in M is a lower bound
on the peak of every plan, for every M. Here M is every set of the ops that need at least n bytes, for any n.
``docs/explanation/event_cuts.md`` has the proof. We know of no earlier use.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from checkmate.core.graph import Graph
from checkmate.core.units import format_bytes
from checkmate.solvers.bounds.floor import Floor, name_of
from checkmate.solvers.bounds.max_flow import Network
from checkmate.solvers.clocks import Flag, no_alarm


def last_run_floor(
    graph: Graph, known_bytes: int, time_up: Flag | None = None, *, most_ops: int = 30_000, work: int = 4_000_000
) -> Floor | None:
    """The highest floor found above a known one; its op is the last to run in the plan that comes nearest.

    A view that was not folded has no bytes here, which loosens the floor. The search ends with the floor so far when the flag is
    raised, or after a fixed amount of work, some seconds. Work counts arcs and nodes of all flows, so that the floor does not
    depend on the machine.
    """
    time_up = no_alarm() if time_up is None else time_up
    kept = sum(x.size_bytes for x in graph.values if x.kept)
    if not kept or len(graph.ops) > most_ops:
        return None
    cuts = _LastRuns(graph)
    best: Floor | None = None
    # No floor of a set is higher than all kept values plus the least need in the set.
    for least in sorted({n for n in cuts.need if n + kept + graph.resident_bytes > known_bytes}, reverse=True):
        known = known_bytes if best is None else best.peak_bytes
        last, again = cuts.last_and_after([o for o, n in enumerate(cuts.need) if n >= least])
        lowest, binding = Network.UNLIMITED, -1
        for o in sorted(last, key=lambda o: (cuts.need[o], o)):
            work -= cuts.network.size
            beside = cuts.least_beside(o, again, time_up)
            if work < 0 or time_up[0]:
                return best
            if cuts.need[o] + beside < lowest:
                lowest, binding = cuts.need[o] + beside, o
            if graph.resident_bytes + lowest <= known:
                break
        else:
            need = cuts.need[binding]
            why = (
                f"when the last of the ops that need {format_bytes(least)} or more runs, at best {name_of(graph, binding)}, its "
                f"{format_bytes(need)} and {format_bytes(lowest - need)} for the values kept to the end must be there"
            )
            best = Floor(graph.resident_bytes + lowest, binding, why)
    return best


class _LastRuns:
    """The network of all cuts: a node for each op (r of the module) and one for each value (the *or* of its readers' needs)."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        ops, values = len(graph.ops), len(graph.values)
        self._size = np.array([x.size_bytes if x.base is None else 0 for x in graph.values], dtype=np.int64)
        self._producer = np.array(graph.producer, dtype=np.int64)
        self._own = [np.array(sorted({*op.inputs, *op.outputs}), dtype=np.int64) for op in graph.ops]
        # Bytes of the inputs, outputs and workspace of each op.
        self.need = [op.workspace_bytes + int(self._size[own].sum()) for op, own in zip(graph.ops, self._own, strict=True)]
        node = np.arange(values, dtype=np.int64) + Network.FIRST + ops
        kept = np.flatnonzero([x.kept for x in graph.values])
        reads = np.array([(o, v) for o, op in enumerate(graph.ops) for v in op.inputs], dtype=np.int64).reshape(-1, 2)
        again, held = (node, self._producer + Network.FIRST), (node, np.full(values, Network.SINK))
        needed = (np.full(len(kept), Network.SOURCE), node[kept]), (reads[:, 0] + Network.FIRST, node[reads[:, 1]])
        self.network = Network(Network.FIRST + ops + values, (again, held), needed)

    def last_and_after(self, ops: Collection[int]) -> tuple[list[int], npt.NDArray[np.bool_]]:
        """The ops among ``ops`` that may be the last to run, and whether each op may run after the last. Shape ``[op]``.

        An ancestor of one of ``ops`` that may run only once has run before: it is not the last and does not run again.
        """
        graph, chosen = self._graph, set(ops)
        before = [False] * len(graph.ops)
        for o in range(len(graph.ops) - 1, -1, -1):
            if before[o] or o in chosen:
                for v in graph.ops[o].inputs:
                    before[graph.producer[v]] = True
        over = {o for o, op in enumerate(graph.ops) if before[o] and not op.recomputable}
        again = np.array([o not in over and o not in chosen for o in range(len(graph.ops))])
        return [o for o in ops if o not in over], again

    def least_beside(self, op: int, again: npt.NDArray[np.bool_], time_up: Flag) -> int:
        """Least bytes besides an op's own while it runs for the last time, if only the ops in ``again`` may run after it.

        A smaller number if the time is up before the flow is found.
        """
        made = again[self._producer]
        capacity = np.concatenate([np.where(made, self._size, 0), np.where(made, 0, self._size)])
        for v in self._own[op].tolist():  # live in any case
            capacity[v] = capacity[len(self._size) + v] = 0
        return self.network.flow(capacity, time_up)[0]
