"""The calibration loop finds a fitting plan where one is to be found, stops, and never returns one that is over the limit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from checkmate import Graph, InfeasibleBudgetError, Plan, evaluate
from checkmate.core.errors import PlanNotFoundError
from checkmate.frontend.calibration import Calibration, Offset, Policy, Proportional, Trial, calibrate

MOST_BYTES = 100_000
KEEP_ALL = 10_000
LEAST_PLAN = 2_000

Compiler = Callable[[int], int]
"""Measured bytes of a plan, from its live bytes."""


def cost(planned_bytes: int) -> int:
    """More for a smaller plan; that of keeping everything is 1,000."""
    return 1000 + max(0, KEEP_ALL - planned_bytes) // 10


def calibrated(policy: Policy, limit_bytes: int, compiler: Compiler, steps: int = 1, most: int = 20) -> Calibration[str | None]:
    """The trials on a graph with a plan for every multiple of ``steps`` from the smallest plan to keeping everything."""
    calibration: Calibration[str | None] = Calibration(limit_bytes, policy)

    def replan(target: int) -> Any:  # in place of a result, its planned bytes
        assert len(calibration.trials) < 20, "a policy stops"
        planned = min(target, KEEP_ALL) // steps * steps
        if planned < LEAST_PLAN:
            raise PlanNotFoundError("none", hint="raise it")
        return planned

    def measure(target: int, planned: Any) -> Trial[str | None]:
        overhead = cost(planned) / 1000
        figures = {"planned_bytes": planned, "needed_bytes": compiler(planned), "cost": cost(planned), "overhead": overhead}
        return Trial(target_bytes=target, outcome="ran", **figures)

    calibrate(calibration, replan, measure, lambda: len(calibration.trials) >= most)
    return calibration


COMPILERS: dict[str, Compiler] = {
    "exact": lambda planned: planned,
    "adds 500": lambda planned: planned + 500,
    "rounds to 512": lambda planned: -(-planned // 512) * 512,
    "adds a tenth": lambda planned: planned * 11 // 10,
    "saves a fifth": lambda planned: planned * 4 // 5,
    "adds a fifth and 300": lambda planned: planned * 6 // 5 + 300,
}
POLICIES = {"offset": Offset(), "proportional": Proportional(least_cost=1000)}


@pytest.mark.parametrize("limit", [4_000, 6_500, 9_000])
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_fitting_plan_is_found(policy: str, compiler: str, limit: int) -> None:
    """And it uses most of the budget: the plan is the cheapest of those that were tried, and near the limit."""
    found = calibrated(POLICIES[policy], limit, COMPILERS[compiler])
    best = found.best()
    assert best is not None
    assert best.needed_bytes is not None
    assert 0.75 * limit <= best.needed_bytes <= limit
    assert best.cost == min(t.cost for t in found.trials if t.within(limit))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_stops_and_never_returns_a_trial_over_the_limit(policy: str) -> None:
    """Whatever the compiler does, also where it is not monotone and where no plan fits."""
    rng = random.Random(0)
    for _ in range(300):
        limit, noise = rng.randrange(500, 12_000), rng.choice([0, 10, 1000, 5000])
        gain, more = rng.uniform(0.3, 2.0), rng.randrange(-500, 3000)
        drawn: dict[int, int] = {}

        def compiler(planned: int) -> int:
            return drawn.setdefault(planned, max(0, int(gain * planned) + more + rng.randrange(-noise, noise + 1)))  # noqa: B023

        found = calibrated(POLICIES[policy], limit, compiler, rng.choice([1, 100, 1500]))
        assert len(found.trials) <= POLICIES[policy].most_trials
        best = found.best()
        assert best is None or (best.needed_bytes is not None and best.needed_bytes <= limit)
        assert (best is None) == (not any(t.within(limit) for t in found.trials))


def test_keeping_everything_that_fits_ends_the_search() -> None:
    """No plan is cheaper."""
    for policy in POLICIES.values():
        found = calibrated(policy, 30_000, COMPILERS["exact"])
        assert len(found.trials) == 1
        assert found.trials[0].overhead == 1.0


def test_an_offset_halves_the_way_where_no_plan_was_found() -> None:
    """A correction that asks for too little is no reason to give up."""
    # Live bytes above 2,100 add 3,000; below it they add none. No plan is below 2,000.
    found = calibrated(Offset(headroom=0), 3_000, lambda planned: planned + (3_000 if planned > 2_100 else 0))
    assert any(t.planned_bytes is None for t in found.trials)
    assert all(t.target_bytes > 0 for t in found.trials if t.planned_bytes is not None)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_search_without_hope_ends(policy: str) -> None:
    """After a trial that does not keep the limit; one that keeps it is followed by others as ever."""
    assert len(calibrated(POLICIES[policy], 3_000, lambda planned: planned + 20_000, most=2).trials) == 2
    assert len(calibrated(POLICIES[policy], 6_000, COMPILERS["saves a fifth"], most=1).trials) > 1


def test_resident_bytes_are_no_part_of_the_multiple() -> None:
    """Of a step with resident bytes a compiler multiplies the others."""
    alone, resident = (Proportional(resident_bytes=bytes_) for bytes_ in (0, 50_000))
    trial: Trial[None] = Trial(target_bytes=6_000, planned_bytes=6_000, needed_bytes=7_200, cost=1400, outcome=None)
    moved = replace(trial, target_bytes=56_000, planned_bytes=56_000, needed_bytes=57_200)
    target = alone.next_target([trial], 6_000)
    assert target is not None
    assert resident.next_target([moved], 56_000) == target + 50_000


def test_an_offset_asks_for_no_less_than_nothing() -> None:
    """An allocator may add more than the limit; a planner refuses zero bytes, and cannot read a negative amount."""
    found = calibrated(Offset(), 3_000, lambda planned: planned + 20_000)
    assert [t.target_bytes for t in found.trials][:2] == [3_000, 0]
    assert found.best() is None


def test_room_is_used() -> None:
    """A compiler that needs less than the plan lets a cheaper plan fit."""
    saves = COMPILERS["saves a fifth"]
    more = calibrated(Offset(), 6_000, saves)
    assert len(more.trials) > 1
    assert more.best() == min(more.trials, key=lambda t: t.cost if t.within(6_000) else MOST_BYTES)


def test_headroom_is_a_share_of_what_plans_can_change() -> None:
    """Resident bytes do not move from step to step."""
    assert Offset(headroom=0.1).aim_bytes(1000) == 900
    assert Offset(headroom=0.1, resident_bytes=800).aim_bytes(1000) == 980
    assert Offset(headroom=0.1, resident_bytes=2000).aim_bytes(1000) == 1000


def test_the_best_trial_within_another_limit() -> None:
    """A front end prefers a plan that leaves headroom, and takes one that does not if there is no other."""
    calibration = Calibration[str](100, Offset())
    for needed, price in ((99, 1), (90, 2), (80, 2), (120, 0)):
        calibration.record(Trial(target_bytes=100, planned_bytes=needed, needed_bytes=needed, cost=price, outcome=str(needed)))
    assert [t.outcome if (t := calibration.best(limit)) else None for limit in (None, 94, 70)] == ["99", "90", None]


def test_a_trial_of_a_result_has_its_figures() -> None:
    """What a front end adds is the measurement."""
    graph = Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[(0, 1)], kept=[1])
    result = evaluate(graph, Plan.from_order(graph, [0, 1]))
    trial = Trial.of(8, result, 7, "step")
    assert (trial.target_bytes, trial.planned_bytes, trial.needed_bytes, trial.cost) == (8, 6, 7, 2)
    assert (trial.overhead, trial.measured, trial.outcome) == (1.0, True, "step")
    assert not Trial(target_bytes=8, outcome=None).within(10**9)


def test_the_refusal_names_the_smallest_measured_peak() -> None:
    """It is the budget to raise to; without any measurement the planner's own error says more."""
    calibration = Calibration[str | None](4096, Offset())
    cause = PlanNotFoundError("none within 4 KiB", hint="raise it")
    calibration.record(Trial(target_bytes=4096, outcome=None))
    assert calibration.refusal(cause) is cause
    for needed in (6144, 5120):
        calibration.record(Trial(target_bytes=1, planned_bytes=1, needed_bytes=needed, cost=1, outcome="ran"))
    error = calibration.refusal(InfeasibleBudgetError("no", floor_bytes=300, binding_op="mm"))
    assert isinstance(error, InfeasibleBudgetError)
    assert (error.budget_bytes, error.smallest_bytes, error.floor_bytes, error.binding_op) == (4096, 5120, 300, "mm")
    assert "5.00 KiB" in error.message
    assert "at least 5" in error.hint
