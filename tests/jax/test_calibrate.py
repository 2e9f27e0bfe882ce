"""Answers to budgets are stored whole: a later process checks the plan and its bytes, and looks for no other."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import msgspec
import pytest

import checkmate
import checkmate.jax as cj
from checkmate.cost.store import Store
from checkmate.frontend.plan_store import MeasuredPlan, PlanStore
from checkmate.frontend.step_memory import StepMemory
from checkmate.solvers.auto import Auto
from tests.jax.networks import mlp, mlp_loss

searched = []


@dataclass(frozen=True)
class Counting:
    """The default solver, which says that it ran."""

    def run(self, problem, session):
        searched.append(problem.budget_bytes)
        return Auto().run(problem, session)


def planned(budget):
    """The plan of a function that was never called before, as in a new process, and the number of searches."""
    weights, x = mlp()
    loss = cj.remat(mlp_loss, budget=budget, costs="estimated", time_limit_s=2, solver=Counting())
    before = len(searched)
    jax.eval_shape(jax.grad(loss), weights, x)
    return loss, len(searched) - before


def refusal(budget):
    """The error for a budget, and the number of searches."""
    before = len(searched)
    with pytest.raises(checkmate.InfeasibleBudgetError) as refused:
        planned(budget)
    return refused.value, len(searched) - before


def measured(change):
    """Change the stored bytes of every compiled plan."""
    for key in Store("measured plans", msgspec.Raw, "").get():
        for plan in PlanStore(key).all():
            PlanStore(key).add(MeasuredPlan(plan.order, StepMemory.of_whole_step(change(plan.memory.peak_bytes))))


def test_an_answer_is_found_without_a_search_or_a_compilation(own_cache, caplog):
    """Searches that fail, and loops to compare, take seconds in every process."""
    first, searches = planned("60%")
    with jax.log_compiles():
        again, more = planned("60%")
    assert searches > more == 0
    assert not [record for record in caplog.records if "XLA compilation of jit(run)" in record.message]
    assert (again.result, again.budget_bytes, again.temp_bytes) == (first.result, first.budget_bytes, first.temp_bytes)
    assert planned("61%")[1] > 0


def test_an_answer_whose_plan_takes_more_is_looked_for_again(own_cache):
    """The stored bytes of a plan are compared with the budget: the budget is never exceeded silently."""
    planned("60%")
    measured(lambda size_bytes: 10 * size_bytes)
    try:
        again, searches = planned("60%")
    except checkmate.InfeasibleBudgetError:
        return
    assert searches
    assert again.temp_bytes + again.graph.resident_bytes <= again.budget_bytes


def test_the_compiled_bytes_of_a_given_plan_are_compared_with_a_budget(own_cache):
    """Its planned peak keeps the budget, and what XLA makes of it does not."""
    first, _ = planned("60%")
    weights, x = mlp()
    given = {"plan": first.plan, "budget": first.budget_bytes, "costs": "estimated"}
    jax.eval_shape(jax.grad(cj.remat(mlp_loss, **given)), weights, x)
    measured(lambda size_bytes: 10 * size_bytes)
    with pytest.raises(checkmate.InfeasibleBudgetError, match="the smallest measured peak"):
        jax.eval_shape(jax.grad(cj.remat(mlp_loss, **given)), weights, x)


def test_a_refusal_is_the_same_until_a_plan_fits(own_cache):
    """A refusal in every process names one budget; once a compiled plan keeps the budget, there is none."""
    first, _ = refusal("2%")
    again, searches = refusal("2%")
    assert (searches, vars(again)) == (0, vars(first))
    measured(lambda size_bytes: 0)
    found, _ = planned("2%")
    assert found.temp_bytes == 0


def test_the_environment_switches_answers_off(own_cache, environ):
    """As for all stored plans."""
    planned("60%")
    environ["CHECKMATE_PLAN_CACHE"] = "0"
    assert planned("60%")[1] > 0
