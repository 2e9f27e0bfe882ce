"""One graph for a step that runs several captured graphs with eager code between them.

A script that a compiler cannot trace as one graph runs several: forward 0, forward 1, ..., backward 1, backward 0, with eager
code before, between and after them. Memory adds up over all of them: they are planned as one problem. Each captured graph keeps
its ops. An op of kind `BETWEEN` stands for the eager code of an *interval* between two *segments*, the runs of forwards and
backwards. This op reads the values that are alive there, and writes the values that eager code allocates or that the next
segment reads. Its workspace is the observed workspace of the eager code.

    forward 0 | between 1 | forward 1 | between 2 | backward 1 | between 3 | backward 0

The order of a plan is then cut into one order for each captured graph (`StepGraph.cut`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from checkmate.core.graph import Graph, Op, Value
from checkmate.core.plan import Fetch
from checkmate.torch.joint.capture import CapturedGraph

BETWEEN = "between"
"""Kind of an op that stands for the eager code between two segments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One run of the forward or the backward of a captured graph."""

    captured: int  # index of the graph
    backward: bool
    given: tuple[int | None, ...]  # storage of each input, or of each gradient of a result; None for other objects
    made: tuple[int | None, ...]  # storage of each output, or of each gradient of an input
    eager_bytes: int = 0  # peak bytes of eager code before this segment, besides the listed storages


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A storage that exists at the beginning or at the end of some segment."""

    size_bytes: int
    first: int | None = None  # the interval in which eager code allocated it; None if a segment made it or it is resident
    last: int = 0  # the last interval in which it is alive; the number of segments if it outlives the last one
    overwritten: int | None = None  # the first segment at whose end its content had changed; None if it never did
    # Whether it is freed before its last interval is over, such as outputs of the step before when a call returns. Earlier
    # allocations of eager code in that interval count among the bytes of the eager code.
    released: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStep:
    """A step as it ran."""

    graphs: tuple[CapturedGraph, ...]  # one that ran twice is two
    segments: tuple[Segment, ...]  # in the order in which they ran. Every graph has one forward and one backward
    storages: Mapping[int, Storage]  # that a segment was given or made, or that eager code held over segments, by identity
    resident_bytes: int  # that are allocated before, during and after the step
    eager_bytes: int = 0  # peak bytes of eager code after the last segment, besides the listed storages
    # Storages of gradients that are added to existing ones after their segment, and freed.
    accumulated: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepGraph:
    """The graph of an observed step."""

    graph: Graph
    owners: tuple[tuple[int, int | None], ...]  # for each op its captured graph and its op there; or an interval and None
    segments: tuple[tuple[int, bool], ...]  # captured graph of each segment, and whether it is a backward
    boundaries: tuple[int, ...]  # of each captured graph, as an op of that graph
    weights: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # values on the host: captured graph, value there

    def within_segments(self, order: Sequence[int | Fetch]) -> list[int | Fetch]:
        """An order in which every computation runs in a segment of the captured graph that it belongs to.

        A solver may move a computation into a segment of another graph. No rule ties this computation to a place, since every
        value that is handed on is tied to an interval. A computation that comes early or between segments moves to the beginning
        of the next segment of its graph. A computation after the last segment, such as a view of a gradient, moves to the end of
        that segment. Weights that are on the device when the step begins are so before all segments.
        """
        spans = [[w for w, (owner, _) in enumerate(self.segments) if owner == p] for p in range(len(self.boundaries))]
        # Ops between a release and the op of its interval belong to the segment before.
        opens = {owner: o for o, (owner, local) in enumerate(self.owners) if local is None}
        begun = {self.graph.producer[v] for v in self.weights}
        # Ops by segment: 0 eager code before it, 1 moved to its beginning, 2 in it, 3 moved to its end.
        placed: dict[tuple[int, int], list[int | Fetch]] = {}
        now = 0
        for o in order:
            owner, local = self._owner(o)
            if o in begun:
                at = -1, 0
            elif local is None:
                now = owner if o == opens[owner] else now
                at = owner, 0
            elif now in spans[owner]:
                at = now, 2
            elif now > spans[owner][-1]:
                at = spans[owner][-1], 3
            else:
                at = next(w for w in spans[owner] if w > now), 1
            placed.setdefault(at, []).append(o)
        return [o for at in sorted(placed) for o in (placed[at] if at[1] in (0, 2) else dict.fromkeys(placed[at]))]

    def _owner(self, o: int | Fetch) -> tuple[int, int | None]:
        """The captured graph of an op or a fetched value, and the op or value there; or an interval and None."""
        return self.weights[o.value] if isinstance(o, Fetch) else self.owners[o]

    def cut(self, order: Sequence[int | Fetch]) -> list[list[int | Fetch]]:
        """The order of each captured graph, its boundary included, from an order of `within_segments`."""
        found: list[list[int | Fetch]] = [[] for _ in self.boundaries]
        for o in order:
            owner, local = self._owner(o)
            if local is not None:
                found[owner].append(Fetch(local) if isinstance(o, Fetch) else local)
            elif owner < len(self.segments):
                opened, backward = self.segments[owner]
                if backward and (not found[opened] or found[opened][-1] != self.boundaries[opened]):
                    found[opened].append(self.boundaries[opened])
        return found


def step_graph(step: ObservedStep) -> StepGraph:
    """The graph of an observed step."""
    return _Stitcher(step, [_Stitched(p, captured) for p, captured in enumerate(step.graphs)]).stitch()


@dataclass(frozen=True, slots=True)
class _Alive:
    """A storage of the step that is alive between segments."""

    value: int  # the value that owns it
    first: int  # the first interval in which it is alive. It is read there, which ties its op to the segment before
    last: int


@dataclass(frozen=True, slots=True)
class _Stitched:
    """A captured graph in the graph of the step."""

    index: int
    captured: CapturedGraph
    values: dict[int, int] = field(default_factory=dict[int, int])  # its values
    ops: dict[int, int] = field(default_factory=dict[int, int])  # its ops
    handed: dict[int, int] = field(default_factory=dict[int, int])  # its inputs: values that an interval handed it

    def results(self, segment: Segment) -> Iterator[tuple[int, int]]:
        """Value and storage of each result of a segment that is a tensor."""
        values = self.captured.gradients if segment.backward else self.captured.returned
        for value, storage in zip(values, segment.made, strict=True):
            if value is not None and storage is not None:
                yield value, storage


@dataclass(eq=False)
class _Stitcher:
    """Builds a `StepGraph` segment by segment."""

    step: ObservedStep
    graphs: list[_Stitched]
    ops: list[Op] = field(default_factory=list[Op])
    values: list[Value] = field(default_factory=list[Value])
    order: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    owners: list[tuple[int, int | None]] = field(default_factory=list[tuple[int, int | None]])
    between: dict[int, int] = field(default_factory=dict[int, int])  # the op of each interval
    alive: dict[int, _Alive] = field(default_factory=dict[int, _Alive])  # by storage

    def stitch(self) -> StepGraph:
        step = self.step
        once = self._handed_out()
        for graph in self.graphs:
            for v, value in enumerate(graph.captured.graph.values):
                if value.on_host:
                    self._emit(graph, graph.captured.graph.producer[v], once)
        for w, segment in enumerate(step.segments):
            graph = self.graphs[segment.captured]
            self._interval(w)
            boundary, count = graph.captured.boundary, len(graph.captured.graph.ops)
            for o in range(boundary + 1, count) if segment.backward else range(boundary):
                if o not in graph.ops:
                    self._emit(graph, o, once)
            self._hold_results(w)
        self._interval(len(step.segments))
        self.order += pairwise(self.between.values())
        for graph in self.graphs:
            self._tie(graph)
        graph = Graph(
            ops=tuple(self.ops),
            values=tuple(self.values),
            order=tuple(sorted({(a, b) for a, b in self.order if a != b})),
            resident_bytes=step.resident_bytes,
            name="step",
        )
        return StepGraph(
            graph=graph,
            owners=tuple(self.owners),
            segments=tuple((segment.captured, segment.backward) for segment in step.segments),
            boundaries=tuple(captured.boundary for captured in step.graphs),
            weights={v: (g.index, local) for g in self.graphs for local, v in g.values.items() if self.values[v].on_host},
        )

    def _handed_out(self) -> set[tuple[int, int]]:
        """Captured graph and value of every result whose storage outlives its segment: it must be allocated once."""
        found: set[tuple[int, int]] = set()
        for w, segment in enumerate(self.step.segments):
            captured = self.step.graphs[segment.captured]
            for value, storage in self.graphs[segment.captured].results(segment):
                root = captured.graph.root[value]
                made_here = (captured.graph.producer[root] > captured.boundary) == segment.backward
                if made_here and storage not in self.step.accumulated and self.step.storages[storage].last > w:
                    found.add((segment.captured, root))
        return found

    def _root(self, value: int) -> int:
        base = self.values[value].base
        return value if base is None else base

    def _add_value(
        self, name: str, size_bytes: int, base: int | None = None, *, kept: bool = False, on_host: bool = False
    ) -> int:
        self.values.append(Value(name, 0 if base is not None else size_bytes, base=base, kept=kept, on_host=on_host))
        return len(self.values) - 1

    def _interval(self, w: int) -> None:
        """The eager code before a segment, or after the last one."""
        segments, storages = self.step.segments, self.step.storages
        segment = segments[w] if w < len(segments) else None
        released = [
            self.alive.pop(s).value for s, known in storages.items() if known.released and known.last == w and s in self.alive
        ]
        reads = {a.value: None for a in self.alive.values() if a.first == w or w <= a.last < len(segments)}
        if w and not segments[w - 1].backward:  # a result that shares the storage of another one has no other reader
            before = self.graphs[segments[w - 1].captured]
            results = [before.values[v] for v in before.captured.returned if v is not None]
            reads.update((v, None) for v in results if self._root(v) not in released)
        if released:
            self.order.append((len(self.ops), len(self.ops) + 1))
            self._emit_between(w, f"release {w}", (*reads, *released))
        writes: list[int] = []
        for storage, known in storages.items():
            if known.first == w:
                writes.append(self._add_value(f"eager {w}.{storage}", known.size_bytes, kept=known.last >= len(segments)))
                self.alive[storage] = _Alive(writes[-1], w, known.last)
        if segment is not None:
            writes += self._tangents(segment, reads, writes) if segment.backward else self._handoffs(segment, reads, writes)
        workspace = segment.eager_bytes if segment is not None else self.step.eager_bytes
        if 0 < w < len(segments) or reads or released or writes or workspace:
            self.between[w] = len(self.ops)
            self._emit_between(w, f"between {w}", tuple(reads), tuple(writes), workspace)

    def _emit_between(self, w: int, name: str, reads: tuple[int, ...], writes: tuple[int, ...] = (), workspace: int = 0) -> None:
        op = Op(name, reads, writes, cost=0, workspace_bytes=workspace, recomputable=False, phase="loss", kind=BETWEEN)
        self.ops.append(op)
        self.owners.append((w, None))

    def _handoffs(self, segment: Segment, reads: dict[int, None], fresh: Sequence[int]) -> list[int]:
        """Views of the storages that earlier segments and eager code hand to a forward.

        The op of an interval runs once: its view is of the instance that was handed over, whatever is computed again.
        """
        graph, views = self.graphs[segment.captured], dict[int, int]()
        for k, storage in enumerate(segment.given):
            held = self.alive.get(storage) if storage is not None else None
            if storage is None or held is None or not (graph.captured.readers[k] or k in graph.captured.views.values()):
                continue
            if storage not in views:
                if held.value not in fresh:
                    reads[held.value] = None
                views[storage] = self._add_value(f"handoff {graph.index}.{k}", 0, held.value)
            graph.handed[k] = views[storage]
        return list(views.values())

    def _tangents(self, segment: Segment, reads: dict[int, None], fresh: Sequence[int]) -> list[int]:
        """Gradients of the results of a graph; those that earlier segments and eager code made are handed on."""
        graph, made = self.graphs[segment.captured], list[int]()
        for value, storage in zip(graph.captured.tangents, segment.given, strict=True):
            if value is None:
                continue
            held = self.alive.get(storage) if storage is not None else None
            local = graph.captured.graph.values[value]
            base = None if held is None else held.value
            if base is not None and base not in fresh:
                reads[base] = None
            # A gradient that is handed on unchanged is kept if its storage outlives the step (`_hold_results`).
            kept = local.kept and value not in graph.captured.gradients
            made.append(self._add_value(f"{graph.index}.{local.name}", local.size_bytes, base, kept=kept))
            graph.values[value] = made[-1]
        return made

    def _emit(self, graph: _Stitched, o: int, once: set[tuple[int, int]]) -> None:
        captured, mine = graph.captured, graph.values
        op = captured.graph.ops[o]
        inputs = dict.fromkeys(mine[v] for v in op.inputs)
        inputs.update(dict.fromkeys(handed for k, handed in graph.handed.items() if o in captured.readers[k]))
        for v in op.outputs:
            local = captured.graph.values[v]
            base = None if local.base is None else self._root(mine[local.base])
            if base is None and captured.views.get(v) in graph.handed:
                base = self._root(graph.handed[captured.views[v]])
            mine[v] = self._add_value(f"{graph.index}.{local.name}", local.size_bytes, base, on_host=local.on_host)
        single = any((graph.index, v) in once for v in op.outputs if captured.graph.values[v].base is None)
        graph.ops[o] = len(self.ops)
        self.ops.append(
            msgspec.structs.replace(
                op,
                name=f"{graph.index}.{op.name}",
                inputs=tuple(inputs),
                outputs=tuple(mine[v] for v in op.outputs),
                recomputable=op.recomputable and not single,
                clobbered_by=(),
            )
        )
        self.owners.append((graph.index, o))

    def _hold_results(self, w: int) -> None:
        """Note the results of a segment: those that outlive the step are kept, the others held until their last segment."""
        step, graph = self.step, self.graphs[self.step.segments[w].captured]
        for value, storage in graph.results(step.segments[w]):
            if storage not in self.alive:
                root = self._root(graph.values[value])
                last = w + 1 if storage in step.accumulated else step.storages[storage].last
                if last >= len(step.segments) and storage not in step.accumulated:
                    self.values[root] = msgspec.structs.replace(self.values[root], kept=True)
                self.alive[storage] = _Alive(root, w + 1, last)

    def _tie(self, graph: _Stitched) -> None:
        """Add order pairs and clobbering of a captured graph, with intervals for its boundary, and pairs that order segments.

        No pair touches an op that only makes views: a pair ties the op to its place, and the solver can no longer fold it into
        its readers. With pairs on every op of a segment the gap proven for a language model in two graphs rose from 0.1 % to 6 %.
        """
        captured = graph.captured
        forward, backward = (
            next(w for w, s in enumerate(self.step.segments) if s.captured == graph.index and s.backward == back)
            for back in (False, True)
        )
        start, closes, opens = self.between.get(forward), self.between[forward + 1], self.between[backward]
        closing, opening = graph.ops | {captured.boundary: closes}, graph.ops | {captured.boundary: opens}
        self.order += [(opening[a], closing[b]) for a, b in captured.graph.order]
        overwritten = self._readers_of_overwritten(captured, forward, backward)
        # Values that are there before the segment: weights, and views of inputs of the graph alone.
        free = {v for v, value in enumerate(captured.graph.values) if value.on_host}
        for o, here in graph.ops.items():
            op = captured.graph.ops[o]
            later = {closing[c] for c in op.clobbered_by}
            if o < captured.boundary:
                # An op that reads neither another op nor an earlier segment could run at any time before.
                if free.issuperset(op.inputs) and free.isdisjoint(op.outputs):
                    if not any(captured.graph.values[v].size_bytes for v in op.outputs):
                        free.update(op.outputs)
                    elif start is not None:
                        self.order.append((start, here))
                later |= {closes} if o in overwritten else set()
            if later:
                self.ops[here] = msgspec.structs.replace(self.ops[here], clobbered_by=tuple(sorted(later)))

    def _readers_of_overwritten(self, captured: CapturedGraph, forward: int, backward: int) -> set[int]:
        """Ops that read an input, itself or a view of it, that is overwritten before the backward begins."""
        changed = set[int]()
        for k, storage in enumerate(self.step.segments[forward].given):
            at = self.step.storages[storage].overwritten if storage is not None else None
            if at is not None and forward < at < backward:
                changed.add(k)
        found = {o for k in changed for o in captured.readers[k]}
        if changed:
            ops = enumerate(captured.graph.ops)
            found |= {o for o, op in ops if any(captured.views.get(v) in changed for v in op.inputs)}
        return found
