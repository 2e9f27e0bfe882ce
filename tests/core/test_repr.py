"""What a console prints of a graph, a plan or a result: all of a small one, a line that sums up a large one."""

from __future__ import annotations

import pytest

from checkmate import Compute, Graph, Plan, Reason, Result, Termination
from checkmate.core.graph import SHOWN


def chain(count: int) -> Graph:
    """A chain with parameters of a mebibyte."""
    return Graph.from_dag(
        cost=[1] * count,
        size_bytes=[4] * count,
        edges=[(v, v + 1) for v in range(count - 1)],
        resident_bytes=2**20,
        name="chain",
    )


def test_a_large_graph_is_summed_up():
    """A training step has thousands of ops; its name, its size and its digest tell it from another."""
    large = chain(1200)
    assert repr(large) == f"<Graph 'chain': 1,200 ops, 1,200 values, 1.00 MiB resident, {large.digest[:15]}>"
    assert [repr(chain(count))[:6] for count in (SHOWN, SHOWN + 1)] == ["Graph(", "<Graph"]


def test_a_large_plan_is_summed_up():
    """What it computes again is what it costs; its graph is named, if it has one."""
    graph = chain(6)
    plan = Plan.from_order(graph, [0, 0, 0, 1, 2, 3, 4, 5])
    assert repr(plan) == f"<Plan of 8 computations, 2 of them repeated, for {graph.digest[:15]}>"
    assert repr(Plan((Compute(0),) * 1200)) == "<Plan of 1,200 computations, 1,199 of them repeated, for any graph>"
    assert [repr(Plan((Compute(0),) * count))[:5] for count in (SHOWN, SHOWN + 1)] == ["Plan(", "<Plan"]


@pytest.mark.parametrize(
    ("termination", "remarks", "begin", "end"),
    [
        (Termination(Reason.OPTIMAL, detail="said at length"), (), "optimal", ""),
        (Termination(Reason.FEASIBLE, "time"), ("one", "two"), "feasible (time)", "; one; two"),
    ],
    ids=["ended by itself", "ended by a limit"],
)
def test_a_result_tells_how_it_ended_and_its_figures(termination, remarks, begin, end):
    """In one line: a share as a percentage, amounts with their units, every remark."""
    plan = Plan((Compute(0),))
    result = Result(
        plan=plan, cost=5, overhead=1.25, peak_bytes=2**20, budget_bytes=2**30, bound=4.0, gap=0.2, termination=termination,
        solver="x", elapsed_s=0.25, remarks=remarks,
    )  # fmt: skip
    assert repr(result) == (
        f"<Result {begin}: overhead 1.2500, gap 20.00 %, peak 1.00 MiB of 1.00 GiB, {plan!r}, by x in 0.2 s{end}>"
    )
