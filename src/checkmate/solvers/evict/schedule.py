"""List scheduling: orders of computing every op once that hold little."""

# The kernel is compiled by numba and written as it wants it: loops over flat arrays.
# pyright: basic

from __future__ import annotations

import numpy as np
from numba import njit

from checkmate.core.graph import Graph
from checkmate.solvers.evict.decode import next_random, seed_random
from checkmate.solvers.evict.instance import rows

_TRIES = 300
_WORK = 300_000_000  # tries times ops squared: less than a second


def low_order(graph: Graph, seed: int) -> list[int]:
    """A topological order with a low peak: always the ready op that adds least, many times over with noise.

    Args:
        graph: A graph whose views are folded.
        seed: Seed of the noise.
    """
    count = len(graph.ops)
    inputs = [list(dict.fromkeys(graph.root[v] for v in op.inputs)) for op in graph.ops]
    outputs = [[v for v in op.outputs if graph.values[v].base is None] for op in graph.ops]
    before: list[set[int]] = [{graph.producer[v] for v in (*op.inputs, *own)} for op, own in zip(graph.ops, inputs, strict=True)]
    for a, b in graph.order:
        before[b].add(a)
    for o, op in enumerate(graph.ops):
        for c in op.clobbered_by:
            before[c].add(o)
    after: list[list[int]] = [[] for _ in range(count)]
    for o, above in enumerate(before):
        for p in sorted(above):
            after[p].append(o)
    readers = np.zeros(len(graph.values), dtype=np.int64)
    for own in inputs:
        readers[own] += 1
    readers[[graph.root[v] for v, value in enumerate(graph.values) if value.kept]] += 1
    random = np.zeros(1, dtype=np.uint64)
    seed_random(random, seed)
    tries = max(1, min(_TRIES, _WORK // max(1, count * count)))
    order = np.zeros(count, dtype=np.int64)
    lowest_peak(
        *rows(inputs), *rows(outputs), *rows(after),
        np.array([len(above) for above in before], dtype=np.int64), readers,
        np.array([value.size_bytes for value in graph.values], dtype=np.float64),
        np.array([op.workspace_bytes for op in graph.ops], dtype=np.float64),
        tries, random, order,
    )  # fmt: skip
    return order.tolist()


@njit(cache=True, error_model="numpy")
def lowest_peak(
    input_start, inputs, output_start, outputs, after_start, after, waits_for, readers, size, workspace,
    tries, random, best_order,
):  # fmt: skip
    """Fill ``best_order`` with the order of lowest peak of so many tries; returns its peak.

    A ready op is rated by the bytes that it makes, less those of the values that it reads last, less a
    share of those that others will read as well. The first four tries are without noise.
    """
    count = len(waits_for)
    order = np.empty(count, np.int64)
    ready = np.empty(count, np.int64)
    best_peak = np.inf
    for t in range(tries):
        share = (t % 4) * 0.3
        noise = 0.0 if t < 4 else 0.05 * 2.0 ** (t % 5 - 1)
        left = readers.copy()
        waits = waits_for.copy()
        many = 0
        for o in range(count):
            if waits[o] == 0:
                ready[many] = o
                many += 1
        held = 0.0
        peak = 0.0
        for place in range(count):
            chosen = -1
            lowest = np.inf
            for k in range(many):
                o = ready[k]
                made, freed, shared = 0.0, 0.0, 0.0
                for q in range(output_start[o], output_start[o + 1]):
                    made += size[outputs[q]]
                    if readers[outputs[q]] == 0:
                        freed += size[outputs[q]]
                for q in range(input_start[o], input_start[o + 1]):
                    v = inputs[q]
                    if left[v] == 1:
                        freed += size[v]
                    else:
                        shared += size[v] / left[v]
                rating = made - freed - share * shared
                if noise > 0:
                    rating += noise * (next_random(random) - 0.5) * (made + freed)
                if rating < lowest or (rating == lowest and o < ready[chosen]):
                    lowest = rating
                    chosen = k
            o = ready[chosen]
            many -= 1
            ready[chosen] = ready[many]
            order[place] = o
            for q in range(output_start[o], output_start[o + 1]):
                held += size[outputs[q]]
            peak = max(peak, held + workspace[o])
            for q in range(output_start[o], output_start[o + 1]):
                if readers[outputs[q]] == 0:
                    held -= size[outputs[q]]
            for q in range(input_start[o], input_start[o + 1]):
                v = inputs[q]
                left[v] -= 1
                if left[v] == 0:
                    held -= size[v]
            for q in range(after_start[o], after_start[o + 1]):
                waits[after[q]] -= 1
                if waits[after[q]] == 0:
                    ready[many] = after[q]
                    many += 1
        if peak < best_peak:
            best_peak = peak
            best_order[:] = order
    return best_peak
