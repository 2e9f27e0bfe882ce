"""Choose the regions to checkpoint and the ops to save within a budget."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from checkmate.core.plan import Plan
from checkmate.regions.blocks import Region
from checkmate.regions.schedule import Choice, Schedule

_MOST_NAMES = 20
"""Modules whose subsets are searched exactly, the most costly ones: the first subset that fits is found among 2**20."""


@dataclass(frozen=True)
class Unit:
    """Ops that are saved together.

    Attributes:
        region: The region.
        ops: The ops; empty to leave the region without checkpointing.
        cost: Cost of their recomputation.
        size_bytes: Bytes of their results.
    """

    region: Region
    ops: frozenset[int]
    cost: int
    size_bytes: int

    @property
    def ratio(self) -> float:
        """Cost that each byte saves."""
        return self.cost / max(1, self.size_bytes)


def save_ops(schedule: Schedule, budget_bytes: int, plan: Plan | None, until: float) -> Choice | None:
    """Choose ops in each region separately. None if no choice was found that keeps the budget.

    Ops are taken in the order of the cost that each byte saves, as long as the peak keeps the budget; then some are exchanged
    for others. A second start takes the ops that a plan computes once, and the better result counts.

    Args:
        schedule: The step.
        budget_bytes: The budget.
        plan: A plan of the graph to start from as well.
        until: Value of ``time.perf_counter()`` at which the search ends.
    """
    units = [unit for region in schedule.regions for unit in (*_op_units(schedule, region), _without(schedule, region))]
    starts: list[list[Unit]] = [[]]
    if plan is not None:
        once = _computed_once(plan)
        starts.append([unit for unit in units if unit.ops and unit.ops <= once])
    return _best_of(schedule, units, starts, budget_bytes, until)


def leave_out_regions(schedule: Schedule, budget_bytes: int, until: float) -> Choice | None:
    """Choose which regions are checkpointed, without saving any op in them. Arguments and result as for `save_ops`."""
    units = [_without(schedule, region) for region in schedule.regions]
    return _best_of(schedule, units, [[]], budget_bytes, until)


def save_modules(schedule: Schedule, budget_bytes: int, until: float) -> tuple[Choice, tuple[str, ...]] | None:
    """Choose modules whose ops are saved, the same in all regions, and exactly: the cheapest set that keeps the budget.

    Sets are tried in the order of their cost until one keeps the budget, or the time is over; then it is the best one found by
    adding one module after the other.

    Args:
        schedule: The step.
        budget_bytes: The budget.
        until: Value of ``time.perf_counter()`` at which the search ends.

    Returns:
        The choice, and the modules relative to each region; None if none keeps the budget.
    """
    units = _module_units(schedule)

    def choice_of(names: Iterable[str]) -> Choice:
        taken = [unit for name in names for unit in units[name]]
        return {r: frozenset(o for u in taken if u.region is r for o in u.ops) for r in schedule.regions}

    if schedule.peak_bytes(choice_of(())) > budget_bytes:
        return None
    cost = {name: sum(unit.cost for unit in found) for name, found in units.items()}
    names = sorted((name for name in units if cost[name]), key=lambda name: (cost[name], name))[-_MOST_NAMES:]
    # Sets of modules that are left out, by their cost: after one comes that with its last module replaced by the next
    # more costly one, and that with the next one added, so that every set is made once (Lawler 1972).
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


def _best_of(
    schedule: Schedule, units: Sequence[Unit], starts: Sequence[Sequence[Unit]], budget_bytes: int, until: float
) -> Choice | None:
    found: list[Choice | None] = []
    for left, start in zip(range(len(starts), 0, -1), starts, strict=True):
        share_s = (until - time.perf_counter()) / left
        found.append(_improved(schedule, units, start, budget_bytes, time.perf_counter() + share_s))
    return min((choice for choice in found if choice is not None), key=schedule.cost, default=None)


def _improved(schedule: Schedule, units: Sequence[Unit], start: Sequence[Unit], budget_bytes: int, until: float) -> Choice | None:
    def fits(taken: Iterable[Unit]) -> bool:
        return schedule.peak_bytes(_choice(schedule, taken)) <= budget_bytes

    def cost(taken: Iterable[Unit]) -> int:
        return schedule.cost(_choice(schedule, taken))

    begun = _longest_prefix(sorted(start, key=lambda unit: -unit.ratio), fits)
    if begun is None:
        return None
    taken = begun
    others = sorted((unit for unit in units if unit not in taken and unit.cost), key=lambda unit: -unit.ratio)
    more = _longest_prefix(others, lambda added: fits([*begun, *added])) or []
    taken = _filled([*begun, *more], others[len(more) :], fits, until)
    better = True
    while better and time.perf_counter() < until:
        better = False
        for unit in sorted(taken, key=lambda unit: unit.ratio):
            if time.perf_counter() >= until:
                break
            rest = [other for other in taken if other is not unit]
            outside = sorted((other for other in units if other not in taken and other.cost), key=lambda other: -other.cost)
            changed = _filled(rest, outside, fits, until)
            if cost(changed) < cost(taken):
                taken, better = changed, True
    return _choice(schedule, taken)


def _longest_prefix(units: Sequence[Unit], fits: Callable[[Sequence[Unit]], bool]) -> list[Unit] | None:
    """The longest prefix that fits, found by bisection, as peaks grow with what is saved; None if not even none does."""
    if not fits([]):
        return None
    low, high = 0, len(units)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(units[:middle]) else (low, middle - 1)
    return list(units[:low])


def _filled(taken: Sequence[Unit], others: Iterable[Unit], fits: Callable[[Sequence[Unit]], bool], until: float) -> list[Unit]:
    """Add each other unit that still fits, one after the other."""
    found = list(taken)
    for unit in others:
        if time.perf_counter() >= until:
            break
        if fits([*found, unit]):
            found.append(unit)
    return found


def _choice(schedule: Schedule, taken: Iterable[Unit]) -> Choice:
    saved: dict[Region, set[int]] = {region: set() for region in schedule.regions}
    for unit in taken:
        if not unit.ops:
            saved.pop(unit.region, None)
        elif unit.region in saved:
            saved[unit.region] |= unit.ops
    return {region: frozenset(ops) for region, ops in saved.items()}


def _op_units(schedule: Schedule, region: Region) -> list[Unit]:
    """One unit for each op with a result, and one for all random ops.

    A saved op is not run again and draws no random numbers: every random op after it would draw others than in the forward, and
    the gradients would be wrong without any error. So all random ops of a region are saved, or none.
    """
    ops = schedule.graph.ops
    random = frozenset(o for o in region.ops if ops[o].replay_bytes)
    groups = [frozenset((o,)) for o in region.ops if o not in random and _bytes(schedule, o)]
    return [_unit(schedule, region, group) for group in (*groups, random) if group]


def _module_units(schedule: Schedule) -> dict[str, list[Unit]]:
    """Units by relative path of the module; none whose random ops are not all the random ops of the region."""
    found: dict[str, list[Unit]] = {}
    refused: set[str] = set()
    for region in schedule.regions:
        random = {o for o in region.ops if schedule.graph.ops[o].replay_bytes}
        for name in dict.fromkeys(region.modules):
            ops = frozenset(
                o for o, module in zip(region.ops, region.modules, strict=True) if module == name and _bytes(schedule, o)
            )
            if name and ops and not (random & ops and random - ops):
                found.setdefault(name, []).append(_unit(schedule, region, ops))
            else:
                refused.add(name)
    return {name: units for name, units in found.items() if name not in refused}


def _without(schedule: Schedule, region: Region) -> Unit:
    """The unit that leaves a region without checkpointing: autograd keeps what the backward needs."""
    graph = schedule.graph
    storages = {_storage(schedule, v) for v in region.needed}
    cost = sum(graph.ops[o].cost for o in region.ops)
    return Unit(region, frozenset(), cost, sum(graph.values[v].size_bytes for v in storages))


def _unit(schedule: Schedule, region: Region, ops: frozenset[int]) -> Unit:
    size = sum(_bytes(schedule, o) for o in ops)
    return Unit(region, ops, sum(schedule.graph.ops[o].cost for o in ops), size)


def _bytes(schedule: Schedule, o: int) -> int:
    """Bytes that an op allocates for its results. A view is never saved: it would hold the storage of another op."""
    return sum(schedule.graph.values[v].size_bytes for v in schedule.graph.ops[o].outputs)


def _storage(schedule: Schedule, value: int) -> int:
    while (base := schedule.graph.values[value].base) is not None:
        value = base
    return value


def _computed_once(plan: Plan) -> set[int]:
    seen: set[int] = set()
    again: set[int] = set()
    for o in plan.order:
        (again if o in seen else seen).add(o)
    return seen - again
