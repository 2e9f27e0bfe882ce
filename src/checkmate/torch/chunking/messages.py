"""Message passing: which ops on edges can run in pieces of edges together.

A layer gathers the states of nodes at the ends of each edge, computes a message and adds the messages to nodes. Its ops on edges
run in pieces; nodes are whole between them. The ops on edges of the whole network follow each other in waves: a wave begins once
the nodes of the previous one are complete. The waves of a network of two layers, for example, are the layers and then, in reverse
order, their gradients.

A region has the waves of one layer: its forward and its backward, and both of their gradients if forces are trained. The
backward of a layer reads most of the tensors that its forward makes; another layer reads at most the state of the edges, which is
then whole between layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from torch import fx

from checkmate.solvers.walks import reached
from checkmate.torch.chunking.regions import Allows, Region, grow
from checkmate.torch.chunking.rules.placements import CARRY, Split
from checkmate.torch.chunking.stages import waves_of
from checkmate.torch.graph.traced import outputs, own_bytes, producer, readers


def message_ops(seed: fx.Node, split: Split, graph: fx.Graph, allows: Allows, *, exact: bool) -> Set[fx.Node]:
    """The ops on edges that belong to the layer of a tensor; none if the tensor is not one of edges."""
    network = grow(seed, split, 2, least_share=0, allows=allows, exact=exact, most_ops=len(graph.nodes))
    if network is None or not any(CARRY in rule.outputs for rule in network.rules.values()):
        return frozenset()
    wave = _late(network, waves_of(network, graph))
    read = _read_across(network, wave)
    left = {w: _bytes(value for (made, _), values in read.items() if made == w for value in values) for w in {*wave.values()}}
    most = {pair for pair, values in read.items() if 2 * _bytes(values) > left[pair[0]]}
    own = reached([wave[producer(seed)]], lambda w: [other for pair in most if w in pair for other in pair])
    return {op for op in network.rules if wave[op] in own}


def _late(network: Region, wave: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """The wave of each op, or that of its first reader if fewer bytes then are whole between waves.

    Filters of all layers, for example, that are computed from distances, could all run in the first wave.
    """
    late: dict[fx.Node, int] = {}
    for op in sorted(network.rules, reverse=True):
        users = [user for value, user in readers(op) if user in network.rules and not network.reads_whole(user, value)]
        late[op] = min((late[user] for user in users), default=wave[op])
    found: dict[fx.Node, int] = {}
    for op in sorted(network.rules):
        needed = {value for value, _ in network.read_by(op) if found.get(producer(value), late[op]) < late[op]}
        alone = [v for v in needed if not any(user is not op and wave.get(user) == late[op] for user in v.users)]
        made = [value for value in outputs(op) if value is not None]
        found[op] = late[op] if _bytes(alone) < _bytes(made) else wave[op]
    return found


def _read_across(network: Region, wave: Mapping[fx.Node, int]) -> dict[tuple[int, int], set[fx.Node]]:
    """The tensors of edges that are made in one wave and read in another one."""
    found: dict[tuple[int, int], set[fx.Node]] = {}
    for op in network.rules:
        for value, _ in network.read_by(op):
            made = producer(value)
            if made in network.rules and value in network.splits and wave[made] != wave[op]:
                found.setdefault((wave[made], wave[op]), set()).add(value)
    return found


def _bytes(values: object) -> int:
    return sum(map(own_bytes, {*values}))  # type: ignore[misc]
