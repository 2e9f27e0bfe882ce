"""List scheduling: orders that compute every op once and have a low peak.

Finding the order of least peak is NP-hard on DAGs (register sufficiency, Sethi 1975). This module repeats a greedy rule many
times with noise. It helps graphs whose given order is bad; the order of a captured training step seldom is.
"""

# numba compiles loops over flat arrays; it has no types for pyright to check.
# pyright: basic

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.simulate import simulate
from checkmate.solvers.backends.kernels import inner_kernel, kernel
from checkmate.solvers.clocks import Flag, no_alarm
from checkmate.solvers.evict.profile import next_random, seeded
from checkmate.solvers.flat_graph import Ints, flatten, rows
from checkmate.solvers.reductions.fold_views import reads_with_storage


def low_order(problem: Problem, seed: int, time_up: Flag | None = None) -> list[int]:
    """A topological order with a low peak: it always takes the ready op that adds the fewest bytes, in many tries with noise.

    Returns the lowest order of all tries, or the graph's own order if its peak is at most 1 % higher: a search takes the same
    time from either, and the given order of a training step is a good one.
    """
    g = flatten(problem)
    graph, count = problem.graph, len(problem.graph.ops)
    before = [{graph.producer[v] for v in reads_with_storage(graph, op.inputs)} for op in graph.ops]
    for a, b in [*g.ordered.tolist(), *g.overwritten.tolist()]:
        before[b].add(a)
    after: list[list[int]] = [[] for _ in range(count)]
    for o, above in enumerate(before):
        for p in sorted(above):
            after[p].append(o)
    work = _Work(
        *rows(after),
        waits_for=np.array([len(above) for above in before], dtype=np.int32),
        readers=np.bincount(g.reads[:-1], minlength=len(g.size)).astype(np.int32),  # END is a reader: kept values are never freed
        waits=np.zeros(count, dtype=np.int32),
        left=np.zeros(len(g.size), dtype=np.int32),
        ready=np.zeros(count, dtype=np.int32),
        order=np.zeros(count, dtype=np.int32),
        time_up=no_alarm() if time_up is None else time_up,
    )
    tries = max(1, min(300, 300_000_000 // max(1, count * count)))  # less than a second even in the worst case
    best = np.arange(count, dtype=np.int32)
    peak = lowest_peak(g, work, tries, seeded(seed), best)
    own = simulate(graph, Plan.from_order(graph, range(count))).peak_bytes - graph.resident_bytes
    return best.tolist() if peak < 0.99 * own else list(range(count))


class _Work(NamedTuple):
    """Working arrays of the kernel: which ops come after others, by data or by a rule of the graph, and which have run."""

    after_start: Ints
    after: Ints
    waits_for: Ints  # number of ops that come before each op
    readers: Ints  # number of ops that read each value
    waits: Ints  # number of ops that each op still waits for
    left: Ints  # number of ops that have still to read each value
    ready: Ints  # ops that wait for no other
    order: Ints  # ops that have run
    time_up: Flag


@inner_kernel
def _bytes_of(g, w, o):
    """Bytes that an op makes, bytes that it frees, and a part of the bytes that other ops will read too."""
    made, freed, shared = 0.0, 0.0, 0.0
    for k in range(g.writes_from[o], g.writes_from[o + 1]):
        size = g.size[g.writes[k]]
        made += size
        if w.readers[g.writes[k]] == 0:
            freed += size
    for k in range(g.reads_from[o], g.reads_from[o + 1]):
        v = g.reads[k]
        if w.left[v] == 1:
            freed += g.size[v]
        else:
            shared += g.size[v] / w.left[v]
    return made, freed, shared


@kernel
def lowest_peak(g, w, tries, random, best_order):
    """Fill ``best_order`` with the order of lowest peak of some tries; returns its peak in bytes, infinite if there is none.

    A ready op is rated by the bytes that it makes, minus the bytes of values that it reads last, minus a share of the bytes
    that other ops will read too: the sooner those ops run, the sooner these bytes are freed.
    """
    count = len(w.order)
    best_peak = np.inf
    for t in range(tries):
        # Each try has another share, and after the first four another noise, of 2.5 to 80 % of the bytes made and freed.
        share = (t % 4) * 0.3
        noise = 0.0 if t < 4 else 0.05 * 2.0 ** (t % 5 - 1)
        for v in range(len(w.left)):
            w.left[v] = w.readers[v]
        many = 0
        for o in range(count):
            w.waits[o] = w.waits_for[o]
            if w.waits[o] == 0:
                w.ready[many] = o
                many += 1
        # All ready ops are rated at each place: ratings change with every op that runs, and few ops are ready at a time.
        held = 0.0
        peak = 0.0
        for place in range(count):
            if w.time_up[0] != 0:
                return best_peak
            chosen = -1
            lowest = np.inf
            for r in range(many):
                o = w.ready[r]
                made, freed, shared = _bytes_of(g, w, o)
                rating = made - freed - share * shared
                if noise > 0:
                    rating += noise * (next_random(random) - 0.5) * (made + freed)
                # Ties are decided by index, because the order of ``ready`` depends on removals.
                if rating < lowest or (rating == lowest and o < w.ready[chosen]):
                    lowest = rating
                    chosen = r
            o = w.ready[chosen]
            many -= 1
            w.ready[chosen] = w.ready[many]
            w.order[place] = o
            made, freed, _ = _bytes_of(g, w, o)
            peak = max(peak, held + made + g.workspace[o])
            held += made - freed
            for k in range(g.reads_from[o], g.reads_from[o + 1]):
                w.left[g.reads[k]] -= 1
            for k in range(w.after_start[o], w.after_start[o + 1]):
                w.waits[w.after[k]] -= 1
                if w.waits[w.after[k]] == 0:
                    w.ready[many] = w.after[k]
                    many += 1
        if peak < best_peak:
            best_peak = peak
            for place in range(count):
                best_order[place] = w.order[place]
    return best_peak
