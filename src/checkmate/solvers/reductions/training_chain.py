"""Training chains: forward ops in a row, and a rest that reads them back from the last to the first."""

from __future__ import annotations

from dataclasses import dataclass

from checkmate.core.graph import Graph
from checkmate.core.problem import Problem


@dataclass(frozen=True, slots=True)
class TrainingChain:
    """A graph as layers 1..n and steps 1..K-1, which run once each, in order, after the last layer.

    Layer i reads the value of layer i - 1 and nothing else. Step 0 is the end of the forward pass: it reads
    the last layer and does nothing. Any other step reads values of steps before it and, of
    all layers that are read by it or later, only the value of the highest and of the one below.

    That is how gradients of layers read: the gradient of layer i needs the values of layers i and i - 1. Beaumont et al. (2019)
    have one step for each layer; steps that read no layer, or the same layer again, are admitted here.

    Attributes:
        layers: Ops of the layers, with an unused entry for layer 0, the input of the chain. Shape ``[layer + 1]``.
        sizes: Bytes of each layer's value. Shape ``[layer + 1]``.
        workspaces: Workspace of each layer. Shape ``[layer + 1]``.
        costs: Cost of each layer. Shape ``[layer + 1]``.
        steps: Ops of the steps, with an unused entry for step 0. Shape ``[step]``.
        reads: Layers whose values each step reads. Shape ``[step]``.
        before: Bytes of steps' values held when a step begins. Shape ``[step]``.
        during: The same while it runs, its outputs and workspace included. Shape ``[step]``.
        top: Highest layer read by a step or after it, 0 for none. Shape ``[step + 1]``.
        below: Highest layer under ``top`` read by a step or after it, 0 for none. Shape ``[step]``.
    """

    layers: tuple[int, ...]
    sizes: tuple[int, ...]
    workspaces: tuple[int, ...]
    costs: tuple[int, ...]
    steps: tuple[int, ...]
    reads: tuple[frozenset[int], ...]
    before: tuple[int, ...]
    during: tuple[int, ...]
    top: tuple[int, ...]
    below: tuple[int, ...]

    @classmethod
    def of(cls, problem: Problem) -> TrainingChain | str:
        """The chain of a problem, or the reason in words why it is not one.

        Args:
            problem: A problem whose views are folded.
        """
        if any(value.base is not None for value in problem.graph.values):
            return "a view is tied to its place"
        row = _row(problem)
        longest = cls._with(problem, row)
        # The loss reads one value, like a layer. Taken as one, the first gradient may read a layer too many; so rows without
        # their last ops are tried as well.
        shorter = (cls._with(problem, row[:count]) for count in range(len(row) - 1, 0, -1))
        return longest if not isinstance(longest, str) else next((c for c in shorter if not isinstance(c, str)), longest)

    @classmethod
    def _with(cls, problem: Problem, row: list[int]) -> TrainingChain | str:
        """The chain with some ops as its layers."""
        graph = problem.graph
        layer_of = {graph.ops[o].outputs[0]: i for i, o in enumerate(row, start=1)}
        # All other ops are steps, which run once in the given order: the class of plans that the program is exact in.
        steps = range(len(row), len(graph.ops))
        reads = [frozenset(layer_of[v] for v in graph.ops[o].inputs if v in layer_of) for o in steps]
        if not row:
            return "no op reads back what a row of forward ops has made"
        for o, read in zip(steps, reads, strict=True):
            if graph.ops[o].phase == "forward" and read - {len(row)}:
                return f"forward op {o} ({graph.ops[o].name!r}) reads layer {min(read)} of {len(row)}"
            if _is_lost_layer(problem, o):
                return f"forward op {o} ({graph.ops[o].name!r}) is no layer, and the backward pass reads it"
        reads.insert(0, frozenset({len(row)}))
        # From the last step back: the highest layer still to be read, and the highest one under it.
        top, below = [0], list[int]()
        for read in reversed(reads):
            highest = max(top[-1], max(read, default=0))
            if read - {highest, highest - 1}:
                return f"layer {min(read)} is read before layer {highest} has been read for the last time"
            rest = {top[-1], below[-1] if below else 0} | read
            below.append(max((i for i in rest if i < highest), default=0))
            top.append(highest)
        before, during = _bytes_of_steps(graph, list(steps))
        sizes = [graph.values[graph.ops[o].outputs[0]].size_bytes for o in row]
        return cls(
            layers=(-1, *row),
            sizes=(0, *sizes),
            workspaces=(0, *(graph.ops[o].workspace_bytes for o in row)),
            costs=(0, *(graph.ops[o].cost for o in row)),
            steps=(-1, *steps),
            reads=tuple(reads),
            before=(0, *before),
            during=(0, *during),
            top=tuple(reversed(top)),
            below=tuple(reversed(below)),
        )

    def end(self, layer: int) -> int:
        """First step from which on nothing above a layer is read; for layer 0 the one after the last.

        Args:
            layer: The layer.
        """
        if not layer:
            return len(self.steps)
        return next(k for k, top in enumerate(self.top) if top <= layer)


def _row(problem: Problem) -> list[int]:
    """Ops from the first on that each read just the one before and may run again, up to the last that is read back."""
    graph = problem.graph
    row: list[int] = []
    for o, op in enumerate(graph.ops):
        again = op.recomputable and (problem.recompute == "all" or op.phase == "forward")
        plain = again and len(op.outputs) == 1 and not op.clobbered_by and not op.replay_bytes
        before = graph.ops[row[-1]].outputs if row else ()
        if not plain or graph.values[op.outputs[0]].kept or tuple(dict.fromkeys(op.inputs)) != before:
            break
        row.append(o)
    # Layers at the end of the row that only layers read are not read back: they are steps.
    while row and all(r in row for r in graph.readers[graph.ops[row[-1]].outputs[0]]):
        row.pop()
    return row


def _is_lost_layer(problem: Problem, o: int) -> bool:
    """Whether a step is a forward op that could be dropped and computed again, which steps never are."""
    graph, op = problem.graph, problem.graph.ops[o]
    if op.phase != "forward" or not op.recomputable:
        return False
    dropped = [v for v in op.outputs if graph.values[v].size_bytes and not graph.values[v].kept]
    return any(graph.ops[r].phase == "backward" for v in dropped for r in graph.readers[v])


def _bytes_of_steps(graph: Graph, steps: list[int]) -> tuple[list[int], list[int]]:
    """Bytes of steps' values before and during each step."""
    last = {v: max(graph.readers[v], default=o) for o in steps for v in graph.ops[o].outputs}
    before: list[int] = []
    during: list[int] = []
    held = 0
    for o in steps:
        op = graph.ops[o]
        before.append(held)
        held += sum(graph.values[v].size_bytes for v in op.outputs)
        during.append(held + op.workspace_bytes)
        gone = {v for v in (*op.inputs, *op.outputs) if last.get(v) == o and not graph.values[v].kept}
        held -= sum(graph.values[v].size_bytes for v in gone)
    return before, during
