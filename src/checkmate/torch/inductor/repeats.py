"""Sequences of ops that repeat in a graph, moved into subgraphs: Inductor compiles each of them once.

The layers of a transformer are the same ops on tensors of the same sizes. Inductor lowers, schedules and generates the ops of a
graph one by one: its time grows with the number of layers. A subgraph that is called several times is compiled at its first call.
Layers that a plan treats alike repeat as a whole, and others in parts.

A sequence begins with an op of another library, such as a matrix product, and ends before the next one. No loops are fused across
these ops (see `scheduler`): a graph has the same kernels, and the same bits, with and without subgraphs.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from checkmate.torch._compat.dispatch import OpOverload
from checkmate.torch._compat.inductor import DONATED, inductor_config, invoke_subgraph
from checkmate.torch.graph.op_properties import makes_views, op_properties
from checkmate.torch.graph.storages import storage_key
from checkmate.torch.graph.traced import copy_graph, producer

aten = torch.ops.aten

IN_PLACE = "checkmate_in_place"
"""Metadata of the ops of an update, whose loops write over inputs of the graph; a subgraph would return other tensors."""

_LIBRARY_OPS = frozenset(
    {
        aten.mm,
        aten.addmm,
        aten.bmm,
        aten.baddbmm,
        aten.convolution,
        aten.convolution_backward,
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_backward,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_efficient_attention_backward,
        aten._scaled_dot_product_cudnn_attention,
        aten._scaled_dot_product_cudnn_attention_backward,
    }
)
"""Ops that Inductor calls in another library; it fuses nothing across them."""


def takes_subgraphs() -> bool:
    """Whether Inductor compiles a subgraph once, and fuses the same ops as without subgraphs."""
    fuses_products = inductor_config.max_autotune or inductor_config.max_autotune_gemm
    return not fuses_products and not inductor_config.cpp_wrapper


def outline_repeats(module: fx.GraphModule, donated: Set[int] = frozenset()) -> fx.GraphModule:
    """The module with calls of subgraphs in place of the sequences of ops that repeat in it."""
    nodes = [n for n in module.graph.nodes if n.op == "call_function"]
    if any(isinstance(n.meta.get("val"), torch.SymInt) for n in module.graph.nodes):
        return module  # symbolic sizes are inputs of ops, and their expressions differ
    found = list(_repeats(_parts(nodes)))
    if not found:
        return module
    outlined = fx.GraphModule(module, copy_graph(module.graph))
    outlined.meta = dict(module.meta)
    copies = dict(zip(module.graph.nodes, outlined.graph.nodes, strict=True))
    calls: dict[str, list[fx.Node]] = {}
    for number, occurrences in enumerate(found):
        name = f"repeated_{number}"
        setattr(outlined, name, occurrences[0].module())
        calls[name] = [_call(outlined.graph, name, _Sequence.of([copies[n] for n in s.nodes])) for s in occurrences]
    outlined.graph.eliminate_dead_code()
    dying = _dying_operands(outlined.graph, donated)
    for name, called in calls.items():
        getattr(outlined, name).meta[DONATED] = frozenset.intersection(*(dying[call] for call in called))
    outlined.graph.lint()
    outlined.recompile()
    return outlined


@dataclass(frozen=True, slots=True)
class _Part:
    """An op of another library with the ops that follow it; or one op that stays in its place."""

    nodes: tuple[fx.Node, ...]
    token: str | None  # the same for parts that may be equal; None if it stays in its place


def _parts(nodes: Sequence[fx.Node]) -> list[_Part]:
    parts: list[list[fx.Node]] = []
    fixed: list[bool] = []
    for node in nodes:
        stays = not _can_move(node)
        begins = getattr(node.target, "overloadpacket", None) in _LIBRARY_OPS
        if stays or begins or not parts or fixed[-1]:
            parts.append([])
            fixed.append(stays)
        parts[-1].append(node)
    return [_Part(tuple(part), None if stays else _token(part)) for part, stays in zip(parts, fixed, strict=True)]


def _can_move(node: fx.Node) -> bool:
    """Whether a node may be in a subgraph: it has no effect, draws no random numbers, and has tensors of fixed sizes."""
    if IN_PLACE in node.meta:
        return False
    if node.target is operator.getitem:
        return isinstance(node.meta.get("val"), torch.Tensor)
    if not isinstance(node.target, OpOverload) or any(n.op == "get_attr" for n in node.all_input_nodes):
        return False
    properties = op_properties(node)
    return not (properties.effect or properties.random or properties.pinned) and "val" in node.meta


def _token(nodes: Sequence[fx.Node]) -> str:
    counted = [n for n in nodes if not _is_seed(n)]
    inside = {n: f"%{i}" for i, n in enumerate(counted)}
    return sys.intern("\n".join(_line(n, lambda read: inside.get(read, "%")) for n in counted))  # many tokens are compared


def _is_seed(node: fx.Node) -> bool:
    return str(node.target) == "prims.inductor_lookup_seed.default"


def _line(node: fx.Node, name: Any) -> str:
    """An op as text, with names for its inputs."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _Name(name(n)))  # type: ignore[misc]
    realized = "inductor_realize_to_strides" in node.meta
    return f"{node.target} {args!r} {kwargs!r} {_sizes(node.meta.get('val'))} {realized}"


class _Name(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _sizes(value: Any) -> str:
    tensors = value if isinstance(value, (tuple, list)) else (value,)
    return " ".join(
        f"{t.dtype}{tuple(t.shape)}{t.stride()}{t.storage_offset()}{t.device}" if isinstance(t, torch.Tensor) else repr(t)
        for t in tensors
    )


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Nodes that follow each other, as a subgraph would have them."""

    nodes: tuple[fx.Node, ...]
    copied: tuple[fx.Node, ...]  # earlier nodes that are copied into the subgraph: views of inputs, and constants
    inputs: tuple[fx.Node, ...]  # earlier nodes that they read
    outputs: tuple[fx.Node, ...]  # nodes of the sequence that later nodes read
    remade: tuple[fx.Node, ...]  # nodes of the sequence that are computed again after it: views, and constants

    @classmethod
    def of(cls, nodes: Sequence[fx.Node]) -> _Sequence:
        """The sequence of some nodes, without the seeds of random ops: each seed has another number."""
        nodes = [n for n in nodes if not _is_seed(n)]
        inside = set(nodes)
        copied, inputs, remade, outputs = (dict[fx.Node, None]() for _ in range(4))
        for node in nodes:
            for each in node.all_input_nodes:
                _walk(each, lambda n: n not in inside, copied, inputs)
        for node in nodes:
            if any(user not in inside for user in node.users):
                _walk(node, inside.__contains__, remade, outputs)
        read_later = tuple(n for n in nodes if n in outputs), tuple(n for n in nodes if n in remade)
        return cls(tuple(nodes), tuple(copied), tuple(inputs), *read_later)

    @property
    def text(self) -> str | None:
        """A text that is equal for sequences with the same subgraph; None if they cannot be one."""
        if not self.outputs or not all(isinstance(n.meta.get("val"), torch.Tensor) for n in (*self.inputs, *self.outputs)):
            return None
        names = {n: f"%{i}" for i, n in enumerate((*self.inputs, *self.copied, *self.nodes))}
        given = [_sizes(n.meta["val"]) for n in self.inputs]
        lines = [_line(n, names.__getitem__) for n in (*self.copied, *self.nodes)]
        return "\n".join([*given, *lines, *(names[n] for n in self.outputs)])

    def module(self) -> fx.GraphModule:
        """The subgraph."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = {"val": node.meta["val"]}
        for node in (*self.copied, *self.nodes):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[n] for n in self.outputs))
        graph.eliminate_dead_code()
        return fx.GraphModule({}, graph)


def _walk(node: fx.Node, on_side: Callable[[fx.Node], bool], free: dict[fx.Node, None], others: dict[fx.Node, None]) -> None:
    """Find the nodes on one side from which a node is computed: nodes that cost nothing, and the others that these read."""
    if not on_side(node) or node in free:
        return
    if _is_free(node):
        for each in node.all_input_nodes:
            _walk(each, on_side, free, others)
        free[node] = None
    else:
        others[node] = None


def _is_free(node: fx.Node) -> bool:
    """Whether it costs nothing to compute a node again: a view, or a constant that Inductor inlines into its readers."""
    return node.op == "call_function" and _can_move(node) and (makes_views(producer(node)) or not node.all_input_nodes)


def _dying_operands(graph: fx.Graph, donated: Set[int]) -> dict[fx.Node, frozenset[int]]:
    """Positions of the operands of each call whose storages are read last by the call, and through only one of its operands."""
    owner: dict[fx.Node, fx.Node] = {}  # the first node with the storage of each node
    last: dict[fx.Node, fx.Node] = {}  # the node that reads each storage last, by its owner
    inputs: dict[int, fx.Node] = {}
    for node in graph.nodes:
        source = node.all_input_nodes[0] if node.target is operator.getitem else node
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
            owner[node] = inputs.setdefault(storage_key(node.meta["val"]), node)
        elif source.op == "call_function" and makes_views(source):
            owner[node] = owner[node.all_input_nodes[0]]
            continue
        else:
            owner[node] = node
        for read in node.all_input_nodes:
            last[owner[read]] = node
    given = graph.find_nodes(op="placeholder")
    fixed = {owner[n] for i, n in enumerate(given) if i not in donated} | {n for n in graph.nodes if n.op == "get_attr"}
    found: dict[fx.Node, frozenset[int]] = {}
    for call in graph.find_nodes(op="call_function", target=invoke_subgraph):
        operands = [n for n in call.args[2:] if isinstance(n, fx.Node)]
        readings = Counter(owner[n] for n in operands)
        dying = {o for o, count in readings.items() if count == 1 and last.get(o) is call and o not in fixed}
        found[call] = frozenset(
            i for i, n in enumerate(operands) if owner[n] in dying and (owner[n] is n or n.op == "placeholder")
        )
    return found


def _call(graph: fx.Graph, name: str, sequence: _Sequence) -> fx.Node:
    """Replace a sequence by a call of its subgraph."""
    inside = set(sequence.nodes)
    for node in sequence.inputs:
        if _is_seed(node):
            sequence.nodes[0].prepend(node)
    with graph.inserting_before(sequence.nodes[0]):
        call = graph.call_function(invoke_subgraph, (graph.get_attr(name), name, *sequence.inputs))
        call.meta["val"] = tuple(n.meta["val"] for n in sequence.outputs)
        made: dict[fx.Node, fx.Node] = {}
        for position, node in enumerate(sequence.outputs):
            made[node] = graph.call_function(operator.getitem, (call, position))
            made[node].meta = dict(node.meta)
        for node in sequence.remade:
            made[node] = graph.node_copy(node, lambda n: made.get(n, n))
    for node, new in made.items():
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)
    for node in reversed(sequence.nodes):
        graph.erase_node(node)
    for node, new in made.items():
        new.name = node.name  # AOTAutograd knows the saved tensors of a forward by name
    return call


def _repeats(parts: Sequence[_Part]) -> Iterator[list[_Sequence]]:
    """The occurrences of each sequence that repeats, those that save most nodes first."""
    ends = list(accumulate((len(p.nodes) for p in parts), initial=0))
    free = [True] * len(parts)

    def apart(places: Sequence[int], length: int) -> list[int]:
        """The places of sequences that do not overlap, and of which no part is in another sequence yet."""
        found, end = list[int](), 0
        for at in places:
            if at >= end and all(free[at : at + length]):
                found.append(at)
                end = at + length
        return found

    def saved(places: Sequence[int], length: int) -> int:
        return _saved_nodes(len(places), ends[places[0] + length] - ends[places[0]]) if places else 0

    todo = [(-saved(apart(places, length), length), length, places) for length, places in _repeated_runs(parts)]
    heapify(todo)
    while todo:
        _, length, places = heappop(todo)
        places = apart(places, length)
        gain = saved(places, length)
        if gain < 64:  # fewer nodes are not worth a subgraph
            continue
        if todo and gain < -todo[0][0]:  # other sequences have taken some of its places
            heappush(todo, (-gain, length, places))
            continue
        by_text: dict[str, list[tuple[int, _Sequence]]] = {}
        for at in places:
            sequence = _Sequence.of([n for p in parts[at : at + length] for n in p.nodes])
            if (text := sequence.text) is not None:
                by_text.setdefault(text, []).append((at, sequence))
        for same in by_text.values():
            if _saved_nodes(len(same), len(same[0][1].nodes)) < 64:
                continue
            for at, _ in same:
                free[at : at + length] = [False] * length
            yield [sequence for _, sequence in same]


def _saved_nodes(count: int, nodes: int) -> int:
    """Nodes that Inductor does not have to compile, less the price of the calls."""
    return (count - 1) * nodes - count * 8


def _repeated_runs(parts: Sequence[_Part]) -> Iterator[tuple[int, list[int]]]:
    """Length and places of every run of parts that occurs twice or more, up to 48 parts: a layer has 10 to 30."""
    groups = [list(range(len(parts)))]
    for length in range(1, 49):
        longer: dict[tuple[int, str], list[int]] = {}
        for number, places in enumerate(groups):
            for at in places:
                if at + length <= len(parts) and (token := parts[at + length - 1].token) is not None:
                    longer.setdefault((number, token), []).append(at)
        groups = [places for places in longer.values() if len(places) > 1]
        yield from ((length, places) for places in groups)
