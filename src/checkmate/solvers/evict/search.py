"""The search over eviction codes, as an object with a current, a best and a working code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from checkmate.core.problem import Problem
from checkmate.solvers.evict.decode import add_interval, seed_random
from checkmate.solvers.evict.instance import build_instance, build_scratch
from checkmate.solvers.evict.repair import COST, DECODES, LENGTH, repair, ruin_and_repair

Code = tuple[Any, Any, Any]
"""Eviction intervals: low and high ``[value, slot]``, count ``[value]``."""

_ATTEMPTS = ((0.0, 1.0), (0.3, 1.0), (0.6, 1.0), (1.0, 1.0), (1.5, 1.0), (0.0, 0.0), (0.6, 0.0))
"""Weight of how long a value relieves the excess, and haste, of greedy plans."""
_CAREFUL_OPS = 3000
"""On larger graphs a greedy plan made with care takes seconds, and is no better."""
_SLOTS = 24


class Search:
    """Ruin and repair on one instance.

    Args:
        problem: A problem whose views are folded.
        on_demand: Ops that run only when somebody asks.
        seed: Seed of the search.
        order: Order of first computations; the graph's own by default.

    Attributes:
        stage: Stage of each target op.
        best_cost: Cost of the best plan so far, or infinite.
        order_bound: Proven extra cost of every plan that computes the targets in their order, as a share.
    """

    def __init__(self, problem: Problem, on_demand: frozenset[int], seed: int, order: Sequence[int] | None = None) -> None:
        self.problem = problem
        self.instance: Any = build_instance(problem, on_demand, order)
        self.stage = {int(o): t for t, o in enumerate(self.instance.targets)}
        self.best_cost = math.inf
        self.order_bound = -math.inf
        self._budget = float(problem.budget_bytes - problem.graph.resident_bytes)
        self._scratch: Any = build_scratch(self.instance)
        self._current, self._best, self._trial = self.empty_code(), self.empty_code(), self.empty_code()
        self._random = np.zeros(1, dtype=np.uint64)
        self._facts = np.zeros(8)
        seed_random(self._random, seed)

    @property
    def targets(self) -> list[int]:
        """Ops that are computed in their own turn, END left out."""
        return self.instance.targets[:-1].tolist()

    def empty_code(self) -> Code:
        """A code that holds everything."""
        values = len(self.instance.size)
        return (
            np.zeros((values, _SLOTS), dtype=np.int32),
            np.zeros((values, _SLOTS), dtype=np.int32),
            np.zeros(values, dtype=np.int32),
        )

    def set_budget(self, budget_bytes: int) -> None:
        """Search for another budget from now on; forgets the best plan."""
        self._budget = float(budget_bytes - self.problem.graph.resident_bytes)
        self.best_cost = math.inf

    def first(self, tries: int = 40, out_of_time: Callable[[], bool] = lambda: False, *, settle: bool = False) -> bool:
        """Look for plans from nothing: in haste with several weights, then with care, then with noise.

        Args:
            tries: Most attempts; without ``settle`` the noisy ones stop at the first plan.
            out_of_time: Called between attempts.
            settle: Whether the first plan is enough.
        """
        plain = len(_ATTEMPTS) if len(self.instance.cost) <= _CAREFUL_OPS else sum(haste == 1.0 for _, haste in _ATTEMPTS)
        for k in range(tries):
            if (math.isfinite(self.best_cost) and (settle or k >= plain)) or out_of_time():
                break
            power, haste = _ATTEMPTS[k % plain]
            self._clear(self._trial)
            self._repair(power, 0.0 if k < plain else 0.2 + 0.05 * (k // plain), haste)
        return math.isfinite(self.best_cost)

    def start_from(self, code: Code) -> bool:
        """Repair a given code; what is cheaper than the best becomes the start of `improve`."""
        for own, given in zip(self._trial, code, strict=True):
            own[:] = given
        return self._repair(0.3, 0.0, 0.0)

    def start_from_order(self, order: Sequence[int]) -> bool:
        """Start from a plan that is there already, as near to it as an eviction code comes."""
        return self.start_from(self._code_of(order))

    def improve(self, decodes: int, heat: float, out_of_time: Callable[[], bool]) -> bool:
        """Ruin and repair from the best plan for a given amount of work.

        Args:
            decodes: Sequences to decode; the unit of work, so that a run can be repeated exactly.
            heat: Share of the cost by which a step may be worse, cooling to nothing.
            out_of_time: Called now and then; ends the search early.

        Returns:
            Whether a cheaper plan was found.
        """
        if not math.isfinite(self.best_cost):
            return False
        before = self.best_cost
        for own, best in zip(self._current, self._best, strict=True):
            own[:] = best
        costs = np.array([before, before])
        self._facts[DECODES] = 0
        while self._facts[DECODES] < decodes and costs[1] > 0 and not out_of_time():
            done = float(self._facts[DECODES])
            limit = min(float(decodes), done + max(8, decodes // 20))
            ruin_and_repair(
                self.instance, self._scratch, *self._current, *self._best, *self._trial,
                self._budget, 1 << 30, costs[1] * heat * (1 - done / decodes), self._random, costs, self._facts, limit,
            )  # fmt: skip
            if self._facts[DECODES] == done:
                break
        self.best_cost = float(costs[1])
        return self.best_cost < before

    def order(self) -> list[int]:
        """Ops of the best plan, END left out."""
        return self.realise(self._best)

    def realise(self, code: Code) -> list[int]:
        """Ops of a code's plan, whatever it peaks at; empty if an op that may run once would run twice."""
        for own, given in zip(self._trial, code, strict=True):
            own[:] = given
        facts = np.zeros(8)
        if not repair(self.instance, self._scratch, *self._trial, math.inf, 0.0, 0.0, 0.0, math.inf, 0, self._random, facts):
            return []
        return self._scratch.sequence[: int(facts[LENGTH]) - 1].tolist()

    def evict(self, code: Code, value: int, start: int, stop: int) -> bool:
        """Add to a code that a value is not held in stages ``start`` to ``stop``."""
        return bool(add_interval(*code, value, start, stop))

    def _code_of(self, order: Sequence[int]) -> Code:
        """Code that does not hold a value between the last touch of an instance and the making of the next."""
        instance, code = self.instance, self.empty_code()
        first = {o: p for p, o in reversed(list(enumerate(order)))}
        stages: list[int] = []
        stage = len(instance.targets) - 1
        for p in range(len(order) - 1, -1, -1):
            if first[order[p]] == p:
                stage = self.stage.get(order[p], stage)
            stages.append(stage)
        touched: dict[int, int] = {}
        for o, stage in zip(order, reversed(stages), strict=True):
            for v in instance.reads[instance.read_start[o] : instance.read_start[o + 1]].tolist():
                touched[v] = stage
            for v in instance.writes[instance.write_start[o] : instance.write_start[o + 1]].tolist():
                if v in touched:
                    self.evict(code, v, touched[v] + 1, stage)
                touched[v] = stage
        return code

    def _clear(self, code: Code) -> None:
        code[2][:] = 0

    def _repair(self, power: float, noise: float, haste: float) -> bool:
        rounds = 20 * len(self.instance.size)
        found = repair(
            self.instance, self._scratch, *self._trial,
            self._budget, power, noise, haste, self.best_cost, rounds, self._random, self._facts,
        )  # fmt: skip
        if found:
            self.best_cost = float(self._facts[COST])
            for best, own in zip(self._best, self._trial, strict=True):
                best[:] = own
        return bool(found)
