"""A folded problem as sets of bits, for the search over states.

A state of that search is one set: the values that are live, and those ops of which it matters whether they were computed. As
two 64-bit words it is compared, hashed and tested against an op's conditions in a few instructions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from checkmate.core.problem import Problem
from checkmate.solvers.reductions.fold_views import may_run_again

Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

MOST_BITS: Final = 128
"""Bits of a state, in two words. More words would admit more graphs, but the number of states grows exponentially:
linear32, with 65 bits, is at some budgets out of reach already."""

_MOST_COST: Final = 1 << 50
"""Cost of computing every op once from which on graphs are refused: sums over long paths have to stay below 2^63."""


class PackedProblem(NamedTuple):
    """A folded problem as words and amounts. Bit v stands for value v being live; further bits for ops that were computed.

    Attributes:
        reads: Bits of the values an op reads. Shape ``[op, word]``.
        makes: Bits of the values it makes, and its own if it has one. Shape ``[op, word]``.
        only_after: Bits of ops whose first computation precedes its own. Shape ``[op, word]``.
        never_after: Bits of ops after which it cannot be computed: those that overwrite its inputs, and itself if it may run
            only once. Shape ``[op, word]``.
        goal: Bits that are set when the step has ended. Shape ``[word]``.
        size: Bytes of each value. Shape ``[value]``.
        by_size: Values by size, falling. Shape ``[value]``.
        during: Bytes of an op's outputs and workspace. Shape ``[op]``.
        cost: Cost of each op. Shape ``[op]``.
        budget: Bytes above resident ones.
    """

    reads: Words
    makes: Words
    only_after: Words
    never_after: Words
    goal: Words
    size: Ints
    by_size: Ints
    during: Ints
    cost: Ints
    budget: int


def pack(folded: Problem) -> PackedProblem | str:
    """Pack a problem.

    Args:
        folded: A problem whose views are folded.

    Returns:
        The packed problem, or the reason in words why this search cannot solve it.
    """
    graph = folded.graph
    values, ops = len(graph.values), len(graph.ops)
    if any(value.base is not None for value in graph.values) or any(op.replay_bytes for op in graph.ops):
        return "the graph has views with a fixed place or ops with replay bytes, which the search over states does not model"
    if graph.cost > _MOST_COST:
        return f"the costs sum to {graph.cost}, over the {_MOST_COST} that the search over states adds exactly"
    once = [not may_run_again(folded, o) for o in range(ops)]
    before = [*graph.order, *(() if folded.reorder else pairwise(range(ops)))]
    sinks = [o for o, op in enumerate(graph.ops) if not any(graph.readers[v] or graph.values[v].kept for v in op.outputs)]
    # Whether an op was computed is not visible in what is live, and matters in these cases alone. A bit for each op would
    # tell states apart that have the same future, and there would be exponentially more of them. An op whose outputs are
    # neither read nor kept has to be computed all the same, as every plan computes every op.
    tracked = {o for o in range(ops) if once[o]} | {a for a, _ in before} | {c for op in graph.ops for c in op.clobbered_by}
    bit = {o: values + k for k, o in enumerate(sorted(tracked | set(sinks)))}
    if values + len(bit) > MOST_BITS:
        return f"{values + len(bit)} bits of state are over {MOST_BITS}"
    own = [[bit[o]] if o in bit else [] for o in range(ops)]
    size = np.array([value.size_bytes for value in graph.values], dtype=np.int64)
    return PackedProblem(
        reads=_words([op.inputs for op in graph.ops]),
        makes=_words([(*op.outputs, *own[o]) for o, op in enumerate(graph.ops)]),
        only_after=_words([[bit[a] for a, b in before if b == o] for o in range(ops)]),
        never_after=_words(
            [[*(bit[c] for c in op.clobbered_by), *(own[o] if once[o] else ())] for o, op in enumerate(graph.ops)]
        ),
        goal=_words([[v for v, value in enumerate(graph.values) if value.kept] + [bit[o] for o in sinks]])[0],
        size=size,
        by_size=np.argsort(-size, kind="stable"),
        during=np.array([op.workspace_bytes + sum(int(size[v]) for v in op.outputs) for op in graph.ops], dtype=np.int64),
        cost=np.array([op.cost for op in graph.ops], dtype=np.int64),
        budget=folded.budget_bytes - graph.resident_bytes,
    )


def _words(sets: Sequence[Iterable[int]]) -> Words:
    """Sets of bits as words. Shape ``[set, 2]``."""
    words = np.zeros((len(sets), 2), dtype=np.uint64)
    for row, bits in zip(words, sets, strict=True):
        for b in bits:
            row[b // 64] |= np.uint64(1) << np.uint64(b % 64)
    return words
