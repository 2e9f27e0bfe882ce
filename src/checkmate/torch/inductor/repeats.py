"""Sequences of ops that repeat in a graph, moved into subgraphs, so that Inductor compiles each of them once.

The layers of a transformer are the same ops on tensors of the same sizes. Inductor lowers, schedules and generates the ops of a
graph one by one, so that its time grows with the number of layers; a subgraph that is called several times is compiled at its
first call. Layers that a plan treats alike repeat as a whole, and others in parts.

A sequence begins where an op of another library does, such as a matrix product, and ends before one. No loops are fused across
such an op (see `scheduler`), so that a graph has the same kernels, and the same bits, with and without subgraphs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from checkmate.torch._compat.codegen.generated_code import calls_are_known
from checkmate.torch._compat.dispatch import OpOverload
from checkmate.torch._compat.inductor import DONATED, inductor_config, invoke_subgraph
from checkmate.torch.graph.op_properties import makes_views, op_properties
from checkmate.torch.graph.storages import storage_key
from checkmate.torch.graph.traced import copy_graph

aten = torch.ops.aten

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

_MOST_PARTS = 48
"""Most parts of a sequence: ops of other libraries, each with what follows it. A layer has 10 to 30."""

_CALL_NODES = 8
"""Price of a call, in nodes that Inductor does not have to compile."""

_LEAST_SAVED_NODES = 64
"""Fewer nodes are not worth a subgraph."""


def takes_subgraphs() -> bool:
    """Whether Inductor compiles a subgraph once, and fuses what it would fuse without subgraphs."""
    fuses_products = inductor_config.max_autotune or inductor_config.max_autotune_gemm
    return calls_are_known() and not fuses_products and not inductor_config.cpp_wrapper


def outline_repeats(module: fx.GraphModule, donated: Set[int] = frozenset()) -> fx.GraphModule:
    """The module with the sequences of ops that repeat in it as calls of subgraphs.

    Args:
        module: A module of ATen ops with fake tensors in ``meta["val"]``; it is not changed.
        donated: Positions of its inputs that it may overwrite.

    Returns:
        A new module, or the given one if nothing repeats.
    """
    nodes = [n for n in module.graph.nodes if n.op == "call_function"]
    if any(isinstance(n.meta.get("val"), torch.SymInt) for n in module.graph.nodes):
        return module  # sizes are inputs of ops then, and differ in their expressions
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
    storages = _Storages.of(outlined.graph, donated)
    for name, called in calls.items():
        dying = [frozenset(i for i, n in enumerate(_operands(call)) if storages.dies(n, call)) for call in called]
        getattr(outlined, name).meta[DONATED] = frozenset.intersection(*dying)
    outlined.graph.lint()
    outlined.recompile()
    return outlined


@dataclass(frozen=True, slots=True)
class _Part:
    """An op of another library with the ops that follow it; or one op that stays where it is.

    Attributes:
        nodes: Its nodes.
        token: What is equal for parts that may be equal; None if it stays where it is.
    """

    nodes: tuple[fx.Node, ...]
    token: str | None


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
    """Whether a node may be in a subgraph: it has no effect, draws nothing, and has tensors of fixed sizes."""
    if node.target is operator.getitem:
        return isinstance(node.meta.get("val"), torch.Tensor) and not makes_views(node.all_input_nodes[0])
    if not isinstance(node.target, OpOverload) or any(n.op == "get_attr" for n in node.all_input_nodes):
        return False
    properties = op_properties(node)
    if properties.effect or properties.random or properties.pinned or "val" not in node.meta:
        return False
    return isinstance(node.meta["val"], torch.Tensor) or not makes_views(node)


def _token(nodes: Sequence[fx.Node]) -> str:
    counted = [n for n in nodes if not _is_seed(n)]
    inside = {n: f"%{i}" for i, n in enumerate(counted)}
    return "\n".join(_line(n, lambda read: inside.get(read, "%")) for n in counted)


def _is_seed(node: fx.Node) -> bool:
    return str(node.target) == "prims.inductor_lookup_seed.default"


def _line(node: fx.Node, name: Any) -> str:
    """An op as text, with names for what it reads."""
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
    """Nodes that follow each other, as a subgraph would have them.

    Attributes:
        nodes: The nodes.
        copied: Nodes before them that are copied into the subgraph: views of inputs, and constants.
        inputs: Nodes before them that they read.
        outputs: Those of the nodes that are read after them.
        remade: Those of the nodes that are read after them and made again there: views, and constants.
    """

    nodes: tuple[fx.Node, ...]
    copied: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    remade: tuple[fx.Node, ...]

    @classmethod
    def of(cls, nodes: Sequence[fx.Node]) -> _Sequence:
        """The sequence of some nodes. The seeds of random ops are no part of it: each has another number."""
        nodes = [n for n in nodes if not _is_seed(n)]
        inside = set(nodes)
        copied: dict[fx.Node, None] = {}
        inputs: dict[fx.Node, None] = {}

        def read(node: fx.Node) -> None:
            if node in inside or node in copied:
                return
            if _is_free(node):
                for each in node.all_input_nodes:
                    read(each)
                copied[node] = None
            else:
                inputs[node] = None

        for node in nodes:
            for each in node.all_input_nodes:
                read(each)
        outputs: dict[fx.Node, None] = {}
        remade: set[fx.Node] = set()

        def needed(node: fx.Node) -> None:
            if node not in inside or node in remade:
                return
            if _is_free(node):
                for each in node.all_input_nodes:
                    needed(each)
                remade.add(node)
            else:
                outputs[node] = None

        for node in nodes:
            if any(user not in inside for user in node.users):
                needed(node)
        return cls(
            tuple(nodes),
            tuple(copied),
            tuple(inputs),
            tuple(n for n in nodes if n in outputs),
            tuple(n for n in nodes if n in remade),
        )

    @property
    def text(self) -> str | None:
        """Text that is equal for sequences that are the same subgraph; None if they cannot be one."""
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


def _is_free(node: fx.Node) -> bool:
    """Whether a node costs nothing to make again: a view, or a constant that Inductor puts in the place of its readers."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or not _can_move(node):
        return False
    return makes_views(node) or not node.all_input_nodes


def _operands(call: fx.Node) -> list[fx.Node]:
    return [n for n in call.args[2:] if isinstance(n, fx.Node)]


@dataclass(frozen=True, slots=True)
class _Storages:
    """The storages of a graph.

    Attributes:
        owner: The first node with the storage of each node.
        last: The node that reads each storage last, by its owner; only of those that the graph may overwrite.
    """

    owner: dict[fx.Node, fx.Node]
    last: dict[fx.Node, fx.Node]

    @classmethod
    def of(cls, graph: fx.Graph, donated: Set[int]) -> _Storages:
        """The storages of a graph.

        Args:
            graph: The graph.
            donated: Positions of its inputs that it may overwrite.
        """
        owner: dict[fx.Node, fx.Node] = {}
        last: dict[fx.Node, fx.Node] = {}
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
        given = [n for n in graph.nodes if n.op == "placeholder"]
        fixed = {owner[n] for i, n in enumerate(given) if i not in donated} | {n for n in graph.nodes if n.op == "get_attr"}
        return cls(owner, {n: reader for n, reader in last.items() if n not in fixed})

    def dies(self, node: fx.Node, call: fx.Node) -> bool:
        """Whether a call reads a storage last, and through no other of its operands."""
        owner = self.owner[node]
        alone = sum(self.owner[n] is owner for n in _operands(call)) == 1
        return alone and self.last.get(owner) is call and (owner is node or node.op == "placeholder")


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
        new.name = node.name  # AOTAutograd knows what a forward saves by its names
    return call


def _repeats(parts: Sequence[_Part]) -> Iterator[list[_Sequence]]:
    """The occurrences of each sequence that repeats, those that save most first."""
    known: dict[str, int] = {}
    tokens = np.array([known.setdefault(p.token, len(known)) if p.token else -1 - i for i, p in enumerate(parts)], dtype=np.int64)
    sizes = np.array([len(p.nodes) for p in parts], dtype=np.int64)
    free = np.array([p.token is not None for p in parts])
    refused: set[tuple[int, int]] = set()
    while (best := _best(tokens, sizes, free, refused)) is not None:
        key, length, starts = best
        refused.add(key)
        by_text: dict[str, list[tuple[int, _Sequence]]] = {}
        for at in starts:
            sequence = _Sequence.of([n for p in parts[at : at + length] for n in p.nodes])
            if (text := sequence.text) is not None:
                by_text.setdefault(text, []).append((at, sequence))
        for same in by_text.values():
            if _saved(len(same), len(same[0][1].nodes)) < _LEAST_SAVED_NODES:
                continue
            for at, _ in same:
                free[at : at + length] = False
            yield [sequence for _, sequence in same]


def _saved(count: int, nodes: int) -> int:
    return (count - 1) * nodes - count * _CALL_NODES


def _best(
    tokens: np.ndarray, sizes: np.ndarray, free: np.ndarray, refused: set[tuple[int, int]]
) -> tuple[tuple[int, int], int, list[int]] | None:
    """The repeated run of parts that saves most: a key, its length, and where it begins; None if none saves enough."""
    best, most = None, _LEAST_SAVED_NODES - 1
    ends = np.concatenate([[0], np.cumsum(sizes)])
    taken = np.concatenate([[0], np.cumsum(~free)])
    hashes = np.zeros(len(tokens), dtype=np.uint64)
    factor = np.uint64(1_099_511_628_211)
    mixed = (tokens.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)) * factor
    for length in range(1, min(_MOST_PARTS, len(tokens)) + 1):
        count = len(tokens) - length + 1
        hashes = hashes[:count] * factor + mixed[length - 1 :]
        at = np.flatnonzero(taken[length:] == taken[:count])
        found, inverse, times = np.unique(hashes[at], return_inverse=True, return_counts=True)
        repeated = np.flatnonzero(times > 1)
        if not len(repeated):
            break
        for which in repeated:
            places = at[inverse == which]
            size = int(ends[places[0] + length] - ends[places[0]])
            key = (length, int(found[which]))
            if key in refused or _saved(len(places), size) <= most:
                continue
            starts, end = [], -1
            for place in places.tolist():
                if place >= end:
                    starts.append(place)
                    end = place + length
            if (saved := _saved(len(starts), size)) > most:
                best, most = (key, length, starts), saved
    return best
