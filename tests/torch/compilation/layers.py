"""Steps of a chain of layers as observed, in one graph or several, and what tests of their graphs share."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from checkmate import Graph, Op, Plan, Value, evaluate, simulate, validate
from checkmate.core.graph import BOUNDARY
from checkmate.core.plan import Compute
from checkmate.torch.joint.capture import CapturedGraph
from checkmate.torch.steps.step_graph import ObservedStep, Segment, StepGraph, Storage

RESIDENT = 1000
HIDDEN, GRADIENT, WEIGHT_GRADIENT, WEIGHT, BATCH, LOSS_TANGENT = 0, 100, 200, 300, 400, 500
"""Storages: that of hidden tensor 2 is ``HIDDEN + 2``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """A chain of layers with its backward; the last layer is the loss.

    Layer i computes hidden tensor i from the one before. Its backward reads the gradient of that tensor and its input, and
    computes the gradients of its input and of its weight.

    Attributes:
        hidden: Bytes of each hidden tensor, and of its gradient.
        weights: Bytes of the gradient of each weight.
        output_read: Layers whose backward reads their own output.
    """

    hidden: tuple[int, ...]
    weights: tuple[int, ...]
    output_read: frozenset[int] = frozenset()

    def part(self, first: int, end: int) -> CapturedGraph:
        """The layers from ``first`` to ``end`` as one captured graph. Its inputs are a hidden tensor and the weights."""
        count = end - first
        values = [Value(f"h{i}", self.hidden[i], kept=i == end - 1) for i in range(first, end)]
        ops = [Op(f"f{i}", (i - first - 1,) if i > first else (), (i - first,), cost=1 + i) for i in range(first, end)]
        tangent = len(values)
        values.append(Value("tangent", self.hidden[end - 1]))
        ops.append(Op("start", (count - 1,), (tangent,), cost=0, recomputable=False, phase="backward", kind=BOUNDARY))
        gradient, weights = tangent, dict[int, int]()
        for i in reversed(range(first, end)):
            reads = {gradient} | ({i - first - 1} if i > first else set()) | ({i - first} if i in self.output_read else set())
            made = []
            if i > 0:
                made.append(len(values))
                values.append(Value(f"g{i - 1}", self.hidden[i - 1], kept=i == first))
            weights[i] = len(values)
            made.append(weights[i])
            values.append(Value(f"w{i}", self.weights[i], kept=True))
            ops.append(Op(f"b{i}", tuple(sorted(reads)), tuple(made), cost=1 + i, phase="backward"))
            gradient = made[0]
        return CapturedGraph(
            graph=Graph(tuple(ops), tuple(values)),
            readers=((0, len(ops) - 1), *((i - first,) for i in range(first, end))),
            views={},
            returned=(count - 1,),
            tangents=(tangent,),
            gradients=(gradient if first > 0 else None, *(weights[i] for i in range(first, end))),
        )

    def step(self, cuts: Sequence[int] = (), *, resident_bytes: int = RESIDENT) -> ObservedStep:
        """The chain as a step of one graph more than there are cuts.

        Args:
            cuts: First layer of each further graph, ascending.
            resident_bytes: Resident bytes.
        """
        n, bounds = len(self.hidden), [0, *cuts, len(self.hidden)]
        count = len(bounds) - 1
        over, forwards, backwards = 2 * count, list[Segment](), list[Segment]()
        storages = {HIDDEN + n - 1: Storage(size_bytes=self.hidden[-1], last=over)}
        storages[LOSS_TANGENT] = Storage(size_bytes=self.hidden[-1], last=count)
        storages[BATCH] = Storage(size_bytes=0, last=over)
        for p, (first, end) in enumerate(itertools.pairwise(bounds)):
            weights = range(first, end)
            storages.update({WEIGHT + i: Storage(size_bytes=0, last=over) for i in weights})
            storages.update({WEIGHT_GRADIENT + i: Storage(size_bytes=self.weights[i], last=over) for i in weights})
            if end < n:
                read = over - 1 - p if end - 1 in self.output_read else over - 2 - p
                storages[HIDDEN + end - 1] = Storage(size_bytes=self.hidden[end - 1], last=read)
                storages[GRADIENT + end - 1] = Storage(size_bytes=self.hidden[end - 1], last=over - 1 - p)
            given = (HIDDEN + first - 1 if p else BATCH, *(WEIGHT + i for i in weights))
            forwards.append(Segment(captured=p, backward=False, given=given, made=(HIDDEN + end - 1,)))
            gradients = (GRADIENT + first - 1 if p else None, *(WEIGHT_GRADIENT + i for i in weights))
            tangent = GRADIENT + end - 1 if end < n else LOSS_TANGENT
            backwards.append(Segment(captured=p, backward=True, given=(tangent,), made=gradients))
        return ObservedStep(
            graphs=tuple(self.part(first, end) for first, end in itertools.pairwise(bounds)),
            segments=(*forwards, *reversed(backwards)),
            storages=storages,
            resident_bytes=resident_bytes,
        )


LAYERS = Layers(hidden=(10, 20, 30, 4), weights=(1, 2, 3, 5))


def changed(step: ObservedStep, storage: int, **facts: int | None) -> ObservedStep:
    """A step in which one storage is another."""
    known = step.storages.get(storage, Storage(size_bytes=0))
    return replace(step, storages={**step.storages, storage: replace(known, **facts)})


def with_segment(step: ObservedStep, w: int, **facts: object) -> ObservedStep:
    """A step in which one segment is another."""
    return replace(step, segments=tuple(replace(x, **facts) if i == w else x for i, x in enumerate(step.segments)))


def memory(graph: Graph, order: Iterable[int] | None = None) -> dict[str, int]:
    """Bytes above the resident ones while each op first runs, by its name; in the graph's own order by default."""
    plan = Plan.from_order(graph, range(len(graph.ops)) if order is None else order)
    held = simulate(graph, plan).bytes
    found: dict[str, int] = {}
    for step, size in zip(plan.steps, held, strict=True):
        if isinstance(step, Compute):
            found.setdefault(graph.ops[step.op].name, int(size) - graph.resident_bytes)
    return found


def named(graph: Graph, *names: str) -> list[int]:
    """Ops by their names."""
    return [next(o for o, op in enumerate(graph.ops) if op.name == name) for name in names]


def check(step: ObservedStep, whole: StepGraph, order: Sequence[int]) -> list[int]:
    """An order of the whole graph, moved into segments, is valid, and so is each part's; returns the moved order."""
    moved = whole.within_segments(order)
    assert validate(whole.graph, Plan.from_order(whole.graph, moved)) == ()
    now = 0
    for o in moved:
        owner, local = whole.owners[o]
        if local is None:
            now = owner
        else:
            assert whole.segments[now][0] == owner
    orders = whole.cut(moved)
    for part, mine in zip(step.graphs, orders, strict=True):
        assert set(mine) == set(range(len(part.graph.ops)))
        assert mine.count(part.boundary) == 1
        evaluate(part.graph, Plan.from_order(part.graph, mine))
    assert sum(map(len, orders)) == sum(1 for o in moved if whole.owners[o][1] is not None) + len(step.graphs)
    return moved


def random_order(graph: Graph, rng: random.Random, again: float) -> list[int]:
    """A random order that keeps every rule of a graph, in which an op is computed again with a given probability."""
    before: list[set[int]] = [{graph.producer[v] for v in op.inputs} for op in graph.ops]
    for a, b in graph.order:
        before[b].add(a)
    last = {o: set(op.clobbered_by) for o, op in enumerate(graph.ops)}
    for o, by in last.items():
        for c in by:
            before[c].add(o)
    order, done = list[int](), set[int]()
    while len(done) < len(graph.ops):
        ready = [o for o in range(len(graph.ops)) if o not in done and before[o] <= done]
        repeated = [o for o in done if graph.ops[o].recomputable and not last[o] & done]
        order.append(rng.choice(sorted(repeated)) if repeated and rng.random() < again else rng.choice(ready))
        done.add(order[-1])
    return order
