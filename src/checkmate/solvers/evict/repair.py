"""Kernels of the search: evict until the peak is within the budget; undo some evictions and repair again.

The greedy part evicts by price (`price`). The rest is ruin and recreate (Schrimpf et al. 2000), a large neighbourhood search:
clear the intervals of a few values, repair, accept by a threshold. Neither proves anything; every plan is decoded, measured and
later validated from its sequence alone.

In all kernels ``g`` is an `Instance`, ``w`` a `Scratch` and ``code`` a `Code`.
"""

# numba compiles loops over flat arrays; it has no types for pyright to check.
# pyright: basic

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from checkmate.solvers.backends.kernels import kernel
from checkmate.solvers.evict.decode import decode, measure, next_random, random_below
from checkmate.solvers.evict.price import Excess, evict_at_peak


class RepairSettings(NamedTuple):
    """How `repair` evicts. All fields are of these very types: others would make numba compile another version.

    Attributes:
        budget: Bytes above resident ones.
        duration_exponent: Exponent of the number of steps over the budget that an eviction relieves, in its benefit. 0 looks
            at the peak alone; larger ones prefer values that are held through many peaks.
        noise: Prices are multiplied by e to a uniform number within plus and minus this.
        batch_fraction: Share of the excess that is evicted before decoding again, one value at least: 0 is the most careful,
            1 the fastest.
        cutoff: Cost from which on a plan is not wanted.
        rounds: Most decodings.
    """

    budget: float
    duration_exponent: float
    noise: float
    batch_fraction: float
    cutoff: float
    rounds: int


class Repaired(NamedTuple):
    """Result of `repair`.

    Attributes:
        found: Whether a plan within the budget and below the cutoff was found; it is then in ``w.sequence``.
        cost: Its cost.
        length: Its length, END included.
        decodes: Sequences that were decoded, the unit of work of a search.
    """

    found: bool
    cost: float
    length: int
    decodes: int


class RuinParameters(NamedTuple):
    """Choices of `ruin_and_repair`, drawn uniformly in each iteration. Chosen on the graphs of ``benchmarks/graphs``.

    Attributes:
        most_values: Most values whose intervals one iteration clears; a third of the evicted ones on small plans.
        window_share: Longest window of stages to clear, as one part in so many of all stages.
        keep_chance: An interval in the window survives with a chance of one in so many: else a repair meets the same
            prices and makes the same plan.
        exponents: Duration exponents to draw from: 0, 1, ... this many less one, times ``exponent_step``.
        exponent_step: See ``exponents``.
        low_noise: Noise of half of the repairs: nearly greedy.
        high_noise: Noise of the others.
        batches: Batch fractions to draw from: 0, 1, ... this many less one, times ``batch_step``.
        batch_step: See ``batches``.
        rounds: Rounds of one repair beside one for each value: the clock is not looked at during a repair.
    """

    most_values: int = 12
    window_share: int = 10
    keep_chance: int = 4
    exponents: int = 5
    exponent_step: float = 0.25
    low_noise: float = 0.05
    high_noise: float = 0.3
    batches: int = 3
    batch_step: float = 0.5
    rounds: int = 200


@kernel
def repair(g, w, code, settings, random):
    """Evict at the peak, decode again, and so on, until the peak is within the budget.

    Each round only adds stages to the intervals, so it ends; `RepairSettings.rounds` ends it earlier where plans grow
    without coming nearer to the budget, as on ResNet-50 at batch 863 with all ops recomputable.

    Args:
        g: The instance.
        w: The scratch arrays.
        code: Changed in place, also where nothing is found.
        settings: How to evict.
        random: State of the random numbers; drawn from only with noise.

    Returns:
        The fields of a `Repaired`.
    """
    # A plain tuple: numba makes a named one by a call of Python code, where a pending Ctrl-C raises, and then reads the result
    # that is not there (a segmentation fault, seen in numba 0.68).
    decodes = 0
    while True:
        length = decode(g, w, code)
        if length < 0:
            return False, 0.0, 0, decodes
        cost, peak, peak_at = measure(g, w, length)
        if cost < 0:
            return False, 0.0, 0, decodes
        decodes += 1
        if peak <= settings.budget:
            return cost < settings.cutoff, cost, length, decodes
        # Evictions add computations, so a plan that costs too much already does not come back below the cutoff.
        if cost > settings.cutoff or decodes > settings.rounds or w.time_up[0] != 0:
            return False, cost, length, decodes
        moment = Excess(peak_at, int(w.stage_of[peak_at]), peak - settings.budget)
        if not evict_at_peak(g, w, code, length, moment, settings, random):
            return False, cost, length, decodes


@kernel
def _copy_row(code, v, to):
    to.used[v] = code.used[v]
    for q in range(code.used[v]):
        to.low[v, q] = code.low[v, q]
        to.high[v, q] = code.high[v, q]


@kernel
def _copy(code, to):
    for v in range(len(code.used)):
        _copy_row(code, v, to)


@kernel
def relieve(g, w, code, best, settings, random):
    """Evict as `repair` does, but go on elsewhere where nothing can be evicted, until no other stage is over the budget.

    Args:
        g: The instance.
        w: The scratch arrays.
        code: Changed in place.
        best: Filled with the code of least excess on the way.
        settings: How to evict; the cutoff is not used.
        random: State of the random numbers; drawn from only with noise.

    Returns:
        Its excess, infinite if there is none: the bytes over the budget, summed over all computations.
    """
    w.stuck[:] = 0
    end = g.targets[len(g.targets) - 1]
    decodes = 0
    least = np.inf
    while True:
        length = decode(g, w, code)
        if length < 0:
            return least
        cost, _, _ = measure(g, w, length)
        if cost < 0:
            return least
        decodes += 1
        most, at, excess = settings.budget, -1, 0.0
        for p in range(length):
            if w.sequence[p] < end:  # END and stages that only read are none
                excess += max(0.0, w.profile[p] - settings.budget)
            if w.profile[p] > most and w.stuck[w.stage_of[p]] == 0:
                most, at = w.profile[p], p
        if excess < least:
            least = excess
            _copy(code, best)
        if at < 0 or decodes > settings.rounds or w.time_up[0] != 0:
            return least
        stage = int(w.stage_of[at])
        if not evict_at_peak(g, w, code, length, Excess(at, stage, most - settings.budget), settings, random):
            w.stuck[stage] = 1


class Improved(NamedTuple):
    """Where `ruin_and_repair` stands; given back to it, it goes on.

    Attributes:
        current_cost: Cost of the current code.
        best_cost: Cost of the best code.
        decodes: Sequences decoded so far.
    """

    current_cost: float
    best_cost: float
    decodes: int


@kernel
def ruin(code, evicted, n, stages, parameters, random):
    """Clear some intervals: of values drawn one by one, of neighbours by index, or those that meet a window of stages.

    The first kind mixes what has nothing in common, the second takes values of one layer, the third gives a part of the
    step a new plan.
    """
    kind = random_below(random, 3)
    many = 1 + random_below(random, max(1, min(n // 3, parameters.most_values)))
    if kind == 0:
        for _ in range(many):
            code.used[evicted[random_below(random, n)]] = 0
    elif kind == 1:
        start = random_below(random, n)
        for k in range(many):
            code.used[evicted[(start + k) % n]] = 0
    else:
        first = random_below(random, stages)
        last = first + 1 + random_below(random, max(1, stages // parameters.window_share))
        for k in range(n):
            v = evicted[k]
            kept = 0
            for q in range(code.used[v]):
                outside = code.high[v, q] < first or code.low[v, q] > last
                if outside or random_below(random, parameters.keep_chance) == 0:
                    code.low[v, kept] = code.low[v, q]
                    code.high[v, kept] = code.high[v, q]
                    kept += 1
            code.used[v] = kept


@kernel
def ruin_and_repair(g, w, current, best, trial, budget, temperature, parameters, state, work_limit, random):
    """Clear some intervals at random, repair, keep the result if it is cheaper or nearly so.

    Args:
        g: The instance.
        w: The scratch arrays.
        current: Current code, changed in place.
        best: Best code, changed in place.
        trial: Working space.
        budget: Bytes above resident ones.
        temperature: Largest cost by which a result may be worse than the current one and still be kept; each iteration draws
            its threshold up to that: threshold accepting (Dueck and Scheuer 1990) with a random threshold.
        parameters: The choices.
        state: The costs of the two codes, and the work done so far.
        work_limit: Sequences decoded after which no iteration begins.
        random: State of the random numbers.

    Returns:
        The fields of the state after that; see `repair` for the reason.
    """
    values = len(current.used)
    stages = len(g.targets)
    evicted = w.evicted
    current_cost = state.current_cost
    best_cost = state.best_cost
    decodes = state.decodes
    while decodes < work_limit and w.time_up[0] == 0:
        n = 0
        for v in range(values):
            if current.used[v]:
                evicted[n] = v
                n += 1
        if n == 0:  # nothing is evicted: the plan computes every op once
            break
        # Only intervals are cleared, so a repair starts from a plan that costs less and holds more than the current one.
        _copy(current, trial)
        ruin(trial, evicted, n, stages, parameters, random)
        # Each repair with its own price: a fixed one would return to the plan that was ruined.
        exponent = random_below(random, parameters.exponents) * parameters.exponent_step
        noise = parameters.high_noise if random_below(random, 2) else parameters.low_noise
        batch = random_below(random, parameters.batches) * parameters.batch_step
        limit = current_cost + temperature * next_random(random)
        settings = RepairSettings(budget, exponent, noise, batch, limit, parameters.rounds + values)
        found, cost, _, decoded = repair(g, w, trial, settings, random)
        decodes += decoded
        if found:
            current_cost = cost
            _copy(trial, current)
            if current_cost < best_cost:
                best_cost = current_cost
                _copy(trial, best)
    return current_cost, best_cost, decodes
