"""Copies to the host: three accounts of bytes and time agree, and bytes do not depend on time."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

import checkmate
from checkmate import (
    Compute,
    Discard,
    Fetch,
    Free,
    Graph,
    HostMemory,
    Offload,
    Plan,
    PlanError,
    Problem,
    simulate,
    solve,
    validate,
)
from checkmate.core.plan import with_frees
from tests.oracle import naive_bytes, naive_end, naive_host_bytes
from tests.strategies import random_copies, random_graph, random_host, with_host_values

BUS = HostMemory(100, 10**9, 5 * 10**8)  # a byte takes 1 ns out and 2 ns back


def chain() -> Graph:
    """Three forward and two backward ops; the last reads the first's output."""
    return Graph.from_dag(
        cost=[3, 3, 3, 3, 3], size_bytes=[6, 2, 2, 2, 2], edges=[(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)], kept=[4], name="chain"
    )


def offloaded(*, fetch_after: int = 2, free_after: int = 1) -> Plan:
    """The chain with its first value on the host between two of its ops."""
    steps: list[object] = []
    for o in range(5):
        if o == 4 and fetch_after == 4:
            steps.append(Fetch(0))
        steps.append(Compute(o))
        if o == 0:
            steps.append(Offload(0))
        if o == free_after:
            steps.append(Free(0))
        if o == fetch_after:
            steps.append(Fetch(0))
        if 0 < o < 4 and o - 1 > 0:
            steps.append(Free(o - 1))
    return Plan((*steps, Free(3), Discard(0), Free(0)), chain().digest, BUS)  # type: ignore[arg-type]


def accounts_agree(seed: int, *, on_host: bool = False) -> Plan:
    """Compare the three accounts on one random instance, with values that are on the host before the step if asked to."""
    rng = random.Random(seed)
    graph, host = random_graph(rng, max_ops=rng.choice([3, 6, 9])), random_host(rng)
    graph = with_host_values(rng, graph) if on_host else graph
    plan = random_copies(rng, graph, host)
    timeline = simulate(graph, plan)
    assert timeline.bytes.tolist() == naive_bytes(graph, plan)
    on_host = naive_host_bytes(graph, plan)
    assert timeline.host_bytes.tolist() == on_host
    assert timeline.host_bytes.dtype == np.int64
    assert timeline.cost == naive_end(graph, plan, host)
    peak, top = timeline.peak_bytes, max(on_host, default=0)
    roomy = HostMemory(top, host.out_bytes_per_s, host.in_bytes_per_s)
    assert validate(graph, plan, peak, host=roomy, cost=timeline.cost) == ()
    slower = ("cost", len(plan.steps), f"the plan takes {timeline.cost} ns, not {timeline.cost + 1}")
    assert validate(graph, plan, peak, host=roomy, cost=timeline.cost + 1) == (slower,)
    if peak:
        assert [v.rule for v in validate(graph, plan, peak - 1, host=roomy)] == ["budget"]
    if top:
        tight = HostMemory(top - 1, host.out_bytes_per_s, host.in_bytes_per_s)
        assert [v.rule for v in validate(graph, plan, peak, host=tight)] == ["host"]
    elsewhere = simulate(graph, plan, random_host(rng))
    assert np.array_equal(elsewhere.bytes, timeline.bytes)
    assert np.array_equal(elsewhere.host_bytes, timeline.host_bytes)
    assert validate(graph, plan, peak, host=random_host(rng)) == () or top > 0
    return plan


def test_three_accounts_agree_on_random_copies():
    """Bytes on both sides and the end of the step; the bytes are the same on any bus."""
    plans = [accounts_agree(seed) for seed in range(400)]
    kinds = {type(step) for plan in plans for step in plan.steps}
    assert kinds == {Compute, Free, Offload, Fetch, Discard}
    assert sum(plan.host is not None for plan in plans) > 250


def test_three_accounts_agree_on_values_that_were_on_the_host():
    """They are fetched without being offloaded, are there from the beginning, or both; some plans never discard."""
    plans = [accounts_agree(seed, on_host=True) for seed in range(400)]
    kinds = {type(step) for plan in plans for step in plan.steps}
    assert kinds == {Compute, Free, Offload, Fetch, Discard}
    assert sum(plan.host is not None for plan in plans) > 300


@pytest.mark.slow
@pytest.mark.parametrize("on_host", [False, True])
def test_three_accounts_agree_on_ten_thousand_random_copies(on_host):
    """The same for many more seeds."""
    copied = sum(accounts_agree(seed, on_host=on_host).host is not None for seed in range(1000, 14_000))
    assert copied >= 10_000


def test_a_copy_runs_beside_the_ops():
    """Six bytes leave in 6 ns, from 3 to 9, and come back in 12, from 9 to 21: only the last op waits, until 21."""
    timeline = simulate(chain(), offloaded(fetch_after=2, free_after=2))
    out, back = (timeline.plan.steps.index(kind(0)) for kind in (Offload, Fetch))
    assert timeline.copies == (("out", 0, out, 3, 3, 9), ("in", 0, back, 9, 9, 21))
    assert (timeline.cost, timeline.waited) == (24, 9)
    fast = HostMemory(100, 10**9, 4 * 10**9)
    assert simulate(chain(), offloaded(fetch_after=2, free_after=2), fast).waited == 0


def test_a_free_waits_for_the_copy_out():
    """Freed after op 1, at 6, the storage is there until its copy is done at 9; the ops behind it wait."""
    timeline = simulate(chain(), offloaded(free_after=1))
    assert timeline.copies[1].issued_ns == 12
    assert validate(chain(), offloaded(free_after=1), cost=timeline.cost) == ()


def test_bytes_follow_the_order_of_the_steps():
    """A fetched value counts from the step that issues the copy, and an offloaded one until it is freed."""
    timeline = simulate(chain(), offloaded(fetch_after=2, free_after=1))
    steps = timeline.plan.steps
    assert timeline.bytes[steps.index(Free(0))] == 2
    assert timeline.bytes[steps.index(Fetch(0))] == timeline.bytes[steps.index(Compute(2))] + 6
    assert timeline.host_bytes.tolist() == [0] + [6] * (steps.index(Discard(0)) - 1) + [0] * 2
    assert timeline.host_peak_bytes == 6


@pytest.mark.parametrize(
    ("steps", "rule", "found", "says"),
    [
        ((Offload(1),), "offload", "value 1 is copied to the host and is not live",
         "copies value 1 to the host, and it is not live"),
        ((Offload(0), Offload(0)), "offload", "value 0 is copied to the host and has a copy there",
         "copies value 0 to the host, and it has a copy"),
        ((Offload(0), Fetch(0)), "fetch", "value 0 is fetched from the host and is live", "fetches value 0, and it is live"),
        ((Free(0), Fetch(0)), "fetch", "value 0 is fetched from the host and has no copy there",
         "needs a copy of value 0 on the host, and there is none"),
        ((Discard(0),), "discard", "the copy of value 0 is discarded and there is none",
         "needs a copy of value 0 on the host, and there is none"),
        ((Offload(5),), "index", "there is no value 5", "copies value 5 of 5"),
    ],
)  # fmt: skip
def test_copies_that_cannot_be_made_are_found(steps, rule, found, says):
    """Both accounts refuse them, each in its words."""
    plan = Plan((Compute(0), *steps), host=BUS)
    assert (rule, len(steps), found) in [tuple(v) for v in validate(chain(), plan)]
    with pytest.raises(PlanError) as caught:
        simulate(chain(), plan)
    assert caught.value.message == f"step {len(steps)} {says}"


def test_a_view_is_not_copied():
    """A copy is of a storage, which its owner names."""
    ops = (checkmate.Op("f", (), (0,), 1), checkmate.Op("view", (0,), (1,), 0), checkmate.Op("g", (1,), (2,), 1))
    values = (checkmate.Value("a", 4), checkmate.Value("a.T", 0, base=0), checkmate.Value("b", 4, kept=True))
    graph = Graph(ops, values)
    plan = Plan((Compute(0), Compute(1), Offload(1), Compute(2)), host=BUS)
    assert validate(graph, plan)[0].message == "value 1 is copied to the host and is a view"
    with pytest.raises(PlanError, match=r"step 2 copies value 1 to the host, and it is a view$"):
        simulate(graph, plan)


def test_the_host_is_over_its_limit_where_the_last_copy_does_not_fit():
    """What it holds and by how much it is too much are told; copies that are never discarded stay to the end."""
    plan = Plan((Compute(0), Offload(0), Compute(1), Offload(1), Compute(2), Compute(3), Compute(4)), host=BUS)
    assert validate(chain(), plan, host=HostMemory(8, 1, 1)) == ()
    over = validate(chain(), plan, host=HostMemory(7, 1, 1))
    assert over == (("host", 3, "copies take 8 B of the host, 1 bytes over its 7 B"),)


def test_a_copy_of_nothing_takes_no_time():
    """No op waits for it, those that read it or others."""
    ops = (checkmate.Op("f", (), (0,), 0), checkmate.Op("g", (), (1,), 0), checkmate.Op("h", (0, 1), (2,), 0))
    graph = Graph(ops, tuple(checkmate.Value(name, 0) for name in "abc"))
    steps = (Compute(0), Compute(1), Offload(0), Free(0), Fetch(0), Compute(2))
    assert simulate(graph, Plan(steps, host=BUS)).cost == 0


def test_an_op_that_is_computed_over_a_copied_value_waits_for_the_copy():
    """Its old storage goes at 9, when six bytes have left it since 3; the four ops behind take 12."""
    plan = Plan((Compute(0), Offload(0), *(Compute(o) for o in range(5))), host=BUS)
    cost = simulate(chain(), plan).cost
    assert cost == naive_end(chain(), plan, BUS) == 21
    assert validate(chain(), plan, cost=cost) == ()


def test_a_copy_takes_whole_nanoseconds():
    """A third of a second is rounded up, in both accounts."""
    graph = Graph.from_dag(cost=[0], size_bytes=[1], edges=[])
    plan = Plan((Compute(0), Offload(0), Free(0)), host=HostMemory(1, 3, 3))
    assert simulate(graph, plan).cost == 333_333_334
    assert validate(graph, plan, cost=333_333_334) == ()


def test_a_stage_holds_what_was_fetched():
    """It came back from the host, and no op of the stage makes it."""
    plan = Plan((Compute(0), Offload(0), Free(0), Fetch(0), Compute(1)), host=BUS)
    assert plan.stages(chain()).S[1].tolist() == [True, False, False, False, False]


C0, C1, C2, C3, C4 = (Compute(o) for o in range(5))


@pytest.mark.parametrize(
    ("sequence", "steps"),
    [
        ((C0, Offload(0), C1, Free(0), C2, Fetch(0), C3, C4),
         (C0, Offload(0), C1, Free(0), C2, Free(1), Fetch(0), C3, Discard(0), Free(2), C4, Free(0), Free(3))),
        ((C0, Offload(0), Free(0), C1, C2, Fetch(0), C3, Free(0), Fetch(0), C4),
         (C0, Offload(0), C1, Free(0), C2, Free(1), Fetch(0), C3, Free(2), Free(0), Fetch(0), C4, Discard(0), Free(0), Free(3))),
        ((C0, Offload(0), C1, Free(0), Fetch(0), C2, C0, C3, C4),
         (C0, Offload(0), C1, Free(0), Fetch(0), Free(0), C2, Free(1), C0, C3, Free(2), C4, Discard(0), Free(0), Free(3))),
    ],
    ids=["fetched", "fetched twice", "computed instead"],
)  # fmt: skip
def test_frees_and_discards_come_as_early_as_they_may(sequence, steps):
    """A free not before it is asked for and not before the last read; a discard after the first read of what was fetched,
    at the end if none reads it."""
    graph = Graph.from_dag(
        cost=[3] * 5, size_bytes=[6, 2, 2, 2, 2], edges=[(0, 1), (1, 2), (0, 3), (2, 3), (0, 4), (3, 4)], kept=[4]
    )
    plan = with_frees(graph, iter(sequence), BUS)
    assert (plan.steps, plan.host, plan.graph_digest) == (steps, BUS, graph.digest)
    assert validate(graph, plan) == ()


def test_a_plan_with_copies_needs_a_host():
    """And one without copies has none."""
    with pytest.raises(PlanError) as caught:
        Plan((Compute(0), Offload(0)))
    assert str(caught.value) == "a plan with copies to the host has no host\n\nhint: give it host=HostMemory(...)"
    assert Plan((Compute(0),), host=BUS).host is None


def test_costs_without_a_unit_of_time_are_refused():
    """A copy takes nanoseconds, which do not add up with other units."""
    graph = Graph.from_dag(cost=[1], size_bytes=[1], edges=[])
    unitless = Graph(graph.ops, graph.values, cost_unit="FLOP")
    with pytest.raises(PlanError, match="nanoseconds") as caught:
        simulate(unitless, Plan((Compute(0), Offload(0)), host=BUS))
    assert caught.value.hint == "use a graph with cost_unit='ns', or a plan without copies"


@pytest.mark.parametrize(("out", "back"), [(1, 0), (-1, 1), (1, -5), (1.5, 1), (True, 1)])
def test_a_bus_without_a_rate_is_refused(out, back):
    """A rate divides."""
    with pytest.raises(checkmate.OptionError, match="positive whole number"):
        HostMemory(10, out, back)
    assert HostMemory(10, 1, 1).in_ns(2) == 2 * 10**9


def test_nothing_is_copied_to_a_host_without_a_rate_to_it():
    """Both accounts say so. A plan may still fetch what was there before the step."""
    inward = HostMemory(100, 0, 10**9)
    plan = Plan(offloaded().steps, chain().digest, inward)
    with pytest.raises(PlanError, match="rate of copies to it is 0"):
        simulate(chain(), plan)
    assert validate(chain(), plan, cost=1)[0].rule == "offload"
    graph = with_host_values(random.Random(0), chain())
    found = solve(Problem(graph, checkmate.min_budget(graph, host=inward).peak_bytes, host=inward)).plan
    assert not any(isinstance(step, Offload) for step in found.steps)


def test_files_with_copies_have_version_two(tmp_path):
    """Files without copies stay version 1, so that earlier releases read them; both come back equal."""
    plain, copied = Plan.from_order(chain(), range(5)), offloaded(free_after=2)
    for plan, version in ((plain, 1), (copied, 2)):
        result = checkmate.evaluate(chain(), plan)
        for name, value in (("plan", plan), ("result", result)):
            path = tmp_path / f"{name}.json"
            checkmate.write(value, path)
            text = path.read_text()
            assert text.startswith(f'{{"format":"checkmate.{name}/{version}"')
            assert ("host" in text) == (version == 2)
            assert checkmate.read(path) == value
    path.write_text(text.replace("checkmate.result/2", "checkmate.result/1"))
    with pytest.raises(checkmate.FileFormatError) as caught:
        checkmate.read(path)
    assert str(caught.value) == (
        f"{path}: a file of format 'checkmate.result/1' has no copies to the host\n\nhint: change its format to /2"
    )


def test_the_cost_of_a_plan_with_copies_is_the_end_of_the_step():
    """`evaluate` has both accounts agree on it."""
    result = checkmate.evaluate(chain(), offloaded(free_after=2))
    assert (result.cost, result.bound) == (24, 15.0)


def weighted(*, size: int = 6) -> Graph:
    """Two ops of 3 ns, each with a view of a weight of its own that is on the host, which both read again, in reverse."""
    ops = [checkmate.Op(f"w{k}", (), (k,), 0, recomputable=False) for k in (0, 1)]
    values = [checkmate.Value(f"w{k}", size, on_host=True) for k in (0, 1)]
    ops.append(checkmate.Op("w1.T", (1,), (2,), 0))
    values.append(checkmate.Value("w1.T", 0, base=1))
    for k, reads in enumerate([(0,), (2, 3), (4, 1), (5, 0)]):
        ops.append(checkmate.Op(f"f{k}", reads, (3 + k,), 3))
        values.append(checkmate.Value(f"a{k}", 2, kept=k == 3))
    return Graph(tuple(ops), tuple(values), name="weighted")


W0, W1, T1, A, B, C, D = (Compute(o) for o in range(7))
LATE = "op 1 ('w1') is for a value that is there when the step begins, and it is computed later"


def test_a_value_on_the_host_is_fetched_and_freed_any_number_of_times():
    """Six bytes take 12 ns. Both weights come twice, and nothing is offloaded or discarded: the host holds both throughout."""
    sequence = (Fetch(0), A, Fetch(1), T1, B, Free(1), Fetch(1), C, Fetch(0), D)
    plan = with_frees(weighted(), sequence, BUS)
    assert plan.steps.count(Free(0)) == plan.steps.count(Free(1)) == 2
    timeline = simulate(weighted(), plan)
    assert (timeline.cost, timeline.waited) == (12 + 3 + 12 + 3 + 12 + 3 + 12 + 3, 48)
    assert timeline.host_bytes.tolist() == [12] * len(plan.steps)
    assert timeline.peak_bytes == 6 + 2 + 2
    assert validate(weighted(), plan, 10, cost=60) == ()


def test_a_value_that_is_there_when_the_step_begins_is_there_when_it_ends():
    """Its op is computed before anything else. It may be away in between; what is never fetched takes no bytes of the host."""
    plan = with_frees(weighted(), (W0, W1, A, T1, B, C, Fetch(0), D), BUS)
    timeline = simulate(weighted(), plan)
    assert timeline.bytes[1] == 12
    assert timeline.bytes[-1] == 14
    assert timeline.host_peak_bytes == 6
    assert plan.steps.count(Free(0)) == 1
    assert validate(weighted(), plan, 16, cost=timeline.cost) == ()
    gone = Plan((*plan.steps, Free(1)), host=BUS)
    assert [tuple(v)[:2] for v in validate(weighted(), gone)] == [("kept", len(plan.steps) + 1)]


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ((W1, W0, A, T1, B, C, D), ("order", 0, "op 1 is first computed before op 0")),
        ((W0, A, W1, T1, B, C, D), ("order", 1, "op 3 is first computed before op 1")),
        ((Fetch(0), W1, A, T1, B, C, D), ("order", 1, LATE)),
        ((W0, Free(0), W1, Fetch(0), A, T1, B, C, D), ("order", 2, LATE)),
        ((W0, W0, W1, A, T1, B, C, D), ("once", 1, "op 0 ('w0') may run only once")),
        ((W0, W1, A, T1, B, C, D, Discard(0)), ("discard", 7, "the copy of value 0 is discarded and was there before the step")),
        ((W0, W1, A, T1, B, C, D, Offload(0)), ("offload", 7, "value 0 is copied to the host and has a copy there")),
    ],
)  # fmt: skip
def test_misuse_of_values_on_the_host_is_found(steps, found):
    """What is on the device when the step begins counts from the beginning, once, and the host's copy is not the plan's."""
    assert found in [tuple(v) for v in validate(weighted(), Plan(steps, host=BUS))]


def test_a_copy_that_was_there_before_the_step_stays():
    """The account refuses to discard it."""
    with pytest.raises(PlanError, match=r"step 1 discards the copy of value 0, which was on the host before the step$"):
        simulate(weighted(), Plan((W0, Discard(0)), host=BUS))


def test_without_copies_values_on_the_host_are_on_the_device_from_the_beginning_to_the_end():
    """Every solver holds both weights all the time; the order that says so is part of the graph and of its file."""
    graph = weighted()
    assert graph.order == ((0, 1), (1, 3))  # the view allocates nothing: any place will do
    for solver in (None, checkmate.BruteForce(), checkmate.Milp(), checkmate.LocalSearch(), checkmate.AStar()):
        plan = solve(Problem(graph, "100%"), solver, limits=checkmate.Limits(time_s=5)).plan
        assert plan.order.index(0) < plan.order.index(1) < plan.order.index(3)
        timeline = simulate(graph, plan)
        assert min(timeline.bytes[plan.steps.index(A) :]) >= 12
        assert timeline.host_peak_bytes == 0


@pytest.mark.parametrize(
    "fault",
    [{"inputs": (0,)}, {"cost": 1}, {"workspace_bytes": 1}, {"recomputable": True}, {"outputs": (1, 2)}, {"clobbered_by": (3,)}],
)
def test_the_op_of_a_value_on_the_host_does_nothing(fault):
    """It stands for what is there."""
    graph = weighted()
    ops = [graph.ops[0], msgspec.structs.replace(graph.ops[1], **fault), *graph.ops[2:]]
    ops = [op for op in ops if not ("outputs" in fault and op.name == "w1.T")]
    with pytest.raises(checkmate.GraphError, match="'w1' makes a value on the host"):
        Graph(tuple(ops), graph.values)


def test_values_on_the_host_come_before_ops_that_allocate():
    """An op that is listed before them makes the listing no order."""
    ops = (checkmate.Op("f", (), (0,), 3), checkmate.Op("w", (), (1,), 0, recomputable=False))
    with pytest.raises(checkmate.GraphError, match="op 1 must come before op 0"):
        Graph(ops, (checkmate.Value("a", 1), checkmate.Value("w", 1, on_host=True)))


def test_files_of_graphs_with_values_on_the_host_have_version_two(tmp_path):
    """The property is written only where it is set; a digest depends on it, and without it is what it was."""
    graph = weighted()
    without = tuple(msgspec.structs.replace(x, on_host=False) for x in graph.values)
    plain = Graph(graph.ops, without, order=graph.order)
    assert plain.digest != graph.digest
    for value, version in ((plain, 1), (graph, 2)):
        path = tmp_path / f"{version}.json"
        checkmate.write(value, path)
        assert path.read_text().startswith(f'{{"format":"checkmate.graph/{version}"')
        assert ("on_host" in path.read_text()) == (version == 2)
        assert checkmate.read(path) == value
    path.write_text(path.read_text().replace("graph/2", "graph/1"))
    with pytest.raises(checkmate.FileFormatError, match="has no copies to the host"):
        checkmate.read(path)
