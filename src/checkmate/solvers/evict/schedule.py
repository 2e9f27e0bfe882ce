"""List scheduling: orders that compute every op once and have a low peak.

Finding the order of least peak is NP-hard on DAGs (register sufficiency, Sethi 1975), so this is a greedy rule made many
times over with noise. It serves graphs whose given order is far from good; that of a captured training step seldom is.
"""

# numba compiles loops over flat arrays; it has no types for pyright to check.
# pyright: basic

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from checkmate.core.graph import Graph
from checkmate.solvers.alarm import Flag, no_alarm
from checkmate.solvers.backends.kernels import kernel
from checkmate.solvers.evict.decode import copy_range, next_random, seed_random
from checkmate.solvers.evict.instance import Floats, Ints, rows


class Noise(NamedTuple):
    """How a ready op is rated in each try, by its number.

    Attributes:
        weights: Try t weighs the bytes of inputs that others will still read by one of so many weights in turn: 0, 1, ...
            times ``weight_step``. As many first tries are without noise.
        weight_step: See ``weights``.
        least: Least noise, as a share of the bytes that the op makes and frees.
        doublings: Noise takes so many levels in turn, each twice the one before, the first half of ``least``.
    """

    weights: int = 4
    weight_step: float = 0.3
    least: float = 0.05
    doublings: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleParameters:
    """Parameters of `low_order`.

    Attributes:
        tries: Most orders made.
        work: Most tries times the square of the number of ops, which is the time of the worst case: less than a second.
        noise: How the ready ops are rated.
    """

    tries: int = 300
    work: int = 300_000_000
    noise: Noise = field(default_factory=Noise)


PARAMETERS = ScheduleParameters()


class Scheduled(NamedTuple):
    """An order of every op once, beside the graph's own.

    Attributes:
        order: The order.
        peak_bytes: Its peak above resident bytes; infinite if not even one order was made in time.
        given_peak_bytes: That of the graph's own order.
    """

    order: tuple[int, ...]
    peak_bytes: float
    given_peak_bytes: float


def low_order(graph: Graph, seed: int, time_up: Flag | None = None) -> Scheduled:
    """A topological order with a low peak: always the ready op that adds the fewest bytes, many times over with noise.

    Args:
        graph: A graph whose views are folded.
        seed: Seed of the noise.
        time_up: Ends the tries when it is raised; by default nothing does.

    Returns:
        The lowest order of all tries; the graph's own if not even one try came to its end.
    """
    count = len(graph.ops)
    # Liveness is that of storages: a view reads as its owner, and makes nothing.
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
    # A kept value has one reader more, which never runs: it is never freed.
    readers = np.zeros(len(graph.values), dtype=np.int64)
    for own in inputs:
        readers[own] += 1
    readers[[graph.root[v] for v, value in enumerate(graph.values) if value.kept]] += 1
    random = np.zeros(1, dtype=np.uint64)
    seed_random(random, seed)
    tries = max(1, min(PARAMETERS.tries, PARAMETERS.work // max(1, count * count)))
    order = np.arange(count, dtype=np.int64)
    dag = Dag(
        *rows(inputs),
        *rows(outputs),
        *rows(after),
        waits_for=np.array([len(above) for above in before], dtype=np.int64),
        readers=readers,
        size=np.array([value.size_bytes for value in graph.values], dtype=np.float64),
        workspace=np.array([op.workspace_bytes for op in graph.ops], dtype=np.float64),
    )
    work = Work(np.zeros_like(dag.readers), *(np.zeros_like(order) for _ in range(3)))
    given = peak_of(dag, work, order)
    peak = lowest_peak(dag, work, PARAMETERS.noise, tries, random, no_alarm() if time_up is None else time_up, order)
    return Scheduled(tuple(order.tolist()), peak, given)


class Dag(NamedTuple):
    """A graph as flat arrays for the kernel; lists are in compressed sparse rows (`rows`), values stand for their storage.

    Attributes:
        input_start: Start of each op's inputs. Shape ``[op + 1]``.
        inputs: Values read.
        output_start: Start of each op's outputs. Shape ``[op + 1]``.
        outputs: Values made.
        after_start: Start of each op's successors. Shape ``[op + 1]``.
        after: Ops that come after it, by data or by a rule of the graph.
        waits_for: How many ops come before each op. Shape ``[op]``.
        readers: How many ops read each value; the end counts as one for what is kept. Shape ``[value]``.
        size: Bytes of each value. Shape ``[value]``.
        workspace: Workspace of each op, in bytes. Shape ``[op]``.
    """

    input_start: Ints
    inputs: Ints
    output_start: Ints
    outputs: Ints
    after_start: Ints
    after: Ints
    waits_for: Ints
    readers: Ints
    size: Floats
    workspace: Floats


class Work(NamedTuple):
    """Working arrays of the kernels.

    Attributes:
        left: How many ops have still to read each value. Shape ``[value]``.
        waits: For how many ops each op still waits. Shape ``[op]``.
        order: Ops that have run, in their order. Shape ``[op]``.
        ready: Ops that wait for no other. Shape ``[op]``.
    """

    left: Ints
    waits: Ints
    order: Ints
    ready: Ints


@kernel
def peak_of(g, work, order):
    """Peak of an order of every op, in bytes."""
    left = work.left
    copy_range(g.readers, 0, len(left), left, 0)
    held = 0.0
    peak = 0.0
    for o in order:
        for q in range(g.output_start[o], g.output_start[o + 1]):
            held += g.size[g.outputs[q]]
        peak = max(peak, held + g.workspace[o])
        for q in range(g.output_start[o], g.output_start[o + 1]):
            if g.readers[g.outputs[q]] == 0:
                held -= g.size[g.outputs[q]]
        for q in range(g.input_start[o], g.input_start[o + 1]):
            v = g.inputs[q]
            left[v] -= 1
            if left[v] == 0:
                held -= g.size[v]
    return peak


@kernel
def lowest_peak(g, work, rating_noise, tries, random, time_up, best_order):
    """Fill ``best_order`` with the order of lowest peak of so many tries; returns its peak in bytes.

    A ready op is rated by the bytes that it makes, less those of the values that it reads last, less a
    share of those that others will read as well: the sooner the others run, the sooner these are freed.

    Args:
        g: The graph, a `Dag`.
        work: Working arrays, a `Work`.
        rating_noise: The noise.
        tries: Orders to make.
        random: State of the random numbers.
        time_up: Ends the tries when it is not 0. Shape ``[1]``.
        best_order: Filled. Shape ``[op]``.
    """
    count = len(g.waits_for)
    left, waits, order, ready = work
    best_peak = np.inf
    for t in range(tries):
        share = (t % rating_noise.weights) * rating_noise.weight_step
        noise = 0.0 if t < rating_noise.weights else rating_noise.least * 2.0 ** (t % rating_noise.doublings - 1)
        copy_range(g.readers, 0, len(left), left, 0)
        copy_range(g.waits_for, 0, count, waits, 0)
        many = 0
        for o in range(count):
            if waits[o] == 0:
                ready[many] = o
                many += 1
        # All ready ops are rated at each place: ratings change with every op that runs, and few are ready at a time.
        held = 0.0
        peak = 0.0
        for place in range(count):
            if time_up[0] != 0:
                return best_peak
            chosen = -1
            lowest = np.inf
            for k in range(many):
                o = ready[k]
                made, freed, shared = 0.0, 0.0, 0.0
                for q in range(g.output_start[o], g.output_start[o + 1]):
                    made += g.size[g.outputs[q]]
                    if g.readers[g.outputs[q]] == 0:
                        freed += g.size[g.outputs[q]]
                for q in range(g.input_start[o], g.input_start[o + 1]):
                    v = g.inputs[q]
                    if left[v] == 1:
                        freed += g.size[v]
                    else:
                        shared += g.size[v] / left[v]
                rating = made - freed - share * shared
                if noise > 0:
                    rating += noise * (next_random(random) - 0.5) * (made + freed)
                # By index among equals: the order of ``ready`` depends on removals.
                if rating < lowest or (rating == lowest and o < ready[chosen]):
                    lowest = rating
                    chosen = k
            o = ready[chosen]
            many -= 1
            ready[chosen] = ready[many]
            order[place] = o
            for q in range(g.output_start[o], g.output_start[o + 1]):
                held += g.size[g.outputs[q]]
            peak = max(peak, held + g.workspace[o])
            for q in range(g.output_start[o], g.output_start[o + 1]):
                if g.readers[g.outputs[q]] == 0:
                    held -= g.size[g.outputs[q]]
            for q in range(g.input_start[o], g.input_start[o + 1]):
                v = g.inputs[q]
                left[v] -= 1
                if left[v] == 0:
                    held -= g.size[v]
            for q in range(g.after_start[o], g.after_start[o + 1]):
                waits[g.after[q]] -= 1
                if waits[g.after[q]] == 0:
                    ready[many] = g.after[q]
                    many += 1
        if peak < best_peak:
            best_peak = peak
            copy_range(order, 0, count, best_order, 0)
    return best_peak
