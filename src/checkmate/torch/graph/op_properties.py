"""Properties of ATen ops that decide whether and where a plan may compute them, in one place."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy

from checkmate.torch._compat.dispatch import (
    COLLECTIVES,
    HigherOrderOperator,
    OpOverload,
    run_and_save_rng_state,
    run_with_rng_state,
)
from checkmate.torch.graph.storages import leaves, storage_key

aten = torch.ops.aten

BATCH_NORM = aten._native_batch_norm_legit_functional.default
"""BatchNorm as AOTAutograd traces it in training; outputs 3 and 4 are the new running mean and variance."""

BATCH_NORM_NO_STATS = aten._native_batch_norm_legit.no_stats
"""BatchNorm without running statistics; its outputs 0 to 2 are bitwise equal to `BATCH_NORM`'s."""

BATCH_NORM_UPDATE = aten._batch_norm_with_update.default
"""BatchNorm in training by the kernel that eager mode selects; it updates running statistics in place (`passes.batch_norm`)."""

PURE = ("aten", "prims", "checkmate")
"""Namespaces whose schemas are complete: their ops have no effect except on the arguments marked as written."""

_SEEDS = ("inductor_seed.default", "inductor_seeds.default")
"""Ops that draw a seed for later ops; a recomputation would draw another seed, and these ops cannot replay a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpProperties:
    """Properties of an op in a graph."""

    random: bool = False  # it draws from a random generator: a recomputation must replay the generator's state
    mutates: tuple[int, ...] = ()  # positions of the arguments that it overwrites
    effect: bool = False  # a side effect: a mutation, a collective, a print
    sequenced: bool = False  # it has other side effects than overwriting: it keeps its order relative to all sequenced ops
    pinned: bool = False  # it must run exactly once


def op_properties(node: torch.fx.Node) -> OpProperties:
    """Properties of the op of a ``call_function`` node."""
    target = node.target
    must_save = node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE
    if target is run_and_save_rng_state:
        return OpProperties(random=True, pinned=True)
    if isinstance(target, HigherOrderOperator):
        inside = [op_properties(n) for body in _bodies(node) for n in body.graph.nodes if n.op == "call_function"]
        effect = "effects" in target.name() or any(f.effect for f in inside)
        # A random op in its body cannot be replayed: no op saves the generator's state for a whole body.
        random = any(f.random for f in inside)
        return OpProperties(random=random, effect=effect, sequenced=effect, pinned=effect or random or must_save)
    if not isinstance(target, OpOverload):
        return OpProperties(pinned=must_save)
    tagged = tagged_random(node)
    mutates = tuple(i for i, a in enumerate(target._schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    collective = target.namespace in COLLECTIVES
    # Attention kernels have the tag even if dropout_p is 0, and `is_impure` believes the tag. Asking `is_impure` first
    # would pin every attention output, the largest values of a transformer.
    hidden: Hidden | None = node.meta.get(HIDDEN)
    random = (tagged and argument(target, node.args, node.kwargs, "dropout_p") != 0.0) or hidden == "random"
    effect = bool(mutates) or collective or hidden == "state" or (not tagged and node.is_impure())
    seeds = any(str(target).endswith(name) for name in _SEEDS)
    return OpProperties(
        random=random and not seeds,
        mutates=mutates,
        effect=effect,
        sequenced=effect and (collective or not mutates or target.namespace not in PURE),
        pinned=(effect and target is not BATCH_NORM_UPDATE) or must_save or seeds or (random and _device(node) is None),
    )


def op_names(node: torch.fx.Node) -> tuple[str, ...]:
    """Names by which a user can refer to an op: ``"aten::mm"`` and ``"mm"``."""
    target = node.target
    full = target._schema.name if isinstance(target, OpOverload) else str(target)
    return full, full.rsplit("::", 1)[-1]


def used_inputs(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Input nodes whose values an op uses, without duplicates."""
    if (arguments := used_arguments(node)) is node.args:
        return node.all_input_nodes
    found: dict[torch.fx.Node, None] = {}
    torch.fx.map_arg((arguments, dict(node.kwargs)), found.setdefault)
    return list(found)


def used_arguments(node: torch.fx.Node) -> tuple[Any, ...]:
    """The positional arguments of an op, with None in place of those that it ignores.

    The backward of a BatchNorm in training ignores the running statistics. If it kept them alive, it would hold buffers that
    the forward has already updated.
    """
    backward = node.target in (aten.native_batch_norm_backward.default, aten.batch_norm_backward.default)
    return (*node.args[:3], None, None, *node.args[5:]) if backward and node.args[7:8] == (True,) else node.args


def makes_views(node: torch.fx.Node) -> bool:
    """Whether an op only makes views of its inputs."""
    made = {storage_key(t) for t in leaves(node.meta.get("val"))}
    given = {storage_key(t) for n in node.all_input_nodes for t in leaves(n.meta.get("val"))}
    mutable = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
    return bool(made) and made <= given and not mutable


def out_argument(node: torch.fx.Node) -> str:
    """Name of the argument that an op writes its result to; empty if it returns a new tensor."""
    arguments = node.target._schema.arguments if isinstance(node.target, OpOverload) else ()
    return next((argument.name for argument in arguments if argument.is_out), "")


def is_pointwise(node: torch.fx.Node) -> bool:
    """Whether an op computes each number of its result from the numbers at the same positions in its inputs."""
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def trains_batch_norm(node: torch.fx.Node) -> bool:
    """Whether a node is a BatchNorm in training, which updates running statistics."""
    return node.target is BATCH_NORM_UPDATE or (node.target is BATCH_NORM and node.args[5] is True)


def without_update(target: object, arguments: Sequence[Any]) -> tuple[OpOverload, tuple[Any, ...]]:
    """The op, with its arguments, that computes a BatchNorm in training again, without its running statistics."""
    x, weight, bias, _, _, *rest = arguments
    if target is BATCH_NORM:
        return BATCH_NORM_NO_STATS, (x, weight, bias, *rest)
    # It updates copies of the statistics that it is given, and those of no other op depend on them: weights will do.
    return aten._batch_norm_with_update_functional.default, (x, weight, bias, weight, bias, *rest)


def is_collective(node: torch.fx.Node) -> bool:
    """Whether an op exchanges data with other processes, and therefore cannot be measured in one process."""
    return isinstance(node.target, OpOverload) and node.target.namespace in COLLECTIVES


def random_op(node: torch.fx.Node) -> tuple[OpOverload, str] | None:
    """The op of a node that draws random numbers, and how it treats the generator's state: "plain", "save" or "replay"."""
    if node.op != "call_function":
        return None
    if node.target is run_and_save_rng_state:
        return node.args[0], "save"  # type: ignore[return-value]
    if node.target is run_with_rng_state:
        return node.args[1], "replay"  # type: ignore[return-value]
    return (node.target, "plain") if isinstance(node.target, OpOverload) and op_properties(node).random else None


def tagged_random(node: torch.fx.Node) -> bool:
    """Whether PyTorch tags an op as random; attention kernels have the tag with and without dropout."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _bodies(node: torch.fx.Node) -> list[torch.fx.GraphModule]:
    """Graph modules that a higher-order op calls."""
    owner = node.graph.owning_module
    given = [n for n in node.all_input_nodes if n.op == "get_attr"] if owner is not None else []
    found = [operator.attrgetter(str(n.target))(owner) for n in given]
    return [module for module in found if isinstance(module, torch.fx.GraphModule)]


def argument(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """An argument of a call by its name in the op's schema, or its default; None if the op has no such argument."""
    for position, known in enumerate(op._schema.arguments):
        if known.name == name:
            return args[position] if position < len(args) else kwargs.get(name, known.default_value)
    return None


def _device(node: torch.fx.Node) -> object:
    # `run_and_save_rng_state` picks the generator from the arguments: without a tensor or a device among them it fails.
    read = (n.meta.get("val") for n in node.all_input_nodes)
    return next((value.device for value in read if isinstance(value, torch.Tensor)), node.kwargs.get("device"))


Mutators = Mapping[int, Sequence[int]]
"""Storage key to the indices of the ops that overwrite it, ascending."""


def mutators(ops: Iterable[tuple[int, torch.fx.Node, OpProperties]]) -> Mutators:
    """The storages that ops overwrite in place, from index, node and properties of each op, ascending by index."""
    found: dict[int, list[int]] = {}
    for o, node, properties in ops:
        for position in properties.mutates:
            target = node.args[position] if position < len(node.args) else None
            for written in target if isinstance(target, (list, tuple)) else (target,):
                if isinstance(written, torch.fx.Node):
                    for tensor in leaves(written.meta.get("val")):
                        found.setdefault(storage_key(tensor), []).append(o)
    return found


def overwriters(node: torch.fx.Node, known: Mutators) -> Iterator[int]:
    """Indices of ops that overwrite a storage that a node reads; both before and after the node.

    A node keeps its order relative to these ops in the original program: on the other side of an overwriter it would read other
    numbers.
    """
    for read in used_inputs(node):
        for tensor in leaves(read.meta.get("val")):
            yield from known.get(storage_key(tensor), ())


Hidden = Literal["random", "state"]
"""Dependence of an op's results on more than its inputs, which its schema does not say."""

HIDDEN = "checkmate_hidden"
"""Key in a node's metadata: the op is `Hidden` random, or has an unknown state; see `joint.hidden_state`."""

FORWARD_ONLY = "checkmate_forward_only"
"""Key in a node's metadata: the op must not run in the backward, since a pass already gave the backward its own copy."""

UNDEFINED = "checkmate_undefined"
"""Key in the metadata of a tangent: no gradient flows into its output: the tangent is None, and nothing is allocated."""

DESCRIPTION = "checkmate_description"
"""Key in a node's metadata: description of an op of ours for users, if its name is not enough."""

PIECES = "checkmate_pieces"
"""Key in a node's metadata: its `Pieces`, if it runs piece by piece."""


@dataclass(frozen=True, eq=False, slots=True)
class Pieces:
    """The graphs that an op runs one after the other, from which its time and memory are estimated.

    The inputs of a graph are slices of operands and results, sums so far, and buffers, which have no traced tensor. The first
    graph returns the first terms of the sums.
    """

    graphs: tuple[torch.fx.Graph, ...]  # of each piece; equal pieces share one graph
    buffers_bytes: tuple[int, ...]  # of each piece; they are kept for the next piece
    sums: tuple[bool, ...]  # whether each result is a sum over the pieces, instead of assembled from slices
    run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]  # runs them on whole operands
