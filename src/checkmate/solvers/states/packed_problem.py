"""A folded problem as sets of bits, for the search over states.

A state of that search is one set: the live values, and the computed ops, as far as their computation matters. A state is two
64-bit words: it is compared, hashed and tested against an op's conditions in a few instructions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from checkmate.core.problem import Problem
from checkmate.solvers.reductions.fold_views import may_run_again

Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]


class PackedProblem(NamedTuple):
    """A folded problem as words and amounts. Bit v means that value v is live; further bits mean that ops were computed."""

    reads: Words  # values an op reads; shape [op, word]
    makes: Words  # values it makes, and its own bit if it has one
    only_after: Words  # ops whose first computation precedes its own
    never_after: Words  # ops after which it cannot be computed: those that overwrite its inputs, itself if it may run only once
    goal: Words  # bits that are set when the step has ended; shape [word]
    size: Ints  # bytes of each value
    by_size: Ints  # values by size, descending
    during: Ints  # bytes of an op's outputs and workspace
    cost: Ints
    budget: int  # bytes above resident ones


def pack(folded: Problem) -> PackedProblem | str:
    """Pack a problem whose views are folded; returns a reason as text if this search cannot solve it."""
    graph = folded.graph
    values, ops = len(graph.values), len(graph.ops)
    if any(value.base is not None for value in graph.values) or any(op.replay_bytes for op in graph.ops):
        return "the graph has views with a fixed place or ops with replay bytes, which the search over states does not model"
    most_cost = 1 << 50  # sums over long paths have to stay below 2^63
    if graph.cost > most_cost:
        return f"the costs sum to {graph.cost}, over the {most_cost} that the search over states adds exactly"
    once = [not may_run_again(folded, o) for o in range(ops)]
    before = [*graph.order, *(() if folded.reorder else pairwise(range(ops)))]
    sinks = [o for o, op in enumerate(graph.ops) if not any(graph.readers[v] or graph.values[v].kept for v in op.outputs)]
    # The live values do not show whether an op was computed, and only in these cases does it matter. A bit for each op would
    # distinguish states with the same future, and there would be exponentially more of them. An op whose outputs are
    # neither read nor kept still has a bit, because every plan computes every op.
    tracked = {o for o in range(ops) if once[o]} | {a for a, _ in before} | {c for op in graph.ops for c in op.clobbered_by}
    bit = {o: values + k for k, o in enumerate(sorted(tracked | set(sinks)))}
    # Two words. More would admit more graphs, but the number of states grows exponentially: linear32, with 65 bits, is already
    # out of reach at some budgets.
    if values + len(bit) > 128:
        return f"{values + len(bit)} bits of state are over 128"
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
