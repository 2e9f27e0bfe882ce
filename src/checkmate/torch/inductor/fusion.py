"""Ops that Inductor fuses: the contraction of a captured graph by them, and the peak of a plan with fused ops."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import torch
from torch import fx

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Plan
from checkmate.solvers.reductions.contract_chains import ContractChains, FusibleKinds
from checkmate.studies.lifetimes import StorageLifetime, storage_lifetimes
from checkmate.torch._compat.aot import fusible_packets

_REDUCTIONS = ("sum", "mean", "amax", "amin", "max", "min", "var", "var_mean", "std", "any", "argmax", "argmin", "prod")
"""Reductions in the list of fusible packets of torch's partitioner, which does not separate them from pointwise ops."""

_OVER_ROWS = frozenset(f"aten.{name}" for name in (*_REDUCTIONS, "gather"))
"""Ops that Inductor fuses with loops over rows if they reduce rows, or pick from them."""

_POINTWISE = ("prims.inductor_random", "prims.inductor_lookup_seed", "prims.inductor_force_stride_order", "aten.constant_pad_nd")
"""Pointwise ops that Inductor fuses and that torch's list does not contain."""

_LIGHT = (
    "aten.abs", "aten.add", "aten.arange", "aten.clamp_max", "aten.clamp_min", "aten.eq", "aten.full", "aten.ge", "aten.gt",
    "aten.le", "aten.logical_and", "aten.logical_not", "aten.logical_or", "aten.lt", "aten.maximum", "aten.minimum", "aten.mul",
    "aten.ne", "aten.neg", "aten.relu", "aten.scalar_tensor", "aten.sub", "aten.where", "prims.convert_element_type",
    "prims.iota",
)  # fmt: skip
"""Pointwise ops that take one instruction for each number, or two."""


def contract_fusible_chains(graph: Graph, trailing: Collection[int] = ()) -> ContractChains:
    """Contract every chain of ops that Inductor computes in one kernel; see `ContractChains.of`.

    Examples:
        >>> from checkmate.core.graph import Op, Value
        >>> x, y, z = Value("x", 400), Value("y", 400), Value("z", 4, kept=True)
        >>> mul, exp = Op("mul", (0,), (1,), 10, kind="aten.mul.Tensor"), Op("sum", (1,), (2,), 10, kind="aten.sum.default")
        >>> chains = contract_fusible_chains(Graph((Op("mm", (), (0,), 50, kind="aten.mm.default"), mul, exp), (x, y, z)))
        >>> [op.name for op in chains.contracted.ops], chains.parts
        (['mm', 'sum'], ((0,), (1, 2)))
    """
    return ContractChains.of(graph, _fusible_kinds(graph), trailing)


def trailing_reductions(nodes: Iterable[fx.Node | None]) -> frozenset[int]:
    """Positions of the nodes that reduce the last dimensions of a tensor, or all of them.

    Their loops run over rows like the loops of pointwise ops around them: Inductor fuses both.
    """
    return frozenset(o for o, node in enumerate(nodes) if node is not None and _reduces_last(node))


def predicted_peak(chains: ContractChains, order: Sequence[int]) -> int:
    """Predicted peak of the code of a plan, above resident memory, before the code is generated.

    In addition to the account of `simulate`, Inductor fuses *runs* of ops without another library's kernel between them: a value
    that is computed and read only inside a run is not stored. The result of a pointwise op is written over an operand of the
    same size that dies there.

    Examples:
        >>> from checkmate.core.graph import Op, Value
        >>> kinds = ("aten.mm.default", "aten.exp.default", "aten.mm.default")
        >>> values = (Value("x", 400), Value("y", 400), Value("z", 4, kept=True))
        >>> graph = Graph(tuple(Op(k, (i - 1,) if i else (), (i,), 10, kind=k) for i, k in enumerate(kinds)), values)
        >>> predicted_peak(contract_fusible_chains(graph), (0, 1, 2))
        404
    """
    graph = chains.contracted
    plan = Plan.from_order(graph, order)
    kinds = _fusible_kinds(graph)
    runs = _Runs(graph, plan, kinds)
    stored, fused = [], []
    for life in storage_lifetimes(graph, plan):
        (fused if runs.contain(life, chains.rows) else stored).append(life)
    until: dict[int, int] = {}  # steps that store nothing, to the step of their kernel
    for life in sorted(fused, key=lambda life: -life.made_at):
        last = runs.reads(life)[-1]
        until[life.made_at] = max(until.get(life.made_at, 0), until.get(last, last))
    dying: dict[tuple[int, int], list[int]] = {}  # by the step that reads a storage last, and its size
    for at, life in enumerate(stored):
        reads = runs.reads(life)
        if life.gone_at <= len(plan.steps) and reads:
            last = until.get(reads[-1], reads[-1])
            stored[at] = life._replace(gone_at=max(life.gone_at, last + 1))
            # A pointwise op that stores nothing is part of its readers.
            if last == reads[-1] or runs.pointwise(reads[-1]):
                dying.setdefault((last, graph.values[life.value].size_bytes), []).append(at)
    ends = [life.gone_at for life in stored]
    for life in stored:
        over = dying.get((life.made_at, graph.values[life.value].size_bytes))
        if over and runs.pointwise(life.made_at):
            ends[over.pop()] = life.made_at
    change = np.zeros(len(plan.steps) + 2, dtype=np.int64)
    for end, life in zip(ends, stored, strict=True):
        change[life.made_at] += graph.values[life.value].size_bytes
        change[end] -= graph.values[life.value].size_bytes
    workspace = [graph.ops[s.op].workspace_bytes if isinstance(s, Compute) else 0 for s in plan.steps]
    return int((np.cumsum(change[: len(workspace)]) + workspace).max(initial=0))


def ns_per_byte(graph: Graph) -> float:
    """Cost of reading or writing a byte, from the costs of the pointwise ops of a graph."""
    pointwise = _fusible_kinds(graph).pointwise
    ops = [op for op in graph.ops if op.kind in pointwise]
    moved = sum(graph.values[graph.root[v]].size_bytes for op in ops for v in (*op.inputs, *op.outputs))
    return sum(op.cost for op in ops) / max(1, moved)


class _Runs:
    """Computations that follow each other without a kernel of another library between them."""

    def __init__(self, graph: Graph, plan: Plan, kinds: FusibleKinds) -> None:
        self._graph, self._plan, self._kinds = graph, plan, kinds
        self._run: dict[int, int] = {}  # step to the number of its run
        self._views = set[int]()  # steps that make views
        fusible, run = kinds.pointwise | kinds.reductions, 0
        for p, step in enumerate(plan.steps):
            if not isinstance(step, Compute):
                continue
            op = graph.ops[step.op]
            if op.outputs and all(graph.values[v].base is not None for v in op.outputs):
                self._views.add(p)
            if op.kind in fusible:
                self._run[p] = run
            elif p not in self._views:
                run += 1

    def reads(self, life: StorageLifetime) -> list[int]:
        """Steps that read a storage, without steps that make views."""
        return [p for p in life.reads if p not in self._views]

    def pointwise(self, step: int) -> bool:
        """Whether a step computes a pointwise op."""
        run = self._plan.steps[step]
        return isinstance(run, Compute) and self._graph.ops[run.op].kind in self._kinds.pointwise

    def contain(self, life: StorageLifetime, rows: Collection[int]) -> bool:
        """Whether a storage is written and read inside one run, by ops whose loops are fused."""
        run, reads = self._run.get(life.made_at), self.reads(life)
        if run is None or not reads or life.gone_at > len(self._plan.steps):
            return False
        if any(self._run.get(p) != run for p in reads) or life.reads[-1] in self._views:
            return False
        readers = [step.op for step in map(self._plan.steps.__getitem__, reads) if isinstance(step, Compute)]
        return all(o in rows or self._graph.ops[o].kind not in self._kinds.reductions for o in readers)


def _reduces_last(node: fx.Node) -> bool:
    source = next(iter(node.all_input_nodes), None)
    tensor = None if source is None else source.meta.get("val")
    if not isinstance(tensor, torch.Tensor) or str(getattr(node.target, "overloadpacket", "")) not in _OVER_ROWS:
        return False
    dims = node.args[1] if len(node.args) > 1 else None
    if dims is None or not tensor.ndim:
        return True
    chosen = [dims] if isinstance(dims, int) else dims
    if not isinstance(chosen, Sequence) or not all(isinstance(d, int) for d in chosen):
        return False
    reduced = sorted({int(d) % tensor.ndim for d in chosen})  # type: ignore[call-overload]
    return not reduced or reduced == list(range(tensor.ndim - len(reduced), tensor.ndim))


def _fusible_kinds(graph: Graph) -> FusibleKinds:
    pointwise, reductions = _fusible_packets()
    kinds = {op.kind: op.kind.rsplit(".", 1)[0] for op in graph.ops}  # "aten.mul.Tensor", an overload of the packet "aten.mul"
    return FusibleKinds(
        pointwise=frozenset(kind for kind, packet in kinds.items() if packet in pointwise),
        reductions=frozenset(kind for kind, packet in kinds.items() if packet in reductions),
        light=frozenset(kind for kind, packet in kinds.items() if packet in _LIGHT and packet in pointwise),
    )


@functools.cache
def _fusible_packets() -> tuple[frozenset[str], frozenset[str]]:
    """Packets of the pointwise ops, and of the reductions, that Inductor fuses."""
    fusible = {str(packet) for packet in fusible_packets() if isinstance(packet, torch._ops.OpOverloadPacket)}
    reductions = {packet for packet in fusible if packet.split(".")[-1] in _REDUCTIONS}
    return frozenset((fusible - reductions) | set(_POINTWISE)), frozenset(reductions)
