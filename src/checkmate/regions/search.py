"""Choose the regions to checkpoint and the ops to save within a budget."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from checkmate.core.plan import Plan
from checkmate.regions.blocks import Choice, Region, Schedule


@dataclass(frozen=True)
class Unit:
    """Ops of a region that are saved together; a unit without ops leaves the region without checkpointing."""

    region: Region
    ops: frozenset[int]
    cost: int  # of their recomputation
    size_bytes: int  # of their results

    @property
    def ratio(self) -> float:
        """Cost saved per byte."""
        return self.cost / max(1, self.size_bytes)


def save_ops(schedule: Schedule, budget_bytes: int, plan: Plan | None, until: float) -> Choice | None:
    """Choose ops in each region separately, until ``time.perf_counter()``. None if no choice was found that keeps the budget.

    Ops are taken in the order of the cost saved per byte, as long as the peak keeps the budget; then some are exchanged for
    others. A second start takes the ops that a plan computes once. The better result is returned.
    """
    units = [unit for region in schedule.regions for unit in (*_op_units(schedule, region), _without(schedule, region))]
    search = _Exchange(schedule, units, budget_bytes)
    if plan is None:
        return search.improved([], until)
    times = Counter(plan.order)
    once = [unit for unit in units if unit.ops and all(times[o] == 1 for o in unit.ops)]
    found = [search.improved([], (time.perf_counter() + until) / 2), search.improved(once, until)]
    return min((choice for choice in found if choice is not None), key=schedule.cost, default=None)


def leave_out_regions(schedule: Schedule, budget_bytes: int, until: float) -> Choice | None:
    """Choose which regions are checkpointed, without saving any op in them. Arguments and result as for `save_ops`."""
    units = [_without(schedule, region) for region in schedule.regions]
    return _Exchange(schedule, units, budget_bytes).improved([], until)


def save_modules(schedule: Schedule, budget_bytes: int, until: float) -> tuple[Choice, tuple[str, ...]] | None:
    """The cheapest choice of modules, relative to each region, whose ops are saved in all regions; None if none keeps the budget.

    Sets are tried in the order of their cost until one keeps the budget. If the time ends before, the result is the best set
    found by adding one module after another.
    """
    units = _module_units(schedule)

    def choice_of(names: Iterable[str]) -> Choice:
        return _choice(schedule, (unit for name in names for unit in units[name]))

    if schedule.peak_bytes(choice_of(())) > budget_bytes:
        return None
    cost = {name: sum(unit.cost for unit in found) for name, found in units.items()}
    # The first set that fits is found among at most 2**20 sets, of the most costly modules.
    names = sorted((name for name in units if cost[name]), key=lambda name: (cost[name], name))[-20:]
    # Sets of modules to leave out, by their cost. Each set has two successors: its last module is replaced by the next
    # more costly one, or that one is added. This makes every set once (Lawler 1972).
    heap: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    while heap and time.perf_counter() < until:
        lost, left_out = heapq.heappop(heap)
        taken = [name for k, name in enumerate(names) if k not in left_out]
        if schedule.peak_bytes(choice_of(taken)) <= budget_bytes:
            return choice_of(taken), tuple(taken)
        following = left_out[-1] + 1 if left_out else 0
        if following < len(names):
            heapq.heappush(heap, (lost + cost[names[following]], (*left_out, following)))
            if left_out:
                swapped = lost - cost[names[left_out[-1]]] + cost[names[following]]
                heapq.heappush(heap, (swapped, (*left_out[:-1], following)))
    greedy: list[str] = []
    for name in sorted(names, key=lambda name: -cost[name] / max(1, sum(unit.size_bytes for unit in units[name]))):
        if schedule.peak_bytes(choice_of([*greedy, name])) <= budget_bytes:
            greedy.append(name)
    return choice_of(greedy), tuple(sorted(greedy))


@dataclass(frozen=True)
class _Exchange:
    """A local search for the units to save: first those that save most cost per byte, then exchanges of each for others."""

    schedule: Schedule
    units: Sequence[Unit]
    budget_bytes: int

    def improved(self, start: Sequence[Unit], until: float) -> Choice | None:
        """The best choice found from as many units of a start as fit."""
        begun = _longest_prefix(sorted(start, key=lambda unit: -unit.ratio), self._fits)
        if begun is None:
            return None
        others = sorted((unit for unit in self.units if unit not in begun and unit.cost), key=lambda unit: -unit.ratio)
        more = _longest_prefix(others, lambda added: self._fits([*begun, *added])) or []
        taken = self._filled([*begun, *more], others[len(more) :], until)
        better = True
        while better:
            better = False
            for unit in sorted(taken, key=lambda unit: unit.ratio):
                if time.perf_counter() >= until:
                    break
                rest = [other for other in taken if other is not unit]
                outside = [other for other in self.units if other not in taken and other.cost]
                changed = self._filled(rest, sorted(outside, key=lambda other: -other.cost), until)
                if self._cost(changed) < self._cost(taken):
                    taken, better = changed, True
        return _choice(self.schedule, taken)

    def _filled(self, taken: Sequence[Unit], others: Iterable[Unit], until: float) -> list[Unit]:
        """The units taken, and one after another each of the others that still fits."""
        found = list(taken)
        for unit in others:
            if time.perf_counter() >= until:
                break
            if self._fits([*found, unit]):
                found.append(unit)
        return found

    def _fits(self, taken: Sequence[Unit]) -> bool:
        return self.schedule.peak_bytes(_choice(self.schedule, taken)) <= self.budget_bytes

    def _cost(self, taken: Sequence[Unit]) -> int:
        return self.schedule.cost(_choice(self.schedule, taken))


def _longest_prefix(units: Sequence[Unit], fits: Callable[[Sequence[Unit]], bool]) -> list[Unit] | None:
    """The longest prefix that fits, by bisection, because peaks grow with the saved bytes; None if the empty one does not."""
    if not fits([]):
        return None
    low, high = 0, len(units)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(units[:middle]) else (low, middle - 1)
    return list(units[:low])


def _choice(schedule: Schedule, taken: Iterable[Unit]) -> Choice:
    saved: dict[Region, frozenset[int]] = {region: frozenset() for region in schedule.regions}
    for unit in taken:
        if not unit.ops:
            saved.pop(unit.region, None)
        elif unit.region in saved:
            saved[unit.region] |= unit.ops
    return saved


def _op_units(schedule: Schedule, region: Region) -> list[Unit]:
    """One unit for each op with a result, and one for all random ops.

    A saved op is not run again and draws no random numbers: later random ops would draw other numbers than in the forward, and
    the gradients would be wrong without any error. Therefore all random ops of a region are saved, or none.
    """
    random = frozenset(o for o in region.ops if schedule.graph.ops[o].replay_bytes)
    groups = [frozenset((o,)) for o in region.ops if o not in random and _bytes(schedule, o)]
    return [_unit(schedule, region, group) for group in (*groups, random) if group]


def _module_units(schedule: Schedule) -> dict[str, list[Unit]]:
    """Units by relative path of the module; modules with some but not all random ops of a region are left out."""
    found: dict[str, list[Unit]] = {}
    refused: set[str] = set()
    for region in schedule.regions:
        random = {o for o in region.ops if schedule.graph.ops[o].replay_bytes}
        for name in dict.fromkeys(region.modules):
            inside = (o for o, module in zip(region.ops, region.modules, strict=True) if module == name)
            ops = frozenset(o for o in inside if _bytes(schedule, o))
            if name and ops and not (random & ops and random - ops):
                found.setdefault(name, []).append(_unit(schedule, region, ops))
            else:
                refused.add(name)
    return {name: units for name, units in found.items() if name not in refused}


def _without(schedule: Schedule, region: Region) -> Unit:
    """The unit that leaves a region without checkpointing: autograd keeps the values that the backward needs."""
    graph = schedule.graph
    storages = {graph.root[v] for v in region.needed}
    cost = sum(graph.ops[o].cost for o in region.ops)
    return Unit(region, frozenset(), cost, sum(graph.values[v].size_bytes for v in storages))


def _unit(schedule: Schedule, region: Region, ops: frozenset[int]) -> Unit:
    size = sum(_bytes(schedule, o) for o in ops)
    return Unit(region, ops, sum(schedule.graph.ops[o].cost for o in ops), size)


def _bytes(schedule: Schedule, o: int) -> int:
    """Bytes that an op allocates for its results. A view is never saved: it would hold the storage of another op."""
    return sum(schedule.graph.values[v].size_bytes for v in schedule.graph.ops[o].outputs)
