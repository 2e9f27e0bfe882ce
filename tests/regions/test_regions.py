"""Regions as `torch.utils.checkpoint` runs them: which ops they have, what a policy costs, and that it keeps its budget."""

from __future__ import annotations

import itertools
import time

import pytest

import checkmate
from checkmate import Graph, GraphError, InfeasibleBudgetError, Op, OptionError, Problem, Value, evaluate, simulate
from checkmate.core.graph import BOUNDARY
from checkmate.regions import RegionPolicy, choose_policy
from checkmate.regions.blocks import Schedule, find_regions
from checkmate.regions.search import choice_of, choose, units_of


def network(layers: int = 3, *, random: bool = False, once: bool = False) -> Graph:
    """Layers of `up` (large), `act` (large) and `down`, each with a residual; the backward reads the inputs of the products."""
    ops: list[Op] = []
    values: list[Value] = []

    def op(kind: str, inputs: tuple[int, ...], size: int, cost: int, source: str, phase: str = "forward", **more: object) -> int:
        values.append(Value(f"v{len(values)}", size, kept=kind in ("loss", "grad")))
        ops.append(Op(kind, inputs, (len(values) - 1,), cost, phase=phase, kind=kind, source=source, **more))  # type: ignore[arg-type]
        return len(values) - 1

    x = op("embed", (), 10, 5, "embed, m.py:1")
    held = []
    for k in range(layers):
        up = op("mm", (x,), 40, 20, f"layers.{k}.up, m.py:2")
        act = op("drop" if random else "act", (up,), 40, 2, f"layers.{k}, m.py:3", replay_bytes=1 if random else 0)
        down = op("mm", (act,), 10, 20, f"layers.{k}.down, m.py:4", recomputable=not (once and k == 0))
        out = op("add", (x, down), 10, 1, f"layers.{k}, m.py:5")
        held.append((x, up, act))
        x = out
    loss = op("loss", (x,), 1, 1, "m.py:6")
    gradient = op(BOUNDARY, (loss,), 1, 0, "", "loss", recomputable=False)
    for k, (x, up, act) in reversed(list(enumerate(held))):
        op("grad", (act, gradient), 4, 20, f"layers.{k}.down, m.py:4", "backward")
        middle = op("act_backward", (up, gradient), 40, 2, f"layers.{k}, m.py:3", "backward")
        op("grad", (x, middle), 4, 20, f"layers.{k}.up, m.py:2", "backward")
        gradient = op("mm_backward", (middle,), 10, 20, f"layers.{k}.up, m.py:2", "backward")
    return Graph(tuple(ops), tuple(values), resident_bytes=7)


def policy(graph: Graph, budget: int, **options: object) -> RegionPolicy:
    planned = checkmate.solve(Problem(graph, budget), limits=checkmate.Limits(time_s=2), raise_on_failure=False)
    return choose_policy(graph, budget, planned, time_limit_s=3, **options)  # type: ignore[arg-type]


def test_regions_are_the_numbered_layers():
    """Outermost modules with a number for a name that have siblings; ops by kind and occurrence."""
    first, *others = find_regions(network())
    assert [region.name for region in (first, *others)] == ["layers.0", "layers.1", "layers.2"]
    assert tuple(first.calls.values()) == (("mm", 0), ("act", 0))  # what follows, the backward needs nothing of
    assert first.modules == ("up", "")
    assert [region.name for region in find_regions(network(), ["layers.?"])] == ["layers.0", "layers.1", "layers.2"]
    assert [region.name for region in find_regions(network(), ["*.1", "layers.0.up"])] == ["layers.0.up", "layers.1"]
    with pytest.raises(OptionError, match="no module matches layer"):
        find_regions(network(), ["layer"])
    with pytest.raises(OptionError, match="no numbered modules"):
        find_regions(network(1))
    with pytest.raises(GraphError, match="no boundary"):
        find_regions(Graph.from_dag(cost=[1], size_bytes=[1], edges=[]))


def test_a_region_is_run_again_as_a_whole():
    """From its first op to the last one whose result is needed, before the first op of the backward that needs any."""
    graph = network(2)
    schedule = Schedule(graph, find_regions(graph))
    first, second = schedule.regions
    order = schedule.plan({first: frozenset(), second: frozenset({5})}).order
    kinds = [graph.ops[o].name for o in order]
    boundary = kinds.index(BOUNDARY)
    assert order[boundary + 1] == 6  # `act` of the second layer; its `mm` is saved
    assert order[boundary + 6 : boundary + 8] == (1, 2)
    assert schedule.cost({first: frozenset(), second: frozenset({5})}) == 2 + 22


def test_what_is_saved_is_held_until_the_region_was_run_again():
    """Also where nothing else reads it: the cache of selective checkpointing holds it."""
    graph = network(2)
    schedule = Schedule(graph, find_regions(graph), region_bytes=3)
    none: dict = {region: frozenset() for region in schedule.regions}
    both = {region: frozenset(region.ops) for region in schedule.regions}
    assert schedule.peak_bytes(both) > schedule.peak_bytes(none)
    assert schedule.peak_bytes({}) == simulate(graph, checkmate.Plan.from_order(graph, range(len(graph.ops)))).peak_bytes
    assert schedule.peak_bytes(none) == simulate(graph, schedule.plan(none)).peak_bytes + 2 * 3


@pytest.mark.parametrize("save", ["ops", "modules", "nothing"])
def test_every_policy_keeps_its_budget(save):
    """Peak by `evaluate`, cost not below the plan's bound, and no more cost for more memory."""
    graph = network(4)
    lowest = Schedule(graph, find_regions(graph))
    smallest = lowest.peak_bytes({region: frozenset() for region in lowest.regions})
    overheads = []
    for budget in range(smallest, lowest.peak_bytes({}) + 1, 40):
        found = policy(graph, budget, save=save)
        assert found.peak_bytes <= budget
        assert evaluate(graph, found.evaluated.plan, budget).cost == found.evaluated.cost
        assert found.evaluated.cost >= found.planned.bound
        overheads.append(found.evaluated.overhead)
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[0] > overheads[-1]


@pytest.mark.parametrize("budget", range(120, 260, 20))
def test_small_steps_against_all_choices(budget):
    """Ops and modules are chosen by exchange: both against every choice there is."""
    graph = network(2)
    schedule = Schedule(graph, find_regions(graph))
    options = [[None, *(frozenset(s) for n in range(3) for s in itertools.combinations(r.ops, n))] for r in schedule.regions]
    every = [
        {region: saved for region, saved in zip(schedule.regions, picks, strict=True) if saved is not None}
        for picks in itertools.product(*options)
    ]
    costs = [schedule.cost(choice) for choice in every if schedule.peak_bytes(choice) <= budget]
    taken = choose(schedule, units_of(schedule, "ops"), budget, None, time.perf_counter() + 5)
    found = None if taken is None else choice_of(schedule, taken)
    assert (found is None) == (not costs) or budget < schedule.peak_bytes(dict.fromkeys(schedule.regions, frozenset()))
    if found is not None:
        assert schedule.cost(found) == min(costs)
    same = choose(schedule, units_of(schedule, "modules"), budget, None, time.perf_counter() + 5)
    uniform = [{region: frozenset(o for o in region.ops[:n]) for region in schedule.regions} for n in (0, 1)]
    fitting = [schedule.cost(choice) for choice in uniform if schedule.peak_bytes(choice) <= budget]
    assert (same is None) == (not fitting)
    assert same is None or schedule.cost(choice_of(schedule, same)) == min(fitting)


def test_random_ops_are_saved_together_or_not_at_all():
    """A saved random op draws nothing when the region is run again, and the next one would draw its numbers."""
    graph = network(2, random=True)
    regions = find_regions(graph, ["layers"])  # both dropouts in one region
    schedule = Schedule(graph, regions)
    random = {o for o in regions[0].ops if graph.ops[o].replay_bytes}
    assert len(random) == 2
    for budget in range(120, 300, 10):
        taken = choose(schedule, units_of(schedule, "ops"), budget, None, time.perf_counter() + 1)
        for saved in choice_of(schedule, taken or ()).values():
            assert random <= saved or not random & saved


def test_what_must_run_once_is_not_run_again():
    """A region with a mutation or a collective is left out; without any other region that is an error."""
    graph = network(3, once=True)
    # The op is the last of its region and is not run again, unless something behind it is needed.
    assert [region.refusal for region in find_regions(graph)] == ["", "", ""]
    with pytest.raises(OptionError, match="must run once"):
        policy(graph, 400, regions=["layers"])


def test_the_hint_of_a_refusal_works():
    """The smallest peak of a policy is named, and is enough."""
    graph = network(3)
    with pytest.raises(InfeasibleBudgetError) as refused:
        policy(graph, 60)
    smallest = refused.value.smallest_bytes
    assert smallest is not None
    assert f"at least {smallest}B" in refused.value.hint
    assert policy(graph, smallest).peak_bytes <= smallest


def test_the_policy_as_text_and_as_data():
    """Names for those who write the policy into their own configuration."""
    found = policy(network(4), 280, save="modules")
    assert found.save_regions == ("up",)
    assert found.as_dict()["saved"]["layers.3"] == [["mm", 0]]
    assert "save                      up" in found.render()
    assert "layers.0 .. layers.3 (4)" in found.render()
    assert found.extra_overhead is not None
    assert found.extra_overhead >= 0
