"""The dataflow graph of one training step: ops that read and write values."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Final, Literal, get_args

import msgspec

from checkmate.core.errors import GraphError, shortened
from checkmate.core.units import format_bytes

_MOST = 2**60
Phase = Literal["forward", "loss", "backward", "optimizer"]

BOUNDARY = "boundary"
"""Kind of the op between forward and backward, which reads the forward's outputs and writes their gradients (tangents)."""


class Op(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One operation. Inputs and outputs are indices of values; what is resident is not listed.

    Attributes:
        name: Name for people, unique or not.
        inputs: Values it reads.
        outputs: Values it writes, all of them at every computation.
        cost: Cost of one computation, in the graph's ``cost_unit``.
        workspace_bytes: Bytes that live only while it runs.
        replay_bytes: Bytes (a random generator's state) held from its first to its last
            computation if it is computed more than once.
        recomputable: False for what must run exactly once: mutations, collectives, effects.
        clobbered_by: Ops that overwrite what it reads: it is never computed after one of them.
        phase: ``"forward"``, ``"loss"``, ``"backward"`` or ``"optimizer"``.
        kind: What it computes, such as ``aten.mm.default``.
        source: Where it comes from: module path, file and line, or both.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cost: int
    workspace_bytes: int = 0
    replay_bytes: int = 0
    recomputable: bool = True
    clobbered_by: tuple[int, ...] = ()
    phase: Phase = "forward"
    kind: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("name", "kind", "source"):
            msgspec.structs.force_setattr(self, field, shortened(getattr(self, field)))
        for field in ("inputs", "outputs", "clobbered_by"):
            _set_indices(self, field)
        for field in ("cost", "workspace_bytes", "replay_bytes"):
            _set_amount(self, field)
        if self.phase not in get_args(Phase):
            raise GraphError(f"op {self.name!r}: phase {self.phase!r} is not one of {', '.join(get_args(Phase))}")


class Value(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One result of an op.

    Attributes:
        name: Name for people.
        size_bytes: Bytes newly allocated for it; 0 for a view.
        base: For a view, the value whose storage it shares, else None.
        kept: Whether it must be live at the end: losses, gradients, updated buffers.
        on_host: Whether the host has a copy of it before, during and after the step, as of frozen weights. It is the only output
            of an op without inputs and cost. A plan computes this op if the value is on the device when the step begins. The
            value is then ``kept``: the next step begins alike. Otherwise the plan fetches it before each use, and it need not
            be there at the end.
    """

    name: str
    size_bytes: int
    base: int | None = None
    kept: bool = False
    on_host: bool = False

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "name", shortened(self.name))
        msgspec.structs.force_setattr(self, "kept", self.kept or self.on_host)
        _set_amount(self, "size_bytes")
        if self.base is not None:
            msgspec.structs.force_setattr(self, "base", operator.index(self.base))
            if self.size_bytes:
                raise GraphError(
                    f"value {self.name!r} is a view of value {self.base} and claims {self.size_bytes} bytes itself",
                    hint="a view allocates nothing: give it size_bytes=0, or no base",
                )


SHOWN: Final = 8
"""Most ops of a graph, or steps of a plan, that are printed. Larger ones are only summarised, to fit a screen."""


class Graph(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """A DAG of ops and values in a valid topological order.

    Attributes:
        ops: The ops, in an order in which they can run.
        values: The values; each is an output of exactly one op.
        order: Pairs (a, b) of ops: the first computation of a comes before the first of b. Pairs that put the ops of values
            on the host before all ops that allocate are added.
        resident_bytes: Bytes there before and after that no plan can change.
        cost_unit: Unit of the costs.
        name: Name for people.

    Raises:
        GraphError: A value that no op or more than one op makes, an op that reads what a later op
            makes, a view without its base among what its op reads, a negative or fractional
            amount, or an order that the listing itself breaks.

    Examples:
        >>> a, b = Value("a", 4), Value("b", 2, kept=True)
        >>> graph = Graph((Op("f", (), (0,), cost=3), Op("g", (0,), (1,), cost=5)), (a, b))
        >>> graph.cost, graph.producer
        (8, (0, 1))
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    order: tuple[tuple[int, int], ...] = ()
    resident_bytes: int = 0
    cost_unit: str = "ns"
    name: str = ""

    def __post_init__(self) -> None:
        for field in ("cost_unit", "name"):
            msgspec.structs.force_setattr(self, field, shortened(getattr(self, field)))
        for field in ("ops", "values"):
            msgspec.structs.force_setattr(self, field, tuple(getattr(self, field)))
        msgspec.structs.force_setattr(self, "order", tuple((operator.index(a), operator.index(b)) for a, b in self.order))
        _set_amount(self, "resident_bytes")
        _check_totals(self)
        _check_ops(self)
        _check_views(self)
        msgspec.structs.force_setattr(self, "order", _host_values_first(self))
        _check_order(self)

    def __repr__(self) -> str:
        if len(self.ops) <= SHOWN:
            return super().__repr__()
        counts = f"{len(self.ops):,} ops, {len(self.values):,} values"
        return f"<Graph {self.name!r}: {counts}, {format_bytes(self.resident_bytes)} resident, {self.digest[:15]}>"

    @classmethod
    def from_dag(
        cls,
        *,
        cost: Sequence[int],
        size_bytes: Sequence[int],
        edges: Iterable[tuple[int, int]],
        backward: Sequence[bool] | None = None,
        resident_bytes: int = 0,
        names: Sequence[str] | None = None,
        kept: Iterable[int] = (),
        name: str = "",
    ) -> Graph:
        """Graph of one-op-one-value nodes, as in Jain et al. (2020).

        Args:
            cost: Cost of each node. Shape ``[node]``.
            size_bytes: Bytes of each node's output. Shape ``[node]``.
            edges: Pairs (u, v): v reads u. Every u < v.
            backward: Whether each node belongs to the backward pass; none does by default.
            resident_bytes: Bytes of parameters and other memory that is always allocated.
            names: Name of each node; its index by default.
            kept: Nodes whose values must be live at the end.
            name: Name of the graph.

        Raises:
            GraphError: Lengths differ, or an edge does not go from a lower to a higher node.

        Examples:
            >>> chain = Graph.from_dag(cost=[1, 1, 2], size_bytes=[4, 4, 4], edges=[(0, 1), (1, 2)])
            >>> chain.ops[2].inputs
            (1,)
        """
        count = len(cost)
        labels = [str(i) for i in range(count)] if names is None else list(names)
        phases: list[bool] = [False] * count if backward is None else list(backward)
        if not count == len(size_bytes) == len(labels) == len(phases):
            raise GraphError(
                f"cost, size_bytes, names, backward describe {count}, {len(size_bytes)}, {len(labels)}, {len(phases)} nodes",
                hint="give each of them one entry a node",
            )
        inputs: list[set[int]] = [set() for _ in range(count)]
        for u, v in edges:
            if not 0 <= u < v < count:
                raise GraphError(
                    f"edge ({u}, {v}) does not go from a lower to a higher node of 0..{count - 1}",
                    hint="number the nodes in a topological order; a cycle has none",
                )
            inputs[v].add(operator.index(u))
        keep = set(kept)
        return cls(
            ops=tuple(
                Op(labels[i], tuple(sorted(inputs[i])), (i,), cost[i], phase="backward" if phases[i] else "forward")
                for i in range(count)
            ),
            values=tuple(Value(labels[i], size_bytes[i], kept=i in keep) for i in range(count)),
            resident_bytes=resident_bytes,
            name=name,
        )

    @cached_property
    def producer(self) -> tuple[int, ...]:
        """Op that makes each value. Shape ``[value]``."""
        made = [-1] * len(self.values)
        for o, op in enumerate(self.ops):
            for v in op.outputs:
                made[v] = o
        return tuple(made)

    @cached_property
    def root(self) -> tuple[int, ...]:
        """Value that owns the storage of each value: itself unless it is a view. Shape ``[value]``."""
        unknown, on_path = -1, -2
        roots = [unknown] * len(self.values)
        for v in range(len(roots)):
            path: list[int] = []
            u = v
            while roots[u] == unknown:
                roots[u] = on_path
                path.append(u)
                base = self.values[u].base
                if base is None:
                    roots[u] = u
                elif not 0 <= base < len(roots) or roots[base] == on_path:
                    raise GraphError(f"value {v} ({self.values[v].name!r}) is a view of value {base}, which is no other value")
                else:
                    u = base
            for w in path:
                roots[w] = roots[u]
        return tuple(roots)

    @cached_property
    def storage_from(self) -> tuple[int, ...]:
        """Value whose storage instance a new instance of each value shares: itself unless it is a view. Shape ``[value]``.

        For a view, this is its base if its op reads the base or allocates it. Otherwise it is the first value with the same
        storage that its op reads, since a view of a view may name the owner of the storage as its base. If the op also makes
        the base, as a view, both views share one storage instance; the order of the op's outputs does not matter.
        """
        found = list(range(len(self.values)))
        for o, op in enumerate(self.ops):
            left = {v for v in op.outputs if self.values[v].base is not None}
            if not left:
                continue
            inputs = set(op.inputs)
            read = {self.root[v]: v for v in reversed(op.inputs)}
            for v in op.outputs:
                path: list[int] = []
                u = v
                while u in left:
                    left.discard(u)
                    path.append(u)
                    base = self.values[u].base
                    assert base is not None
                    u = base
                if path:
                    source = found[u] if self.producer[u] == o else u if u in inputs else read[self.root[u]]
                    for view in path:
                        found[view] = source
        return tuple(found)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Ops that read each value, ascending. Shape ``[value]`` of tuples."""
        ops: list[list[int]] = [[] for _ in self.values]
        for o, op in enumerate(self.ops):
            for v in dict.fromkeys(op.inputs):
                ops[v].append(o)
        return tuple(tuple(r) for r in ops)

    @cached_property
    def view_ops(self) -> frozenset[int]:
        """Ops that only make views of one storage, from its owner or from other free views, and that no rule ties to a place.

        They compute nothing, so a plan may move and repeat them freely.
        """
        tied = {o for pair in self.order for o in pair} | {c for op in self.ops for c in op.clobbered_by}
        free: set[int] = set()
        for o, op in enumerate(self.ops):
            plain = all(self.values[v].base is None or self.producer[v] in free for v in op.inputs)
            if plain and o not in tied and self._only_views(op):
                free.add(o)
        return frozenset(free)

    @cached_property
    def boundary(self) -> int | None:
        """Op between forward and backward, the only one whose kind is `BOUNDARY`; None in the graph of a whole step."""
        found = [o for o, op in enumerate(self.ops) if op.kind == BOUNDARY]
        return found[0] if len(found) == 1 else None

    @property
    def cost(self) -> int:
        """Cost of computing every op once."""
        return sum(op.cost for op in self.ops)

    def overhead(self, cost: float) -> float:
        """A cost divided by that of computing every op once; 1 if all ops are free.

        Examples:
            >>> Graph.from_dag(cost=[3, 5], size_bytes=[1, 1], edges=[(0, 1)]).overhead(12)
            1.5
        """
        return cost / self.cost if self.cost else 1.0

    @cached_property
    def digest(self) -> str:
        """Hash of everything that determines whether a plan is valid and its bytes: not of costs, names or resident bytes."""
        return self._hash(resident_bytes=0)

    def has_digest(self, digest: str) -> bool:
        """Whether a digest belongs to this graph. In older files the digest includes resident bytes."""
        return digest == self.digest or digest == self._hash(self.resident_bytes)

    def _hash(self, resident_bytes: int) -> str:
        facts = (
            resident_bytes,
            self.order,
            [(o.inputs, o.outputs, o.workspace_bytes, o.replay_bytes, o.recomputable, o.clobbered_by, o.kind) for o in self.ops],
            [(v.size_bytes, v.base, v.kept, *(["on_host"] if v.on_host else [])) for v in self.values],
        )
        return "sha256:" + hashlib.sha256(msgspec.json.encode(facts)).hexdigest()

    @cached_property
    def structure(self) -> str:
        """Hash like `digest`, without resident bytes and workspace, which depend on the process."""
        ops = tuple(msgspec.structs.replace(op, workspace_bytes=0) for op in self.ops)
        return msgspec.structs.replace(self, ops=ops).digest

    def _only_views(self, op: Op) -> bool:
        if not op.inputs or not op.outputs or not op.recomputable or op.clobbered_by or op.workspace_bytes or op.replay_bytes:
            return False
        one_storage = len({self.root[v] for v in (*op.inputs, *op.outputs)}) == 1
        return one_storage and all(self.values[v].base is not None for v in op.outputs)


def _set_indices(owner: Op, field: str) -> None:
    try:
        indices = tuple(operator.index(i) for i in getattr(owner, field))
    except TypeError:
        raise GraphError(f"op {owner.name!r}: {field}={getattr(owner, field)!r} are not indices") from None
    msgspec.structs.force_setattr(owner, field, indices)


def _set_amount(owner: Op | Value | Graph, field: str) -> None:
    amount = getattr(owner, field)
    try:
        whole = operator.index(amount)
    except TypeError:
        raise GraphError(
            f"{type(owner).__name__} {owner.name!r}: {field}={amount!r} is not an integer",
            hint="sizes are exact bytes and costs whole units: round them first",
        ) from None
    if whole < 0 or isinstance(amount, bool):
        raise GraphError(f"{type(owner).__name__} {owner.name!r}: {field}={amount!r} must be zero or more")
    msgspec.structs.force_setattr(owner, field, whole)


def _check_totals(graph: Graph) -> None:
    """Check that the sums of all bytes and of all costs fit in 64 bits, which the memory accounts and searches use."""
    amounts = [value.size_bytes for value in graph.values]
    for op in graph.ops:
        amounts += (op.workspace_bytes, op.replay_bytes)
    total = graph.resident_bytes + sum(amounts)
    if total > _MOST:
        raise GraphError(
            f"the sizes of graph {graph.name!r} sum to {total} bytes, more than the {_MOST} that are counted exactly",
            hint="sizes are in bytes: check their unit",
        )
    cost = sum(op.cost for op in graph.ops)
    if cost > _MOST:
        raise GraphError(
            f"the costs of graph {graph.name!r} sum to {cost}, more than the {_MOST} that are counted exactly",
            hint="use a larger unit for costs, and name it in cost_unit",
        )


def _check_ops(graph: Graph) -> None:
    made: dict[int, int] = {}
    for o, op in enumerate(graph.ops):
        for v in op.inputs:
            if v not in made:
                what = "does not exist" if not 0 <= v < len(graph.values) else "no earlier op makes"
                raise GraphError(
                    f"op {o} ({op.name!r}) reads value {v}, which {what}",
                    hint="list the ops in a topological order; a cycle has none",
                )
        for v in op.outputs:
            if not 0 <= v < len(graph.values):
                raise GraphError(f"op {o} ({op.name!r}) writes value {v} of {len(graph.values)}")
            if v in made:
                raise GraphError(f"value {v} ({graph.values[v].name!r}) is written by op {made[v]} and op {o}")
            made[v] = o
    for v, value in enumerate(graph.values):
        if v not in made:
            raise GraphError(
                f"value {v} ({value.name!r}) is written by no op",
                hint="count memory that exists before the step in resident_bytes, and list no value for it",
            )


def _check_views(graph: Graph) -> None:
    roots = graph.root
    for o, op in enumerate(graph.ops):
        views = [v for v in op.outputs if graph.values[v].base is not None]
        if not views:
            continue
        read = {roots[u] for u in op.inputs}
        for v in views:
            name, base = graph.values[v].name, graph.values[v].base
            if base is not None and graph.producer[base] != o and roots[v] not in read:
                raise GraphError(
                    f"value {v} ({name!r}) is a view of value {base}, whose storage its op {op.name!r} does not read",
                    hint="let the op of a view read its base or another view of it",
                )


def _host_values_first(graph: Graph) -> tuple[tuple[int, int], ...]:
    """The graph's order, by which ops of values on the host also come before each op that allocates: what they make is there."""
    first = [graph.producer[v] for v, value in enumerate(graph.values) if value.on_host]
    if not first:
        return graph.order
    for op, v in ((graph.ops[o], v) for v, o in enumerate(graph.producer) if graph.values[v].on_host):
        tied = op.inputs or op.cost or op.workspace_bytes or op.replay_bytes or op.recomputable or op.clobbered_by
        if tied or op.outputs != (v,) or graph.values[v].base is not None:
            raise GraphError(
                f"op {op.name!r} makes a value on the host, and it reads, costs or makes something else, or may run again",
                hint="give the value an op without inputs, cost and other outputs, with recomputable=False",
            )
    first.sort()
    pairs, follows, skipped = list(pairwise(first)), set[int](), set(first)
    for o, op in enumerate(graph.ops):
        behind = any(graph.producer[v] in follows for v in op.inputs)
        if o in skipped or (not behind and graph._only_views(op)):  # pyright: ignore[reportPrivateUsage]
            continue
        follows.add(o)
        if not behind:
            pairs.append((first[-1], o))
    return tuple(dict.fromkeys((*graph.order, *pairs)))


def _check_order(graph: Graph) -> None:
    count = len(graph.ops)
    pairs = [*graph.order, *((o, c) for o, op in enumerate(graph.ops) for c in op.clobbered_by)]
    for a, b in pairs:
        if not 0 <= a < b < count:
            raise GraphError(
                f"op {a} must come before op {b}, and the ops are not listed so",
                hint="list the ops in an order that keeps `order` and `clobbered_by`",
            )
