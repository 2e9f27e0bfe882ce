"""Plans of one search, crossed with each other.

Ruin and repair ends in plans that differ from run to run: each found good intervals for some part of the step. A child takes the
intervals of one plan in some part of the step, or for some of the values, and those of another plan elsewhere; it is repaired and
improved for a moment. This is the hybrid genetic search of Vidal et al. (2012), the method of PyVRP for vehicle routing, on
eviction codes. On ResNet-50 at f = 0.03 four seeds of ruin and repair end at overheads of 1.164 to 1.178 after 16 seconds each,
and six populations at 1.158 to 1.166 after 15.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from checkmate.solvers.evict.decode import cross_stages
from checkmate.solvers.evict.instance import Code
from checkmate.solvers.evict.search import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class PopulationParameters:
    """Parameters of `Population`.

    Attributes:
        size: Most members.
        agreeing: So many plans that cost nearly the same end the growth.
        spread: Share of the cost by which they may differ.
        member_divisor: Ruin and repair of a new member takes one part in so many of the work.
        child_divisor: The same for a child.
        temperature: Start of the temperature of a new member, as a share of the cost.
        child_temperature: The same for a child, which starts from what two searches found.
        patience: Times in a row that new members end in no cheaper plan after which to stop.
        apart: Share of the cost by which members differ at least.
        near: Share of the cost by which a child may be more expensive than the best member for that one to adopt its intervals.
        renewal: Children in a row that bring no cheaper plan after which members are made from nothing.
    """

    size: int = 5
    agreeing: int = 3
    spread: float = 2e-5
    member_divisor: int = 16
    child_divisor: int = 540
    temperature: float = 2e-3
    child_temperature: float = 1e-3
    patience: int = 6
    apart: float = 3e-5
    near: float = 1e-3
    renewal: int = 60


PARAMETERS = PopulationParameters()


class Member(NamedTuple):
    """A plan.

    Attributes:
        cost: Its cost.
        code: Its eviction code.
    """

    cost: float
    code: Code


class Population:
    """Members of one search, the cheapest first.

    Args:
        search: The search, with its plan, which is the first member.
        work: Sequences worth trying (`local_search.suggested_decodes`).
        seed: Seed of the choices.

    Attributes:
        search: The search; it always has the cheapest plan between two calls.
        members: The members.
    """

    def __init__(self, search: Search, work: int, seed: int) -> None:
        self.members = [Member(*search.best())]
        self.search = search
        self._work = work
        self._random = Random(seed)

    def grow(self, out_of_time: Callable[[], bool]) -> bool:
        """Make plans from nothing until there are enough.

        Returns:
            Whether to cross them. Not if the cheapest cost nearly the same: the search finds one plan again and again.
        """
        costs, agree = [self.members[0].cost], False
        while len(costs) < PARAMETERS.size and not agree and not out_of_time():
            cost, code = self._made_anew(out_of_time)
            self.add(cost, code)
            costs = sorted([*costs, cost])
            agree = len(costs) >= PARAMETERS.agreeing and costs[PARAMETERS.agreeing - 1] <= costs[0] * (1 + PARAMETERS.spread)
        self._search_on()
        return not agree

    def evolve(self, out_of_time: Callable[[], bool]) -> None:
        """Cross the members until nothing is gained by it.

        Where they are stuck, the best is set aside and others are made from nothing. These are crossed with each other first:
        beside a cheaper plan all members would soon be its children. Where they are stuck too, it comes back among them.
        """
        best, aside, stuck = self.members[0], None, 0
        while len(self.members) > 1 and stuck < PARAMETERS.patience and not out_of_time():
            self._cross(out_of_time)
            stuck += 1
            if self.members[0].cost < best.cost:
                best, stuck = self.members[0], 0
            if aside is None:
                aside = self.members[0]
                self._start_anew(out_of_time)
            else:
                self._welcome(*aside)
                aside = None
        if best.cost < self.members[0].cost:
            self._welcome(*best)
        self._search_on()

    def _cross(self, out_of_time: Callable[[], bool]) -> None:
        """Make children until they bring no cheaper plan for a while."""
        without_gain = 0
        while without_gain < PARAMETERS.renewal and not out_of_time():
            before = self.members[0].cost
            self._take(*self._child(out_of_time))
            without_gain = 0 if self.members[0].cost < before else without_gain + 1

    def _start_anew(self, out_of_time: Callable[[], bool]) -> None:
        """Put plans made from nothing in the place of all members."""
        made = [self._made_anew(out_of_time) for _ in range(PARAMETERS.size)]
        self.members = []
        for cost, code in made:
            self.add(cost, code)

    def _take(self, cost: float, code: Code) -> None:
        """Take a plan, and let the best member adopt intervals of one that costs nearly as little."""
        self.add(cost, code)
        best = self.members[0]
        if best.cost < cost <= best.cost * (1 + PARAMETERS.near):
            self.search.restart_from(best.code)
            if self.search.adopt(code):
                self.add(*self.search.best())

    def _search_on(self) -> None:
        """Give the search the cheapest plan: it is within the budget, so that there is nothing to repair."""
        self.search.restart_from(self.members[0].code)

    def moved_to(self, search: Search) -> Population:
        """These plans as members of a search with other stages, as near to them as its codes come.

        Args:
            search: The other search, with its plan.
        """
        orders = [self.search.realise(member.code) for member in self.members]
        moved = Population(search, self._work, self._random.randrange(1 << 32))
        for order in orders:
            search.forget()
            if search.start_from_order(order):
                moved.add(*search.best())
        moved._search_on()
        return moved

    def take_in(self, code: Code, out_of_time: Callable[[], bool]) -> None:
        """Repair and improve a code that was found elsewhere, and give it the place of the dearest member, whatever it costs."""
        self.search.restart_from(code)
        self._welcome(*self._annealed(out_of_time))
        self._search_on()

    def _welcome(self, cost: float, code: Code) -> None:
        """Take a plan, in place of the dearest member if need be, whatever it costs."""
        if math.isfinite(cost) and not self.add(cost, code):
            self.members = [*self.members[: PARAMETERS.size - 1], Member(cost, code)]

    def add(self, cost: float, code: Code) -> bool:
        """Take a plan in place of those that cost little more, or of the dearest if there is no room.

        One that costs a little more than a member is not taken: mostly it is the same plan with a small change, and the
        population would soon be one plan.

        Returns:
            Whether it is taken.
        """
        full = len(self.members) >= PARAMETERS.size
        if not math.isfinite(cost) or (full and cost >= self.members[-1].cost):
            return False
        alike = [member.cost for member in self.members if abs(member.cost - cost) <= PARAMETERS.apart * cost]
        if min(alike, default=math.inf) <= cost:
            return False
        others = [member for member in self.members if member.cost not in alike]
        self.members = sorted([*others, Member(cost, code)], key=lambda member: member.cost)[: PARAMETERS.size]
        return True

    def _made_anew(self, out_of_time: Callable[[], bool]) -> tuple[float, Code]:
        search = self.search
        search.forget()
        if not search.first(out_of_time=out_of_time):
            search.restart_from(self.members[0].code)
        return self._annealed(out_of_time)

    def _annealed(self, out_of_time: Callable[[], bool]) -> tuple[float, Code]:
        """The search's plan after the ruin and repair of a new member."""
        self.search.improve(self._work // PARAMETERS.member_divisor, PARAMETERS.temperature, out_of_time)
        return self.search.best()

    def _child(self, out_of_time: Callable[[], bool]) -> tuple[float, Code]:
        """Cross two members, one of them the better of two that were drawn; repair and improve the result."""
        search, random, count = self.search, self._random, len(self.members)
        a = min(random.randrange(count), random.randrange(count))
        b = (a + 1 + random.randrange(count - 1)) % count
        search.restart_from(self._crossed(self.members[a].code, self.members[b].code))
        search.improve(self._work // PARAMETERS.child_divisor, PARAMETERS.child_temperature, out_of_time)
        return search.best()

    def _crossed(self, a: Code, b: Code) -> Code:
        """Code ``a`` with the intervals of ``b`` for some neighbouring values, in some stages, or from some stage on."""
        random, values, stages = self._random, len(a.used), len(self.search.instance.targets)
        kind = random.randrange(3)
        if kind == 0:
            start = random.randrange(values)
            stop = start + random.randrange(1, max(2, values // 2))
            child = Code(*(rows.copy() for rows in a))
            for own, other in zip(child, b, strict=True):
                own[start:stop] = other[start:stop]
            return child
        first = random.randrange(stages)
        last = stages if kind == 1 else min(stages, first + random.randrange(1, max(2, stages // 2)))
        child = self.search.empty_code()
        cross_stages(a, b, first, last, child)
        return child
