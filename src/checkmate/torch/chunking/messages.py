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

from collections.abc import Iterable, Mapping, Set

from torch import fx

from checkmate.solvers.walks import reached
from checkmate.torch.chunking.program import CARRYING
from checkmate.torch.chunking.regions import Allows, Region, grow
from checkmate.torch.chunking.rules.lookup import rules_of
from checkmate.torch.chunking.rules.placements import CARRY, Split
from checkmate.torch.chunking.stages import waves_of
from checkmate.torch.graph.traced import inputs, outputs, own_bytes, producer, readers, tensor


def message_ops(seed: fx.Node, split: Split, graph: fx.Graph, allows: Allows, *, exact: bool) -> Set[fx.Node]:
    """The ops on edges that belong to the layer of a tensor; none if the tensor is not one of edges."""
    if split.length(tensor(seed).shape) not in _lengths(graph):
        return frozenset()
    network = grow(seed, split, 2, least_share=0, allows=allows, exact=exact, most_ops=len(graph.nodes))
    if network is None or not any(CARRY in rule.outputs for rule in network.rules.values()):
        return frozenset()
    wave = _late(network, waves_of(network, graph))
    passed = _passed(network, wave)
    most = {w: max((size for pair, size in passed.items() if w in pair), default=0) for w in {*wave.values()}}
    # Half of what the two waves pass on at most, but for tensors that are a little wider than others.
    near = [pair for pair, size in passed.items() if size > 0.4 * min(most[w] for w in pair)]
    own = reached([wave[producer(seed)]], lambda w: [other for pair in near if w in pair for other in pair])
    return {op for op in network.rules if wave[op] in own}


def _lengths(graph: fx.Graph) -> set[int]:
    """How many edges there are: lengths of the axes whose elements are added to another tensor."""
    adding = [op for target in CARRYING for op in graph.find_nodes(op="call_function", target=target)]
    rules = [(op, rule) for op in adding for rule in rules_of(op) if CARRY in rule.outputs]
    cuts = [cut for op, rule in rules for cut in zip(inputs(op), rule.inputs, strict=True)]
    return {placement.length(tensor(value).shape) for value, placement in cuts if isinstance(placement, Split)}


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


def _passed(network: Region, wave: Mapping[fx.Node, int]) -> dict[tuple[int, int], int]:
    """Bytes of the tensors of edges that are made in one wave and read in another one."""
    found: dict[tuple[int, int], set[fx.Node]] = {}
    for op in network.rules:
        for value, _ in network.read_by(op):
            made = producer(value)
            if made in network.rules and value in network.splits and wave[made] != wave[op]:
                found.setdefault((wave[made], wave[op]), set()).add(value)
    return {pair: _bytes(values) for pair, values in found.items()}


def _bytes(values: Iterable[fx.Node]) -> int:
    return sum(map(own_bytes, values))
