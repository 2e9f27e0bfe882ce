"""The local search over eviction codes, as an object that can be continued.

The kernels are in `repair`; here are their order of use, the parameters, and the way from plans to codes and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from checkmate.core.problem import Problem
from checkmate.solvers.alarm import Flag
from checkmate.solvers.evict.decode import add_interval, encode, list_stages, place_readers, seed_random
from checkmate.solvers.evict.instance import (
    Code,
    Instance,
    Ints,
    Move,
    build_instance,
    build_scratch,
    first_computations,
    with_stages,
)
from checkmate.solvers.evict.repair import (
    Improved,
    Repaired,
    RepairSettings,
    RuinParameters,
    relieve,
    repair,
    ruin,
    ruin_and_repair,
)


class Greedy(NamedTuple):
    """How a first plan is made.

    Attributes:
        duration_exponent: As in `RepairSettings`.
        batch_fraction: As in `RepairSettings`.
        most_ops: Largest graph on which it is tried.
    """

    duration_exponent: float
    batch_fraction: float
    most_ops: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionSearchParameters:
    """Parameters of `Search`.

    Attributes:
        attempts: Greedy plans, made one after another. No exponent is best on all graphs, and each plan takes little
            time beside the search, so that all are made. Fast ones come first: on 10,000 ops they gave a first plan in
            0.02 s, where evicting one value at a time took 17 s, and led to cheaper plans after the same work. On 100,000
            ops at a tenth of their range of budgets an exponent of 0.3 takes a second, and one of 0 seven. Batches of 0.3
            take a tenth of the time of single values: 0.05 s on ResNet-152 at f = 0.1, for an overhead of 1.061 where all of
            the excess at once gives 1.165 to 1.281. Each is left out on graphs on which it takes some seconds.
        first_tries: Greedy plans to make at most, with noise when ``attempts`` are used up. Those beyond ``attempts`` are made
            only while there is no plan.
        first_noise: Noise of the first attempts after ``attempts``.
        first_noise_step: How much it rises with each pass through them: where the near plans fail, look further.
        rounds_per_value: Most decodings of a repair, a value: one that evicts each value a few times has had its chance.
        start_exponent: Duration exponent when a given code is repaired; such codes are nearly within the budget.
        slots: Intervals of absence that a value can have, which limits how often it is computed again for a later stage. Each
            takes 8 bytes a value in each of three codes.
        stretch: Longest plan, as a multiple of the number of ops; a code that decodes to more counts as no plan. Of the plans of
            ``benchmarks/solvers.py`` the longest computes 8.6 times as many ops as its graph has, a unit chain of 32
            layers at 3 % of its range of budgets (`build_scratch` adds room for small graphs), the next longest 4.6 times.
        checks: How often `improve` looks at the clock and lowers the temperature.
        least_decodes: Fewest sequences between two looks.
        ruin: Choices of the kernel.
    """

    attempts: tuple[Greedy, ...] = (
        Greedy(0.3, 1.0),
        Greedy(0.0, 1.0),
        Greedy(0.6, 1.0),
        Greedy(1.0, 1.0),
        Greedy(1.5, 1.0),
        Greedy(0.6, 0.3, 30_000),
        Greedy(1.0, 0.3, 30_000),
        Greedy(0.6, 0.0, 3000),
        Greedy(1.0, 0.0, 3000),
        Greedy(0.0, 0.0, 3000),
    )
    first_tries: int = 40
    first_noise: float = 0.2
    first_noise_step: float = 0.05
    rounds_per_value: int = 20
    start_exponent: float = 0.3
    slots: int = 24
    stretch: int = 8
    checks: int = 20
    least_decodes: int = 8
    ruin: RuinParameters = field(default_factory=RuinParameters)


PARAMETERS = EvictionSearchParameters()


class Search:
    """Greedy plans, and ruin and repair, on one instance.

    Args:
        problem: A problem whose views are folded.
        on_demand: Ops without a stage, computed when another op needs them.
        seed: Seed of the search.
        order: Ops in the order of their stages; the graph's own by default. An op that is listed again has another stage, in
            which it is computed again if what is read of it from there on is not held. Within a stage no op runs twice, and
            what two ops need is held from the one to the other: with more stages there are more plans. So ops of kept values
            that are listed again at the end are computed one after another, in place of all in the one stage of END.
        time_up: Ends kernels when it is raised (`Session.time_up`); by default nothing does.
        moves: Moves of values to and from the host, which the order names as ops from that after END on.
        given: What `build_instance` makes of the problem, if it is there.

    Attributes:
        best_cost: Cost of the best plan so far, or infinite.
        order_bound: Proven extra cost of every plan that computes the targets in their order, as a share.
    """

    def __init__(
        self,
        problem: Problem,
        on_demand: frozenset[int],
        seed: int,
        order: Sequence[int] | None = None,
        time_up: Flag | None = None,
        moves: Sequence[Move] = (),
        given: Instance | None = None,
    ) -> None:
        self.problem = problem
        self._on_demand = on_demand
        self._time_up = time_up
        self._given = given = build_instance(problem) if given is None else given
        listed = np.arange(len(problem.graph.ops)) if order is None else np.array(order, dtype=np.int64)
        self._first_reader = len(given.cost) + len(moves)
        stages, self._readers = _stages(given, listed, self._first_reader)
        # A stage that only reads a value is what a move that does not fetch has.
        moved = np.append(np.array([move.value for move in moves], dtype=np.int64), self._readers[1])
        fetches = np.zeros(len(moved), dtype=np.bool_)
        fetches[: len(moves)] = [move.fetches for move in moves]
        self.instance: Any = with_stages(given, stages, on_demand, moved, fetches)
        self.best_cost = math.inf
        self.order_bound = -math.inf
        self._attempts = 0
        self._budget = float(problem.budget_bytes - problem.graph.resident_bytes)
        self._scratch: Any = build_scratch(self.instance, PARAMETERS.stretch, time_up)
        # Codes and scratch are allocated once; the kernels copy rows between them and allocate next to nothing.
        self._current, self._best, self._trial = self.empty_code(), self.empty_code(), self.empty_code()
        self._random = np.zeros(1, dtype=np.uint64)
        seed_random(self._random, seed)

    @cached_property
    def stage(self) -> dict[int, int]:
        """Stage of each op that has one, END included."""
        return {o: t for t, o in enumerate(self.instance.targets.tolist())}

    @property
    def targets(self) -> list[int]:
        """Ops that have a stage, END left out, in the order of their first computations."""
        targets = self.instance.targets[:-1]
        return targets[targets < self._first_reader].tolist()

    def empty_code(self) -> Code:
        """A code that holds everything."""
        values, slots = len(self.instance.size), PARAMETERS.slots
        return Code(
            np.zeros((values, slots), dtype=np.int32),
            np.zeros((values, slots), dtype=np.int32),
            np.zeros(values, dtype=np.int32),
        )

    def set_budget(self, budget_bytes: int) -> None:
        """Search for another budget from now on, without the best plan so far.

        Args:
            budget_bytes: The budget, resident bytes included.
        """
        self._budget = float(budget_bytes - self.problem.graph.resident_bytes)
        self.best_cost = math.inf

    def first(
        self, tries: int | None = None, out_of_time: Callable[[], bool] = lambda: False, *, stop_at_first: bool = False
    ) -> bool:
        """Look for plans from the code that holds everything: greedy ones, then the same with noise until one fits.

        A call after the first plan goes on where the one before stopped.

        Args:
            tries: Most attempts; `EvictionSearchParameters.first_tries` by default.
            out_of_time: Called between attempts.
            stop_at_first: Whether the first plan is enough.

        Returns:
            Whether there is a plan.
        """
        p = PARAMETERS
        if math.isinf(self.best_cost):
            self._attempts = 0
        attempts = [a for a in p.attempts if len(self.problem.graph.ops) <= a.most_ops]
        plain = len(attempts)
        for k in range(self._attempts, p.first_tries if tries is None else tries):
            if (math.isfinite(self.best_cost) and (stop_at_first or k >= plain)) or out_of_time():
                break
            # Each attempt starts from the code that holds everything, and is given up where it costs as much as the best.
            exponent, batch, _ = attempts[k % plain]
            self._trial.used[:] = 0
            self._attempts = k + 1
            self._repair(exponent, 0.0 if k < plain else p.first_noise + p.first_noise_step * (k // plain), batch)
        return math.isfinite(self.best_cost)

    def start_from(self, code: Code) -> bool:
        """Repair a given code with care, one value at a time; a plan cheaper than the best becomes the start of `improve`.

        Args:
            code: The code; left as it is.

        Returns:
            Whether there is such a plan.
        """
        for own, given in zip(self._trial, code, strict=True):
            own[:] = given
        return self._repair(PARAMETERS.start_exponent, 0.0, 0.0)

    def relieve(
        self, code: Code, exponent: float, noise: float, batch: float, cleared: RuinParameters | None = None
    ) -> tuple[float, list[int]]:
        """Evict at the peaks over the budget, and go on elsewhere where nothing can be evicted.

        Args:
            code: The code to start from; left as it is.
            exponent: As `RepairSettings.duration_exponent`.
            noise: As `RepairSettings.noise`.
            batch: As `RepairSettings.batch_fraction`.
            cleared: How much of the code to clear first; by default nothing is.

        Returns:
            The least excess on the way, which is the sum over all computations of the bytes over the budget, and the ops of its
            plan. It is infinite if there is no plan.
        """
        for own, given in zip(self._trial, code, strict=True):
            own[:] = given
        evicted = np.flatnonzero(code.used).astype(np.int32)
        if cleared is not None and len(evicted):
            ruin(self._trial, evicted, len(evicted), len(self.instance.targets), cleared, self._random)
        settings = self._settings(exponent, noise, batch)
        excess = float(relieve(self.instance, self._scratch, self._trial, self._current, settings, self._random))
        return excess, self.realise(self._current) if excess < math.inf else []

    def start_from_order(self, order: Sequence[int]) -> bool:
        """Start from a plan found elsewhere, as near to it as an eviction code comes.

        Args:
            order: Ops of the folded graph in the order of their computations.

        Returns:
            As `start_from`.
        """
        return self.start_from(self.code_of(order))

    def in_order_of(self, order: Sequence[int], seed: int) -> Search:
        """A search whose stages are the first computations of a plan, and that starts from it.

        Ops that are listed again have their other stages at the end. What was on demand gets the stage that the plan gave it,
        but stays so where ops are listed again: the plan may have computed it for those, and its stage would come before all
        of theirs.

        Args:
            order: Ops of the folded graph in the order of their computations.
            seed: Seed of the other search.
        """
        again = list(dict.fromkeys(self._readers[0].tolist()))
        on_demand = self._on_demand if again else frozenset[int]()
        stages = [*first_computations(order), *again]
        other = Search(self.problem, on_demand, seed, stages, self._time_up, given=self._given)
        other.start_from_order(order)
        return other

    def improve(self, decodes: int, temperature: float, out_of_time: Callable[[], bool]) -> bool:
        """Ruin and repair from the best plan for a given amount of work.

        Args:
            decodes: Sequences to decode: a unit of work that does not depend on the machine, so that a run can be repeated.
            temperature: Largest share of the cost by which an iteration may be worse, falling linearly to 0.
            out_of_time: Called between chunks of work; ends the search early.

        Returns:
            Whether a cheaper plan was found.
        """
        if not math.isfinite(self.best_cost):
            return False
        before = self.best_cost
        # A search starts from the best code even if an earlier one ended elsewhere: its temperature starts high again.
        for own, best in zip(self._current, self._best, strict=True):
            own[:] = best
        # The kernel cannot call back, so the clock is looked at and the temperature lowered between chunks of work.
        chunk = max(PARAMETERS.least_decodes, decodes // PARAMETERS.checks)
        state = Improved(before, before, 0)
        while state.decodes < decodes and state.best_cost > 0 and not out_of_time():
            done = state.decodes
            state = Improved(*ruin_and_repair(
                self.instance, self._scratch, self._current, self._best, self._trial, self._budget,
                state.best_cost * temperature * (1 - done / decodes), PARAMETERS.ruin, state, min(decodes, done + chunk),
                self._random,
            ))  # fmt: skip
            if state.decodes == done:  # nothing is evicted, so there is nothing to undo
                break
        self.best_cost = state.best_cost
        return self.best_cost < before

    def order(self) -> list[int]:
        """Ops of the best plan, END left out."""
        return self.realise(self._best)

    def order_and_peak(self) -> tuple[list[int], int]:
        """Ops of the best plan, END left out, and its peak, resident bytes included."""
        length = self._decode(self._best)
        return self._ops(length), int(self._scratch.profile[:length].max()) + self.problem.graph.resident_bytes

    def realise(self, code: Code) -> list[int]:
        """Ops of a code's plan, whatever it peaks at.

        Args:
            code: The code; left as it is.

        Returns:
            Ops in the order of their computations; none if an op that may run once would have to run twice.
        """
        return self._ops(self._decode(code))

    def evict(self, code: Code, value: int, start: int, stop: int) -> bool:
        """Add to a code that a value is not held in stages ``start`` to ``stop``, both included.

        Returns:
            False if the code has no room for one more interval of this value.
        """
        return bool(add_interval(code, value, start, stop))

    def _with_readers(self, order: Ints) -> Ints:
        """An order with the stages that only read, each right after its computation and the stages before it."""
        many = self._readers.shape[1]
        if not many:
            return order
        placed = np.empty(len(order) + many, dtype=np.int64)
        work = np.empty(len(self.instance.cost) + 1, dtype=np.int64), np.empty(len(order), dtype=np.int64)
        place_readers(self.instance, order, self._first_reader, self._readers, work, placed)
        return placed

    def code_of(self, order: Sequence[int]) -> Code:
        """Code that does not hold a value between the last touch of an instance and the making of the next.

        Exact if the order is one of stages with these targets; else what a stage computes beyond them may come out
        at another place in it, and the repair sees to the bytes.

        Args:
            order: Ops of the folded graph in the order of their computations.
        """
        code, placed = self.empty_code(), self._with_readers(np.array(order, dtype=np.int64))
        stage = np.full(len(self.instance.cost), -1, dtype=np.int64)
        stage[self.instance.targets] = np.arange(len(self.instance.targets))
        longest = max(len(stage), len(self.instance.size), len(placed))
        encode(self.instance, stage, placed, tuple(np.empty(longest, dtype=np.int64) for _ in range(3)), code)
        return code

    def _decode(self, code: Code) -> int:
        """Decode a code into the scratch arrays; returns the length with END, or 0 if it has no plan."""
        for own, given in zip(self._trial, code, strict=True):
            own[:] = given
        without_limits = RepairSettings(math.inf, 0.0, 0.0, 0.0, math.inf, 0)
        return Repaired(*repair(self.instance, self._scratch, self._trial, without_limits, self._random)).length

    def _ops(self, length: int) -> list[int]:
        """Ops of what was decoded, without END and the stages that only read."""
        sequence = self._scratch.sequence[: max(0, length - 1)]
        return sequence[sequence < self._first_reader].tolist()

    def _repair(self, exponent: float, noise: float, batch: float) -> bool:
        """Repair the working code; keep it as the best if it is cheaper."""
        settings = self._settings(exponent, noise, batch)
        repaired = Repaired(*repair(self.instance, self._scratch, self._trial, settings, self._random))
        if repaired.found:
            self.best_cost = repaired.cost
            for best, own in zip(self._best, self._trial, strict=True):
                best[:] = own
        return repaired.found

    def _settings(self, exponent: float, noise: float, batch: float) -> RepairSettings:
        rounds = PARAMETERS.rounds_per_value * len(self.instance.size)
        return RepairSettings(self._budget, exponent, noise, batch, self.best_cost, rounds)


def _stages(given: Instance, order: Ints, first_reader: int) -> tuple[Ints, Ints]:
    """Stages of an order, and the op, the value and the number of later listings of those that only read (`list_stages`)."""
    ops, values = len(given.cost), len(given.size)
    work = np.empty(ops, dtype=np.int64), np.empty(ops, dtype=np.int64), np.empty(values, dtype=np.uint8)
    stages = np.empty(len(order) + values, dtype=np.int64)
    readers = np.empty((3, len(stages)), dtype=np.int64)
    many, reading = list_stages(given, order, first_reader, work, stages, readers)
    return stages[len(stages) - many :], np.ascontiguousarray(readers[:, len(stages) - reading :])
