"""A problem is a graph, a budget in bytes and what plans may do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate import Graph, HostMemory, Op, OptionError, Plan, Problem, UnitError, Value, simulate, solve
from checkmate.core.budget import fixed_bytes, keep_all_bytes
from checkmate.studies.lifetimes import storage_lifetimes
from tests.strategies import graphs


def chain(resident_bytes: int = 10) -> Graph:
    """Two ops that take 8 bytes above what is resident."""
    return Graph.from_dag(cost=[1, 1], size_bytes=[4, 4], edges=[(0, 1)], resident_bytes=resident_bytes)


@given(graphs())
def test_keeping_everything_is_the_own_order_once(graph):
    """The peak that a step has without any plan."""
    own = Plan.from_order(graph, range(len(graph.ops)))
    assert keep_all_bytes(graph) == simulate(graph, own).peak_bytes


@given(graphs(), st.integers(0, 100))
def test_a_share_of_the_graph_is_a_budget_in_bytes(graph, percent):
    """Nothing of it is what no plan can change, all of it is what keeping everything takes."""
    budget = Problem(graph, f"{percent}%").budget_bytes
    fixed = fixed_bytes(graph)
    assert budget == fixed + (keep_all_bytes(graph) - fixed) * percent // 100


@given(graphs())
def test_no_plan_changes_what_is_held_at_the_end(graph):
    """A share is counted above it: gradients and held outputs are there whatever is computed again."""
    own = Plan.from_order(graph, range(len(graph.ops)))
    held = [graph.values[s.value].size_bytes for s in storage_lifetimes(graph, own) if s.gone_at > len(own.steps)]
    assert fixed_bytes(graph) == graph.resident_bytes + sum(held)
    assert graph.resident_bytes <= fixed_bytes(graph) <= keep_all_bytes(graph)


def test_a_storage_that_is_kept_twice_is_fixed_once():
    """A view of a kept value is the same storage."""
    ops = (Op("a", (), (0,), 1), Op("view", (0,), (1,), 1), Op("b", (0,), (2,), 1))
    values = (Value("a", 4, kept=True), Value("view", 0, base=0, kept=True), Value("b", 2))
    assert fixed_bytes(Graph(ops, values, resident_bytes=10)) == 14
    only_the_view = (Value("a", 4), *values[1:])
    assert fixed_bytes(Graph(ops, only_the_view, resident_bytes=10)) == 14


def test_a_share_above_gradients_has_a_plan_where_they_outweigh_activations():
    """Counted among what is shared, gradients of 100 bytes would leave 60 % of 120 bytes: less than they take beside any op."""
    chain = Graph.from_dag(
        cost=[1, 1, 1, 1],
        size_bytes=[10, 10, 10, 100],
        edges=[(0, 1), (1, 2), (0, 3), (2, 3)],
        kept=[3],
        resident_bytes=50,
    )
    assert (fixed_bytes(chain), keep_all_bytes(chain)) == (150, 170)
    assert Problem(chain, "60%").budget_bytes == 162
    assert Problem(chain, "0%").budget_bytes == 150


def test_a_budget_is_bytes_text_or_a_share():
    """However it is written, it is resolved once and stays an integer."""
    assert Problem(chain(), 12).budget_bytes == 12
    assert Problem(chain(), "1KiB").budget_bytes == 1024
    assert Problem(chain(), "50%").budget_bytes == 14
    assert Problem(chain(), 12.0).budget_bytes == 12
    with pytest.raises(UnitError):
        Problem(chain(), "x%")
    with pytest.raises(UnitError):
        Problem(chain(), -1)


def test_by_default_everything_may_run_again_and_move():
    """The widest class of plans has the cheapest."""
    problem = Problem(chain(), 12)
    assert (problem.recompute, problem.reorder) == ("all", True)
    narrow = Problem(chain(), 12, "forward", 0)
    assert (narrow.recompute, narrow.reorder) == ("forward", False)


def test_what_may_run_again_has_two_answers():
    """A word that is mistyped must not be taken for the other."""
    with pytest.raises(OptionError) as caught:
        Problem(chain(), 12, "Forward")
    assert str(caught.value) == "recompute='Forward' is neither 'all' nor 'forward'"


def test_another_budget_is_another_problem_with_the_same_rules():
    """A search over budgets asks the same question each time."""
    problem = Problem(chain(), 12, "forward", False)
    other = problem.replace_budget(9)
    assert other == Problem(problem.graph, 9, "forward", False)
    assert other.graph is problem.graph
    assert (other.recompute, other.reorder) == ("forward", False)
    assert problem.budget_bytes == 12
    assert Problem(chain(), 12).replace_budget(9) == Problem(chain(), 9, "all", True)


def test_a_problem_tells_its_budget_as_it_was_written():
    """Other budgets of the same question are called by the same words; the words make no other problem."""
    asked = Problem(chain(), "50%")
    assert asked.describe_budget() == "50% of what can be given up: 14 B of 18 B in all"
    assert asked.replace_budget(13).describe_budget() == "50% of what can be given up: 13 B of 18 B in all"
    assert asked == Problem(chain(), 14)
    assert hash(asked) == hash(Problem(chain(), 14))
    assert Problem(chain(), "14 B").describe_budget() == Problem(chain(), 14).describe_budget() == "14 B"


HOST = HostMemory(100, 10**9, 10**9)


def test_a_problem_keeps_its_host_and_may_be_asked_without_it():
    """Another budget is asked with the same rules; without copies only the host is gone, not the words of the budget."""
    for reorder in (False, True):
        problem = Problem(chain(), "50%", "forward", reorder, HOST)
        assert problem.replace_budget(9) == Problem(chain(), 9, "forward", reorder, HOST)
        alone = problem.without_host()
        assert alone == Problem(chain(), 14, "forward", reorder)
        assert (alone.host, alone.budget.text) == (None, "50%")


def test_copies_need_costs_in_nanoseconds():
    """A copy takes nanoseconds, which do not add up with operations; without a host any unit will do."""
    counted = Graph(chain().ops, chain().values, cost_unit="FLOP", name="net")
    assert Problem(counted, 12).host is None
    with pytest.raises(OptionError) as caught:
        Problem(counted, 12, host=HOST)
    assert caught.value.message == "copies to the host take nanoseconds, and the costs of graph 'net' are in 'FLOP'"
    assert caught.value.hint == "measure or estimate the costs in nanoseconds (cost_unit='ns'), or leave out the host"


def test_a_graph_without_a_budget_is_no_problem():
    """What people try first is told what to write."""
    with pytest.raises(OptionError, match=r"and not Graph\n\nhint: write checkmate\.solve\(checkmate\.Problem"):
        solve(chain())  # type: ignore[call-overload]
