"""A plan that is given is taken exactly as it is, with its figures, or refused with the reason."""

from __future__ import annotations

import dataclasses
import time

import pytest
from hypothesis import given

from checkmate import Compute, Graph, Plan, PlanError, Reason, Termination, UnitError, WrongGraphError, evaluate, simulate
from checkmate.core.budget import Budget
from tests.strategies import graphs_and_orders


def chain(cost: tuple[int, ...] = (1, 1, 1)) -> Graph:
    """Three ops in a row that hold 8 bytes, two values, at any moment."""
    return Graph.from_dag(cost=cost, size_bytes=[4, 4, 4], edges=[(0, 1), (1, 2)], kept=[2])


@given(graphs_and_orders())
def test_the_plan_is_returned_unchanged_with_the_figures_of_the_simulation(drawn):
    """No step is added, dropped or moved, however wasteful the plan is."""
    graph, order = drawn
    plan = Plan.from_order(graph, order)
    timeline = simulate(graph, plan)
    result = evaluate(graph, plan)
    assert result.plan is plan
    assert (result.cost, result.peak_bytes, result.budget_bytes) == (timeline.cost, timeline.peak_bytes, timeline.peak_bytes)
    assert (result.bound, type(result.bound)) == (graph.cost, float)
    assert result.cost - result.gap * result.cost == pytest.approx(graph.cost)
    assert result.overhead * graph.cost == pytest.approx(result.cost)
    assert (result.solver, result.history, result.remarks) == ("evaluate", (), ())
    reason = Reason.OPTIMAL if result.cost == graph.cost else Reason.FEASIBLE
    assert result.termination == Termination(reason, "", "a plan that was given")


def test_a_plan_that_computes_twice_costs_more_and_may_not_be_the_best():
    """Four computations where three are enough."""
    twice = evaluate(chain(), Plan.from_order(chain(), [0, 0, 1, 2]))
    assert (twice.cost, twice.overhead, twice.gap, twice.bound) == (4, 4 / 3, 0.25, 3.0)
    assert twice.termination.reason is Reason.FEASIBLE
    once = evaluate(chain(), Plan.from_order(chain(), [0, 1, 2]))
    assert (once.cost, once.overhead, once.gap) == (3, 1.0, 0.0)
    assert once.termination.reason is Reason.OPTIMAL


def test_a_graph_without_cost_has_no_overhead_and_no_gap():
    """Neither is divided by zero."""
    free = evaluate(chain((0, 0, 0)), Plan.from_order(chain((0, 0, 0)), [0, 0, 1, 2]))
    assert (free.cost, free.overhead, free.gap, free.bound) == (0, 1.0, 0.0, 0.0)
    assert free.termination.reason is Reason.OPTIMAL


def test_the_time_that_it_took_is_measured():
    """From the call to the return."""
    began = time.perf_counter()
    result = evaluate(chain(), Plan.from_order(chain(), [0, 1, 2]))
    assert 0 <= result.elapsed_s <= time.perf_counter() - began


@pytest.mark.parametrize(
    ("budget", "budget_bytes"), [(8, 8), (9.0, 9), ("1KiB", 1024), ("100%", 8), (Budget.parse("8"), 8)], ids=repr
)
def test_a_budget_may_be_a_number_text_or_parsed(budget, budget_bytes):
    """A peak equal to the budget keeps it."""
    assert evaluate(chain(), Plan.from_order(chain(), [0, 1, 2]), budget).budget_bytes == budget_bytes


def test_a_budget_below_the_peak_is_refused_with_one_that_is_enough():
    """The amount of the hint reads back as no less than the peak."""
    large = Graph.from_dag(cost=[1, 1], size_bytes=[2**20 + 1, 1], edges=[(0, 1)], kept=[1])
    with pytest.raises(PlanError) as caught:
        evaluate(large, Plan.from_order(large, [0, 1]), "1MiB")
    assert caught.value.message == "the plan needs 1.00 MiB, and the budget is 1.00 MiB"
    assert caught.value.hint == "raise the budget to at least 1.01MiB, or leave out the plan to have one made"
    plan = Plan.from_order(chain(), [0, 1, 2])
    for budget in (7, 0, "0%", Budget.parse("50%")):
        with pytest.raises(PlanError, match="the plan needs 8 B, and the budget is"):
            evaluate(chain(), plan, budget)
    with pytest.raises(UnitError):
        evaluate(chain(), plan, "much")


def test_a_plan_of_another_graph_is_refused():
    """The digests tell the graphs apart; the message has enough of both to see that."""
    other = Graph.from_dag(cost=[1, 1, 1], size_bytes=[4, 4, 5], edges=[(0, 1), (1, 2)], kept=[2])
    with pytest.raises(WrongGraphError) as caught:
        evaluate(chain(), Plan.from_order(other, [0, 1, 2]))
    assert caught.value.message == (
        f"the plan was made for another graph ({other.digest[:15]}, not {chain().digest[:15]}): other shapes, "
        "another model, other options or another version of the framework"
    )
    assert caught.value.hint == (
        "give a budget instead of the plan, so that this graph is planned, or pass the plan that was made for it"
    )


def test_a_plan_that_names_no_graph_is_for_any():
    """A plan written by hand has no digest."""
    plan = Plan(Plan.from_order(chain(), [0, 1, 2]).steps)
    assert plan.graph_digest == ""
    assert evaluate(chain(), plan).plan is plan


def test_a_plan_that_breaks_rules_is_refused_with_the_first_and_their_number():
    """`simulate` takes a plan that leaves out ops; the check of the rules does not."""
    apart = Graph.from_dag(cost=[1, 1, 1], size_bytes=[1, 1, 1], edges=[])
    with pytest.raises(PlanError) as caught:
        evaluate(apart, Plan((Compute(0), Compute(1))))
    assert caught.value.message == "the plan cannot run: op 2 ('2') is never computed"
    assert caught.value.hint == (
        "build it with Plan.from_order(graph, order), from an order that computes every op before its readers"
    )
    with pytest.raises(PlanError) as caught:
        evaluate(apart, Plan((Compute(0),)))
    assert caught.value.message == "the plan cannot run: op 1 ('1') is never computed (and 1 more)"
    with pytest.raises(PlanError) as caught:
        evaluate(apart, Plan(()))
    assert caught.value.message == "the plan cannot run: op 0 ('0') is never computed (and 2 more)"


@pytest.mark.parametrize(("bytes_less", "cost_less"), [(1, 0), (0, 1)], ids=["memory", "cost"])
def test_the_two_accounts_have_to_agree(monkeypatch, bytes_less, cost_less):
    """A simulation that counts too little is an error of the program, and no plan runs on it."""

    def less(graph: Graph, plan: Plan) -> object:
        timeline = simulate(graph, plan)
        counted = dataclasses.make_dataclass("Counted", ["peak_bytes", "cost"])
        return counted(timeline.peak_bytes - bytes_less, timeline.cost - cost_less)

    monkeypatch.setattr("checkmate.core.evaluate.simulate", less)
    with pytest.raises(PlanError, match="the plan cannot run: "):
        evaluate(chain(), Plan.from_order(chain(), [0, 1, 2]))
