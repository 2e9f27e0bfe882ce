"""Facts about ATen ops that decide what a plan may do with them, in one place."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import CheckpointPolicy

from checkmate.torch._compat.dispatch import (
    COLLECTIVES,
    HigherOrderOperator,
    OpOverload,
    run_and_save_rng_state,
    run_with_rng_state,
)

aten = torch.ops.aten

BATCH_NORM = aten._native_batch_norm_legit_functional.default
"""BatchNorm in training as AOTAutograd traces it: outputs 3 and 4 are the new running statistics."""

BATCH_NORM_NO_STATS = aten._native_batch_norm_legit.no_stats
"""The same without running statistics: outputs 0 to 2, equal to the bit."""

_IGNORED_IN_TRAINING = {aten.native_batch_norm_backward.default: ((3, 4), 7)}
"""Op -> (arguments that it does not use in training, argument that says whether it trains)."""

_PURE = ("aten", "prims", "checkmate")
"""Namespaces whose ops do nothing but what their schemas say."""

_SEEDS = ("inductor_seed.default", "inductor_seeds.default")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpProperties:
    """What is known of an op.

    Attributes:
        random: Draws from a random generator, so that a second computation must replay its state.
        mutates: Positions of the arguments it overwrites.
        effect: Does something beyond its outputs: mutations, collectives, prints.
        sequenced: Keeps its place among all that are: its effect is not only on the arguments it overwrites.
        pinned: Must run exactly once.
    """

    random: bool
    mutates: tuple[int, ...]
    effect: bool
    sequenced: bool
    pinned: bool


def op_properties(node: torch.fx.Node) -> OpProperties:
    """What is known of the op of a ``call_function`` node."""
    target = node.target
    must_save = node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE
    if target is run_and_save_rng_state:
        return OpProperties(random=True, mutates=(), effect=False, sequenced=False, pinned=True)
    if isinstance(target, HigherOrderOperator):
        inside = [op_properties(n) for body in _bodies(node) for n in body.graph.nodes if n.op == "call_function"]
        effect = "effects" in target.name() or any(f.effect for f in inside)
        # What is random inside could be replayed only as a whole, by a state that nobody saves.
        random = any(f.random for f in inside)
        return OpProperties(random=random, mutates=(), effect=effect, sequenced=effect, pinned=effect or random or must_save)
    if not isinstance(target, OpOverload):
        return OpProperties(random=False, mutates=(), effect=False, sequenced=False, pinned=must_save)
    tagged = torch.Tag.nondeterministic_seeded in target.tags
    mutates = tuple(i for i, a in enumerate(target._schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    collective = target.namespace in COLLECTIVES
    # Attention kernels carry the random tag even where dropout_p is 0, and `is_impure` goes by the tag:
    # asked first, it would pin every attention output.
    random = tagged and _dropout_p(node) != 0.0
    effect = bool(mutates) or collective or (not tagged and node.is_impure())
    seeds = any(str(target).endswith(name) for name in _SEEDS)
    return OpProperties(
        random=random and not seeds,
        mutates=mutates,
        effect=effect,
        sequenced=effect and (collective or not mutates or target.namespace not in _PURE),
        pinned=effect or must_save or seeds or (random and _device(node) is None),
    )


def op_names(node: torch.fx.Node) -> tuple[str, ...]:
    """Names that a user knows an op by: ``"aten::mm"``, ``"mm"``."""
    target = node.target
    full = target._schema.name if isinstance(target, OpOverload) else str(target)
    return full, full.rsplit("::", 1)[-1]


def used_inputs(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Nodes whose values an op really uses, each once."""
    skip = unused_arguments(node)
    if not skip:
        return node.all_input_nodes
    used = [a for i, a in enumerate(node.args) if i not in skip]
    found: dict[torch.fx.Node, None] = {}
    torch.fx.map_arg((used, dict(node.kwargs)), lambda n: found.setdefault(n))
    return list(found)


def unused_arguments(node: torch.fx.Node) -> tuple[int, ...]:
    """Positions of arguments that an op is given and does not use: None may stand there."""
    known = _IGNORED_IN_TRAINING.get(node.target)  # type: ignore[arg-type]
    if known is None:
        return ()
    positions, train = known
    return positions if len(node.args) > train and node.args[train] is True else ()


def trains_batch_norm(node: torch.fx.Node) -> bool:
    """Whether the op is a BatchNorm that updates its running statistics."""
    return node.target is BATCH_NORM and node.args[5] is True


def is_collective(node: torch.fx.Node) -> bool:
    """Whether the op talks to other processes, so that it cannot be run alone."""
    return isinstance(node.target, OpOverload) and node.target.namespace in COLLECTIVES


def random_op(node: torch.fx.Node) -> tuple[OpOverload, str] | None:
    """(op, how) of a node that draws random numbers; ``how`` is ``"plain"``, ``"save"`` or ``"replay"``."""
    if node.op != "call_function":
        return None
    if node.target is run_and_save_rng_state:
        return node.args[0], "save"  # type: ignore[return-value]
    if node.target is run_with_rng_state:
        return node.args[1], "replay"  # type: ignore[return-value]
    return (node.target, "plain") if isinstance(node.target, OpOverload) and op_properties(node).random else None


def _bodies(node: torch.fx.Node) -> list[torch.fx.GraphModule]:
    """Modules whose graphs a higher-order op runs."""
    owner = node.graph.owning_module
    given = [n for n in node.all_input_nodes if n.op == "get_attr"] if owner is not None else []
    found = [operator.attrgetter(str(n.target))(owner) for n in given]
    return [module for module in found if isinstance(module, torch.fx.GraphModule)]


def _dropout_p(node: torch.fx.Node) -> object:
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == "dropout_p":
            return node.args[position] if len(node.args) > position else node.kwargs.get("dropout_p", argument.default_value)
    return None


def _device(node: torch.fx.Node) -> object:
    # The state of the generator can only be saved where the device shows in the arguments.
    for read in node.all_input_nodes:
        value = read.meta.get("val")
        if isinstance(value, torch.Tensor):
            return value.device
    return node.kwargs.get("device")


FORWARD_ONLY = "checkmate_forward_only"
"""Key in a node's metadata: its op is never computed in the backward."""
