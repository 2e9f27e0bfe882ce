"""A floor on the peak of every plan: what is in memory when one of some ops runs for the last time.

`floor` looks at one op at a time. It is loose where values are kept, such as the gradients of all parameters: to make the
last of them, ops have to run that need much beside the others. Take any set M of ops. Every plan computes each of them, so
one of them, t, is the last to run. From then on no op of M runs again, so that whatever a kept value needs of
their work is in memory by then, and

    workspace of t + its inputs and outputs + sum of size_k S[k] <= peak,

where S[k] = value k is live while t runs, and r[o] = op o, not of M, runs after t:

    S[k] + r[producer of k] >= 1      for kept values k,
    S[k] + r[producer of k] >= r[o]   for inputs k of o,

with r = 0 on M and on ancestors of M that may run only once, none of which is t, and rows of the outputs of t left out: they
are there. The least left side is a minimum cut (`min_cut` has the same network with costs), and the least over all t of M is a
lower bound on the peak of every plan, for every M. Here M are the ops that need at least so many bytes, for every such amount.
``docs/explanation/event_cuts.md`` has the proof. We know of no earlier use.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from checkmate.core.graph import Graph
from checkmate.core.units import format_bytes
from checkmate.solvers.alarm import Flag, no_alarm
from checkmate.solvers.bounds.max_flow import Arcs, build_arcs, max_flow

_SOURCE: Final = 0
_SINK: Final = 1
_FIRST: Final = 2
_UNLIMITED: Final = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRunParameters:
    """Parameters of `last_run_floor`.

    Attributes:
        work: Entries of the networks of all flows together: some seconds. Counted, so that the floor does not depend on the
            machine.
        most_ops: Largest graph.
    """

    work: int = 4_000_000
    most_ops: int = 30_000


PARAMETERS = LastRunParameters()


class LastRun(NamedTuple):
    """A proven lower bound on the peak of every plan.

    Attributes:
        peak_bytes: The bound, resident bytes included.
        op: Op that would be the last of its set to run in a plan that comes nearest.
        least_bytes: The set: all ops that need at least so many bytes.
        why: Its parts in words.
    """

    peak_bytes: int
    op: int
    least_bytes: int
    why: str


def last_run_floor(graph: Graph, known_bytes: int, time_up: Flag | None = None) -> LastRun | None:
    """A floor above one that is known.

    Args:
        graph: A graph whose views are folded; a view that is left has no bytes here, which loosens the floor.
        known_bytes: A floor, resident bytes included.
        time_up: Ends it when it is raised, with the floor so far; by default nothing does.

    Returns:
        The highest floor that was found, or None where none is above the one that is known.
    """
    time_up = no_alarm() if time_up is None else time_up
    kept = sum(x.size_bytes for x in graph.values if x.kept)
    if not kept or len(graph.ops) > PARAMETERS.most_ops:
        return None
    network = _Network(graph)
    left = PARAMETERS.work
    best: LastRun | None = None
    # No floor of a set is higher than all kept values beside the least need in it.
    for least in sorted({n for n in network.need if n + kept + graph.resident_bytes > known_bytes}, reverse=True):
        known = known_bytes if best is None else best.peak_bytes
        ops = [o for o, n in enumerate(network.need) if n >= least]
        last, again = network.last_and_after(ops)
        lowest, binding = _UNLIMITED, -1
        for o in sorted(last, key=lambda o: (network.need[o], o)):
            left -= network.entries
            beside = network.least_beside(o, again, time_up)
            if left < 0 or time_up[0]:
                return best
            if network.need[o] + beside < lowest:
                lowest, binding = network.need[o] + beside, o
            if graph.resident_bytes + lowest <= known:
                break
        else:
            best = LastRun(graph.resident_bytes + lowest, binding, least, _describe(graph, network, binding, least, lowest))
    return best


def _describe(graph: Graph, network: _Network, o: int, least: int, lowest: int) -> str:
    op, need = graph.ops[o], network.need[o]
    where = f" ({op.source})" if op.source else ""
    return (
        f"when the last of the ops that need {format_bytes(least)} or more runs, at best `{op.name}`{where}, its "
        f"{format_bytes(need)} and {format_bytes(lowest - need)} for the values kept to the end must be there"
    )


class _Network:
    """The network of all cuts: their capacities differ, its arcs do not.

    A node for each op (r of the module) and one for each value (the *or* of what its readers need).

    Attributes:
        need: Bytes of the inputs, outputs and workspace of each op. Shape ``[op]``.
        entries: Arcs and nodes, the unit of work.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        ops, values = len(graph.ops), len(graph.values)
        self._size = np.array([x.size_bytes if x.base is None else 0 for x in graph.values], dtype=np.int64)
        self._producer = np.array(graph.producer, dtype=np.int64)
        self._own = [np.array(sorted({*op.inputs, *op.outputs}), dtype=np.int64) for op in graph.ops]
        self.need = [op.workspace_bytes + int(self._size[own].sum()) for op, own in zip(graph.ops, self._own, strict=True)]
        node = np.arange(values, dtype=np.int64) + _FIRST + ops
        kept = np.flatnonzero([x.kept for x in graph.values])
        reads = np.array([(o, v) for o, op in enumerate(graph.ops) for v in op.inputs], dtype=np.int64).reshape(-1, 2)
        # The first arcs have no limit: what is needed. Then for each value: its op runs again, or it is held.
        tails = [np.full(len(kept), _SOURCE, dtype=np.int64), reads[:, 0] + _FIRST, node, node]
        heads = [node[kept], node[reads[:, 1]], self._producer + _FIRST, np.full(values, _SINK, dtype=np.int64)]
        self._unlimited = len(kept) + len(reads)
        self._arcs: Arcs = build_arcs(_FIRST + ops + values, np.concatenate(tails), np.concatenate(heads))
        self.entries = len(self._arcs.head) + len(self._arcs.start)

    def last_and_after(self, ops: Collection[int]) -> tuple[list[int], npt.NDArray[np.bool_]]:
        """Those of some ops that may be the last of them to run, and the ops that may run after it.

        An ancestor of one of them that may run only once has run before that one: it is not the last, and does not run again.

        Returns:
            The ops that may be the last, in the order given, and whether each op may run after it. Shape ``[op]``.
        """
        graph, chosen = self._graph, set(ops)
        before = [False] * len(graph.ops)
        for o in range(len(graph.ops) - 1, -1, -1):
            if before[o] or o in chosen:
                for v in graph.ops[o].inputs:
                    before[graph.producer[v]] = True
        over = [not op.recomputable and earlier for op, earlier in zip(graph.ops, before, strict=True)]
        again = np.array([not gone and o not in chosen for o, gone in enumerate(over)])
        return [o for o in ops if not over[o]], again

    def least_beside(self, op: int, again: npt.NDArray[np.bool_], time_up: Flag) -> int:
        """Least bytes beside those of an op while it runs for the last time, if of the others only some may run after it.

        Args:
            op: The op.
            again: Those that may. Shape ``[op]``.
            time_up: Ends the flow when it is raised; what is returned then is lower.
        """
        made = again[self._producer]
        capacity = np.concatenate([np.where(made, self._size, 0), np.where(made, 0, self._size)])
        for v in self._own[op].tolist():  # there in any case
            capacity[v] = capacity[len(self._size) + v] = 0
        whole = np.concatenate([np.full(self._unlimited, _UNLIMITED, dtype=np.int64), capacity])
        flow, _ = max_flow(self._arcs, whole, _SOURCE, _SINK, time_up)
        return flow
