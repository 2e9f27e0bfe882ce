"""Drop free views: their readers read the storage's owner, and they are made again on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from checkmate.core.graph import Graph, Op, Value
from checkmate.core.problem import Problem


@dataclass(frozen=True, slots=True)
class FoldViews:
    """A graph without its views, and how to put them back.

    Half of the ops of a captured transformer are views. They hold nothing of their own, so a plan
    of the folded graph holds the same bytes, step by step, as the plan with the views put back.

    Attributes:
        original: The graph as it was.
        folded: The same without the folded ops. If views are priced, an op's cost there counts those without which
            nobody can read what it makes: whoever computes it again makes them again.
        kept_ops: Index in ``original`` of each op of ``folded``. Shape ``[folded op]``.
    """

    original: Graph
    folded: Graph
    kept_ops: tuple[int, ...]

    @classmethod
    def of(cls, graph: Graph, *, priced: bool = False) -> FoldViews:
        """Fold the graph's `view_ops`.

        Args:
            graph: Any graph.
            priced: Whether ops cost what the views cost that come with them. Then `cost_offset` and the cost in the folded
                graph are together no more than what a plan costs, if first computations may stand anywhere.
        """
        kept_ops = [o for o in range(len(graph.ops)) if o not in graph.view_ops]
        new_op = {o: i for i, o in enumerate(kept_ops)}
        kept_values = [v for v in range(len(graph.values)) if graph.producer[v] in new_op]
        new_value = {v: i for i, v in enumerate(kept_values)}
        held = {graph.root[v] for v, value in enumerate(graph.values) if value.kept and _holds_owner(graph, v)}

        views = _cost_of_views(graph) if priced else [0] * len(graph.ops)

        def resolve(v: int) -> int:
            return new_value[v] if v in new_value else new_value[graph.root[v]]

        folded = Graph(
            ops=tuple(_renumbered(graph.ops[o], resolve, new_op, views[o]) for o in kept_ops),
            values=tuple(
                Value(
                    value.name,
                    value.size_bytes,
                    None if value.base is None else resolve(graph.root[v]),
                    value.kept or v in held,
                )
                for v, value in ((v, graph.values[v]) for v in kept_values)
            ),
            order=tuple((new_op[a], new_op[b]) for a, b in graph.order),
            resident_bytes=graph.resident_bytes,
            cost_unit=graph.cost_unit,
            name=graph.name,
        )
        return cls(graph, folded, tuple(kept_ops))

    @property
    def cost_offset(self) -> int:
        """Cost of the original less that of the folded graph, every op computed once; it may be negative."""
        return self.original.cost - self.folded.cost

    def apply(self, problem: Problem) -> Problem:
        """The problem on the folded graph."""
        return Problem(self.folded, problem.budget_bytes, problem.recompute, problem.reorder)

    def apply_order(self, order: Iterable[int]) -> list[int]:
        """Order of the folded graph for an order of the original one."""
        new_op = {o: i for i, o in enumerate(self.kept_ops)}
        return [new_op[o] for o in order if o in new_op]

    def invert(self, order: Iterable[int]) -> list[int]:
        """Order of the original graph for an order of the folded one: a view right before its reader.

        A view is made again after its storage was. One that nobody reads is made with its storage.
        """
        sequence = [self.kept_ops[o] for o in order]
        if len(self.kept_ops) == len(self.original.ops):
            return sequence
        emitted = self._emit(sequence, frozenset())
        missing = frozenset(range(len(self.original.ops))) - frozenset(emitted)
        return self._emit(sequence, missing) if missing else emitted

    def _emit(self, sequence: Sequence[int], eager: frozenset[int]) -> list[int]:
        graph = self.original
        solid = frozenset(self.kept_ops)
        version = [0] * len(graph.values)
        bound = [-1] * len(graph.values)  # version of the storage that the newest instance of a view shares
        out: list[int] = []
        with_root: dict[int, list[int]] = {}
        for o in sorted(eager):
            for v in graph.ops[o].outputs:
                with_root.setdefault(graph.root[v], []).append(v)
        if not eager:
            with_root = {}

        def ensure(target: int) -> None:
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
                out.append(o)
                for u in graph.ops[o].outputs:
                    bound[u] = version[graph.root[u]]

        done: set[int] = set()
        for o in sequence:
            for v in graph.ops[o].inputs:
                ensure(v)
            out.append(o)
            for v in graph.ops[o].outputs:
                version[v] += 1
            if o not in done:
                done.add(o)
                for v in graph.ops[o].outputs:
                    for view in with_root.get(v, ()):
                        ensure(view)
        for v, value in enumerate(graph.values):
            if value.kept:
                ensure(v)
        return out


def may_run_again(folded: Problem, o: int) -> bool:
    """Whether an op of a graph whose views are folded may be computed more than once."""
    op = folded.graph.ops[o]
    return op.recomputable and (op.phase == "forward" or folded.recompute == "all")


def _holds_owner(graph: Graph, v: int) -> bool:
    """Whether keeping a value keeps the owner of its storage: a free view is made from the newest instance.

    So is a view tied to its place, if the owner is made only once.
    """
    return graph.producer[v] in graph.view_ops or not graph.ops[graph.producer[graph.root[v]]].recomputable


def _cost_of_views(graph: Graph) -> list[int]:
    """For each op, the cost of the free views through which everybody reads what it makes. Shape ``[op]``.

    In some cheapest plan every computation of an op is read before its next: one that nobody reads can be left out, the
    first too, unless it has to come before another op. Whoever reads makes these views after it. So an op that is
    computed ``n`` times has each of them made ``n`` times, and every other view once.
    """
    end = [v for v, value in enumerate(graph.values) if value.kept]
    readers = [graph.ops[o].inputs for o in range(len(graph.ops)) if o not in graph.view_ops] + [end]
    common: dict[int, set[int]] = {}  # op -> views
    for inputs in readers:
        needed: dict[int, set[int]] = {}  # storage -> views
        for v in inputs:
            views = needed.setdefault(graph.root[v], set())
            stack = [v]
            while stack:
                o = graph.producer[stack.pop()]
                if o in graph.view_ops and o not in views:
                    views.add(o)
                    stack += graph.ops[o].inputs
        for root, views in needed.items():
            common[graph.producer[root]] = views & common.get(graph.producer[root], views)
    first = {a for a, _ in graph.order}
    return [0 if o in first else sum(graph.ops[v].cost for v in common.get(o, ())) for o in range(len(graph.ops))]


def _renumbered(op: Op, resolve: Callable[[int], int], new_op: dict[int, int], view_cost: int) -> Op:
    return Op(
        name=op.name,
        inputs=tuple(dict.fromkeys(resolve(v) for v in op.inputs)),
        outputs=tuple(resolve(v) for v in op.outputs),
        cost=op.cost + view_cost,
        workspace_bytes=op.workspace_bytes,
        replay_bytes=op.replay_bytes,
        recomputable=op.recomputable,
        clobbered_by=tuple(new_op[c] for c in op.clobbered_by),
        phase=op.phase,
        kind=op.kind,
        source=op.source,
    )
