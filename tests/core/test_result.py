"""Limits are checked where they enter; results and endings are plain values."""

from __future__ import annotations

import math

import pytest

from checkmate import Limits, MinBudget, NoPlan, OptionError, Plan, Reason, Result, Termination


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"time_s": 0}, "time_s=0 must be more than zero seconds, or None"),
        ({"time_s": -1.5}, "time_s=-1.5 must be more than zero seconds, or None"),
        ({"time_s": math.nan}, "time_s=nan must be more than zero seconds, or None"),
        ({"gap": -0.1}, "gap=-0.1 must be a share from 0 to less than 1"),
        ({"gap": 1}, "gap=1 must be a share from 0 to less than 1"),
        ({"gap": math.nan}, "gap=nan must be a share from 0 to less than 1"),
        ({"threads": 0}, "threads=0 must be one or more"),
    ],
    ids=repr,
)
def test_a_limit_out_of_range_is_refused(limits, says):
    """The message has the name, the value and the range."""
    with pytest.raises(OptionError) as caught:
        Limits(**limits)
    assert str(caught.value) == says


@pytest.mark.parametrize(
    "limits", [{"time_s": None}, {"time_s": 1e-9}, {"time_s": math.inf}, {"gap": 0}, {"gap": 0.999}, {"threads": 1}], ids=repr
)
def test_the_ends_of_a_range_are_in_it(limits):
    """No time limit is None; an exact solve has gap 0."""
    assert Limits(**limits)


def test_by_default_a_solve_takes_a_minute_on_one_thread():
    """Half a per cent is finer than costs are known; the same seed gives the same plan."""
    limits = Limits()
    assert (limits.time_s, limits.gap, limits.threads, limits.seed, limits.target_cost) == (60.0, 0.005, 1, 0, None)


def test_an_ending_without_words_is_a_reason_alone():
    """Nothing limits a solve that ended by itself."""
    assert Termination(Reason.OPTIMAL) == Termination(Reason.OPTIMAL, "", "")
    assert [reason.value for reason in Reason] == ["optimal", "feasible", "infeasible", "not found"]


def test_a_result_without_history_has_none():
    """Two results of the same numbers are equal."""

    def result() -> Result:
        return Result(
            plan=None, cost=None, overhead=None, peak_bytes=None, budget_bytes=1, bound=0.0, gap=None,
            termination=Termination(Reason.NOT_FOUND), solver="x", elapsed_s=0.0,
        )  # fmt: skip

    assert result() == result()
    assert (result().history, result().remarks) == ((), ())


def smallest(peak_bytes: int, floor_bytes: int) -> MinBudget:
    """A smallest budget with these figures; its plan is of no interest here."""
    return MinBudget(
        plan=Plan(()), cost=1, overhead=1.0, peak_bytes=peak_bytes, floor_bytes=floor_bytes, binding_op="mm", why="mm needs it",
        elapsed_s=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("peak_bytes", "floor_bytes", "gap", "text"),
    [
        (2048, 1024, 0.5, "2.00 KiB (no plan needs less than 1.00 KiB): mm needs it"),
        (1024, 1024, 0.0, "1.00 KiB (proven): mm needs it"),
        (0, 0, 0.0, "0 B (proven): mm needs it"),
        (4, 3, 0.25, "4 B (no plan needs less than 3 B): mm needs it"),
    ],
)
def test_a_smallest_budget_says_how_far_from_the_floor_it_can_be(peak_bytes, floor_bytes, gap, text):
    """At the floor it is proven."""
    found = smallest(peak_bytes, floor_bytes)
    assert (found.gap, found.proven, str(found)) == (gap, peak_bytes == floor_bytes, text)


def test_no_plan_has_none_of_the_figures_of_one():
    """A caller may read every field of a result from it."""
    none = NoPlan(budget_bytes=1, bound=math.inf, termination=Termination(Reason.INFEASIBLE), solver="x", elapsed_s=0.0)
    assert (none.plan, none.cost, none.overhead, none.peak_bytes, none.gap) == (None,) * 5
    assert (none.history, none.remarks) == ((), ())
