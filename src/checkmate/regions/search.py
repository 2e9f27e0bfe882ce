"""Choose the regions to checkpoint and the ops to save within a budget."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from checkmate.core.plan import Plan
from checkmate.regions.blocks import Choice, Region, Schedule

Save = Literal["ops", "modules", "nothing"]


@dataclass(frozen=True, eq=False)
class Unit:
    """Ops of regions that are saved together; no ops leave a region without checkpointing."""

    ops: Mapping[Region, frozenset[int]]
    cost: int  # of their recomputation
    size_bytes: int  # of their results
    module: str = ""  # path of their module in each region, if they are all of its ops

    @property
    def ratio(self) -> float:
        """Cost saved per byte."""
        return self.cost / max(1, self.size_bytes)


def units_of(schedule: Schedule, save: Save) -> list[Unit]:
    """The units for a kind of values to save: single ops in each region, the same modules in all regions, or nothing."""
    if save == "modules":
        return _module_units(schedule)
    units = [unit for region in schedule.regions if save == "ops" for unit in _op_units(schedule, region)]
    return [*units, *(_without(schedule, region) for region in schedule.regions)]


def choose(schedule: Schedule, units: Sequence[Unit], budget_bytes: int, plan: Plan | None, until: float) -> list[Unit] | None:
    """Choose units, until ``time.perf_counter()``. None if no choice was found that keeps the budget.

    Units are taken in the order of the cost saved per byte, as long as the peak keeps the budget; then some are exchanged for
    others. A second start takes the ops that a plan computes once. The better result is returned.
    """
    search = _Exchange(schedule, units, budget_bytes)
    times = Counter(() if plan is None else plan.order)
    once = [unit for unit in units if {times[o] for ops in unit.ops.values() for o in ops} == {1}]
    found = search.improved([], (time.perf_counter() + until) / 2 if once else until)
    other = search.improved(once, until) if once else None
    return min((taken for taken in (found, other) if taken is not None), key=search.cost, default=None)


@dataclass(frozen=True)
class _Exchange:
    """A local search for the units to save: first those that save most cost per byte, then exchanges of each for others."""

    schedule: Schedule
    units: Sequence[Unit]
    budget_bytes: int

    def improved(self, start: Sequence[Unit], until: float) -> list[Unit] | None:
        """The best units found from as many units of a start as fit."""
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
                if self.cost(changed) < self.cost(taken):
                    taken, better = changed, True
        return taken

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
        return self.schedule.peak_bytes(choice_of(self.schedule, taken)) <= self.budget_bytes

    def cost(self, taken: Sequence[Unit]) -> int:
        """Cost of the recomputations that are left."""
        return self.schedule.cost(choice_of(self.schedule, taken))


def _longest_prefix(units: Sequence[Unit], fits: Callable[[Sequence[Unit]], bool]) -> list[Unit] | None:
    """The longest prefix that fits, by bisection, because peaks grow with the saved bytes; None if the empty one does not."""
    if not fits([]):
        return None
    return list(units[: bisect_left(range(1, len(units) + 1), True, key=lambda count: not fits(units[:count]))])


def choice_of(schedule: Schedule, units: Iterable[Unit]) -> Choice:
    """The choice that saves some units; all other ops of all regions are recomputed."""
    saved: dict[Region, frozenset[int]] = {region: frozenset() for region in schedule.regions}
    for unit in units:
        for region, ops in unit.ops.items():
            if not ops:
                saved.pop(region, None)
            elif region in saved:
                saved[region] |= ops
    return saved


def _op_units(schedule: Schedule, region: Region) -> list[Unit]:
    """One unit for each op with a result, and one for all random ops.

    A saved op is not run again and draws no random numbers: later random ops would draw other numbers than in the forward, and
    the gradients would be wrong without any error. Therefore all random ops of a region are saved, or none.
    """
    random = _random(schedule, region)
    groups = [frozenset((o,)) for o in region.ops if o not in random and _bytes(schedule, o)]
    return [_unit(schedule, {region: group}) for group in (*groups, random) if group]


def _module_units(schedule: Schedule) -> list[Unit]:
    """Units by relative path of the module; modules with some but not all random ops of a region are left out."""
    found: dict[str, dict[Region, frozenset[int]]] = {}
    refused = {""}
    for region in schedule.regions:
        random = _random(schedule, region)
        for name in dict.fromkeys(region.modules):
            inside = (o for o, module in zip(region.ops, region.modules, strict=True) if module == name)
            ops = frozenset(o for o in inside if _bytes(schedule, o))
            found.setdefault(name, {})[region] = ops
            if not ops or (random & ops and random - ops):
                refused.add(name)
    return [_unit(schedule, ops, name) for name, ops in found.items() if name not in refused]


def _random(schedule: Schedule, region: Region) -> frozenset[int]:
    return frozenset(o for o in region.ops if schedule.graph.ops[o].replay_bytes)


def _without(schedule: Schedule, region: Region) -> Unit:
    """The unit that leaves a region without checkpointing: autograd keeps the values that the backward needs."""
    graph = schedule.graph
    storages = {graph.root[v] for v in region.needed}
    cost = sum(graph.ops[o].cost for o in region.ops)
    return Unit({region: frozenset()}, cost, sum(graph.values[v].size_bytes for v in storages))


def _unit(schedule: Schedule, ops: Mapping[Region, frozenset[int]], module: str = "") -> Unit:
    every = [o for part in ops.values() for o in part]
    cost, size = sum(schedule.graph.ops[o].cost for o in every), sum(_bytes(schedule, o) for o in every)
    return Unit(ops, cost, size, module)


def _bytes(schedule: Schedule, o: int) -> int:
    """Bytes that an op allocates for its results. A view is never saved: it would hold the storage of another op."""
    return sum(schedule.graph.values[v].size_bytes for v in schedule.graph.ops[o].outputs)
