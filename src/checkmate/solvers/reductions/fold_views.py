"""A reduction that removes free views: their readers read the owner of the storage, and `invert` inserts the views again.

A free view (`Graph.view_ops`), for example a transpose or a slice, computes and allocates nothing. Half of the ops of
a captured transformer are free views. Solvers that decide op by op would decide about each view without any effect
on memory. The folded problem is half as large and has plans of the same bytes, since a view can be made right before
its reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec import structs

from checkmate.core.graph import Graph, Op
from checkmate.core.plan import Compute, Fetch, Step
from checkmate.core.problem import Problem
from checkmate.solvers.walks import reached


@dataclass(frozen=True, slots=True)
class FoldViews:
    """A graph without its free views, and the way back.

    A plan of the folded graph holds the same bytes, step by step, as the plan with the views inserted again: a view
    allocates nothing and is made right before its reader, when its storage is live anyway.
    """

    original: Graph
    folded: Graph
    kept_ops: tuple[int, ...]
    """Index in ``original`` of each op of ``folded``."""

    @classmethod
    def of(cls, graph: Graph, *, priced: bool = False) -> FoldViews:
        """Fold the graph's `Graph.view_ops`.

        With ``priced`` the cost of an op includes the cost of views that are recomputed with it. A bound on the folded problem
        plus `cost_offset` is then a bound on the original one, provided that first computations may be reordered. Otherwise
        views count as free, a weaker bound: on BERT at 40 to 50 % of keep-all the gap is 0.14 %, and 0.04 % with ``priced``.
        """
        plain = all(value.base is None for value in graph.values)
        if plain and all(len(set(op.inputs)) == len(op.inputs) for op in graph.ops):  # nothing to fold or to renumber
            return cls(graph, graph, tuple(range(len(graph.ops))))
        kept_ops = [o for o in range(len(graph.ops)) if o not in graph.view_ops]
        new_op = {o: i for i, o in enumerate(kept_ops)}
        kept_values = [v for v in range(len(graph.values)) if graph.producer[v] in new_op]
        new_value = {v: i for i, v in enumerate(kept_values)}
        # A kept view keeps its storage, so the storage's owner, which remains, takes over the flag.
        held = {graph.root[v] for v, value in enumerate(graph.values) if value.kept and _holds_owner(graph, v)}
        views = _cost_of_views(graph) if priced else [0] * len(graph.ops)

        def resolve(v: int) -> int:
            return new_value[v] if v in new_value else new_value[graph.root[v]]

        values = ((v, graph.values[v]) for v in kept_values)
        folded = structs.replace(
            graph,
            ops=tuple(_renumbered(graph.ops[o], resolve, new_op, views[o]) for o in kept_ops),
            values=tuple(
                structs.replace(x, base=None if x.base is None else resolve(graph.root[v]), kept=x.kept or v in held)
                for v, x in values
            ),
            order=tuple((new_op[a], new_op[b]) for a, b in graph.order),
        )
        return cls(graph, folded, tuple(kept_ops))

    @property
    def cost_offset(self) -> int:
        """Cost of the original graph less the cost of the folded graph, with every op computed once.

        Negative if a view is priced into several ops: it counts once in the original graph, but once with each op here.
        """
        return self.original.cost - self.folded.cost

    def apply(self, problem: Problem) -> Problem:
        """The problem on the folded graph."""
        return Problem(self.folded, problem.budget_bytes, problem.recompute, problem.reorder, problem.host)

    def apply_order(self, order: Iterable[int]) -> list[int]:
        """Order of the folded graph for an order of the original one."""
        new_op = {o: i for i, o in enumerate(self.kept_ops)}
        return [new_op[o] for o in order if o in new_op]

    def invert(self, order: Iterable[int]) -> list[int]:
        """Order of the original graph for an order of the folded one.

        A view is computed right before the op that reads it, and again after its storage has been recomputed. A view
        without readers is computed when its storage is first computed, since a plan has to compute every op.
        """
        return [step.op for step in self.invert_steps([Compute(o) for o in order]) if isinstance(step, Compute)]

    def invert_steps(self, steps: Iterable[Step]) -> list[Step]:
        """As `invert`, for a sequence with copies between the computations.

        Views of a fetched value are computed again, since its storage is a new one.
        """
        graph, solid = self.original, frozenset(self.kept_ops)
        values = [v for v, o in enumerate(graph.producer) if o in solid]
        # A view instance keeps its storage instance alive (`core.simulate`). A view of an old version would have old contents
        # and hold old bytes. Therefore it is made again after each new version.
        version = [0] * len(graph.values)
        bound = [-1] * len(graph.values)  # version of the storage that the newest instance of a view shares
        out: list[Step] = []

        def ensure(target: int) -> None:
            """Compute the views between a storage and a value, from the storage on; iteratively, as chains can be long."""
            stack = [target]
            while stack:
                v = stack[-1]
                o = graph.producer[v]
                if o in solid or bound[v] == version[graph.root[v]]:
                    stack.pop()
                    continue
                stale = [u for u in graph.ops[o].inputs if graph.producer[u] not in solid and bound[u] != version[graph.root[u]]]
                if stale:
                    stack += stale
                    continue
                stack.pop()
                out.append(Compute(o))
                for u in graph.ops[o].outputs:
                    bound[u] = version[graph.root[u]]

        unread = self._unread_views()
        for step in steps:
            if not isinstance(step, Compute):
                v = values[step.value]
                out.append(type(step)(v))
                if isinstance(step, Fetch):
                    version[v] += 1
                    for view in unread.pop(v, ()):
                        ensure(view)
                continue
            op = graph.ops[self.kept_ops[step.op]]
            for v in op.inputs:
                ensure(v)
            out.append(Compute(self.kept_ops[step.op]))
            for v in op.outputs:
                version[v] += 1
            for v in op.outputs:
                for view in unread.pop(v, ()):
                    ensure(view)
        for v, value in enumerate(graph.values):
            if value.kept:
                ensure(v)
        return out

    def _unread_views(self) -> dict[int, list[int]]:
        """Storage -> its views, in the order of the graph, through which neither another op nor the end reads."""
        graph, solid = self.original, frozenset(self.kept_ops)
        read = {v for v, value in enumerate(graph.values) if value.kept} | {v for o in solid for v in graph.ops[o].inputs}
        unread: list[int] = []
        for o in range(len(graph.ops) - 1, -1, -1):
            if o not in solid and read.isdisjoint(graph.ops[o].outputs):
                unread.append(o)
            elif o not in solid:
                read.update(graph.ops[o].inputs)
        views: dict[int, list[int]] = {}
        for o in reversed(unread):
            for v in graph.ops[o].outputs:
                views.setdefault(graph.root[v], []).append(v)
        return views


def may_run_again(folded: Problem, o: int) -> bool:
    """Whether an op may be computed more than once."""
    op = folded.graph.ops[o]
    return op.recomputable and (op.phase == "forward" or folded.recompute == "all")


def reads_with_storage(graph: Graph, values: Iterable[int]) -> list[int]:
    """Values that are read, and the owners of their storages, each once.

    A view that folding left needs the newest instance of the owner, too. This can only rule plans out.
    """
    return list(dict.fromkeys(u for v in values for u in (v, graph.root[v])))


def _holds_owner(graph: Graph, v: int) -> bool:
    """Whether keeping a value means keeping the newest instance of the value that owns its storage.

    This holds for a free view, which `invert` makes from the newest instance. It also holds for a view that a rule ties to
    its place if the owner is computed only once, since that instance is the newest. A tied view of an owner that is
    computed again shares an older instance, and the newest may be freed.
    """
    return graph.producer[v] in graph.view_ops or not graph.ops[graph.producer[graph.root[v]]].recomputable


def _cost_of_views(graph: Graph) -> list[int]:
    """For each op, the cost of the free views through which all of its readers read.

    In some cheapest plan every computation of an op is read before its next computation, because an unread one could be left
    out. Each reader needs these views of this instance. Therefore, if an op is computed ``n`` times, each of these views is
    computed at least ``n`` times, and every other view at least once.

    The argument fails in two cases, which are excluded: ops that `order` puts before another op, whose first computation
    may be needed for its place alone; and, by the caller, problems that fix the order of first computations. The views of
    the cheapest reader would be too many: if two readers have different views, recomputing the op makes neither set twice
    (found by a test over 10,000 random graphs).
    """
    # The end of the step reads kept values.
    end = [v for v, value in enumerate(graph.values) if value.kept]
    readers = [graph.ops[o].inputs for o in range(len(graph.ops)) if o not in graph.view_ops] + [end]
    sources = [{graph.producer[v] for v in op.inputs} for op in graph.ops]
    common: dict[int, set[int]] = {}  # op -> views through which each of its readers so far reads
    for inputs in readers:
        needed: dict[int, set[int]] = {}  # storage -> views through which this reader reads it
        for v in inputs:
            views = reached((graph.producer[v],), sources.__getitem__, graph.view_ops.__contains__)
            needed.setdefault(graph.root[v], set()).update(views)
        for root, views in needed.items():
            common[graph.producer[root]] = views & common.get(graph.producer[root], views)
    first = {a for a, _ in graph.order}
    return [0 if o in first else sum(graph.ops[v].cost for v in common.get(o, ())) for o in range(len(graph.ops))]


def _renumbered(op: Op, resolve: Callable[[int], int], new_op: dict[int, int], view_cost: int) -> Op:
    """The op with the indices of the folded graph. ``new_op`` has every op that overwrites, since it is not a free view."""
    return structs.replace(
        op,
        inputs=tuple(dict.fromkeys(resolve(v) for v in op.inputs)),
        outputs=tuple(resolve(v) for v in op.outputs),
        cost=op.cost + view_cost,
        clobbered_by=tuple(new_op[c] for c in op.clobbered_by),
    )
