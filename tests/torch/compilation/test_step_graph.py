"""A step of several graphs is one graph: memory is that of all of them, and its plans cut into plans of each."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkmate import Graph, InfeasibleBudgetError, Limits, Op, Plan, Problem, Value, evaluate, simulate, solve, validate
from checkmate.core.graph import BOUNDARY
from checkmate.torch.joint.capture import CapturedGraph
from checkmate.torch.steps.step_graph import BETWEEN, ObservedStep, Segment, Storage, step_graph
from tests.torch.compilation.layers import (
    BATCH,
    GRADIENT,
    HIDDEN,
    LAYERS,
    LOSS_TANGENT,
    RESIDENT,
    WEIGHT,
    WEIGHT_GRADIENT,
    Layers,
    changed,
    check,
    memory,
    named,
    random_order,
    with_segment,
)


def test_memory_of_two_parts_adds_up() -> None:
    """Worked by hand: the hidden tensor and its gradient are handed over and counted once."""
    graph = step_graph(LAYERS.step([2])).graph
    assert graph.resident_bytes == RESIDENT
    assert memory(graph) == {
        "0.f0": 10,
        "0.f1": 10 + 20,
        "between 1": 10 + 20,
        "1.f2": 10 + 20 + 30,
        "1.f3": 10 + 20 + 30 + 4,
        "between 2": 10 + 20 + 30 + 4 + 4,  # the gradient of the loss
        "1.b3": 10 + 20 + 30 + 4 + 4 + (30 + 5),
        "1.b2": 10 + 20 + 4 + (30 + 5) + (20 + 3),
        "between 3": 10 + 4 + 5 + (20 + 3),
        "0.b1": 10 + 4 + 5 + (20 + 3) + (10 + 2),
        "0.b0": 4 + 5 + 3 + (10 + 2) + 1,
        "between 4": 4 + 5 + 3 + 2 + 1,
    }


def test_what_outlives_the_step_is_kept() -> None:
    """Weight gradients and the loss are; hidden tensors and their gradients are not."""
    graph = step_graph(LAYERS.step([2])).graph
    assert {v.name for v in graph.values if v.kept} == {"1.h3", "1.w3", "1.w2", "0.w1", "0.w0"}


def test_an_output_that_dies_is_not_kept() -> None:
    """A loss that the caller drops before the backward has no bytes in it."""
    kept, dropped = (step_graph(changed(LAYERS.step([2]), HIDDEN + 3, last=last)).graph for last in (4, 2))
    before, after = memory(kept), memory(dropped)
    assert {name for name in before if before[name] != after[name]} == {"1.b3", "1.b2", "between 3", "0.b1", "0.b0", "between 4"}
    assert all(before[name] - after[name] in (0, 4) for name in before)


def test_a_handed_tensor_lives_as_long_as_it_was_seen_to() -> None:
    """A hidden tensor that the caller holds to the end is kept."""
    before, after = (memory(step_graph(s).graph) for s in (LAYERS.step([2]), changed(LAYERS.step([2]), HIDDEN + 1, last=4)))
    assert {name: after[name] - before[name] for name in before if after[name] != before[name]} == {
        "between 3": 20,
        "0.b1": 20,
        "0.b0": 20,
        "between 4": 20,
    }


def test_accumulated_gradients_are_freed_after_their_segment() -> None:
    """They are added to existing gradients, which are resident."""
    step = replace(LAYERS.step([2]), accumulated=frozenset({WEIGHT_GRADIENT + 2, WEIGHT_GRADIENT + 3}))
    before, after = memory(step_graph(LAYERS.step([2])).graph), memory(step_graph(step).graph)
    assert {name: before[name] - after[name] for name in before if after[name] != before[name]} == {
        "0.b1": 3 + 5,
        "0.b0": 3 + 5,
        "between 4": 3 + 5,
    }


def test_eager_storages_and_workspace_count() -> None:
    """A storage counts from the segment before which it was allocated to the last segment that it was seen before."""
    plain = LAYERS.step([2])
    step = replace(plain, storages={**plain.storages, 600: Storage(size_bytes=7, first=1, last=2)}, eager_bytes=60)
    step = with_segment(step, 2, eager_bytes=50)
    before, after = memory(step_graph(plain).graph), memory(step_graph(step).graph)
    assert {name: after[name] - before[name] for name in before if after[name] != before[name]} == {
        "between 1": 7,
        "1.f2": 7,
        "1.f3": 7,
        "between 2": 7 + 50,
        "between 4": 60,
    }


def test_eager_code_before_the_first_segment_counts() -> None:
    """It has an interval only where it is needed."""
    plain = LAYERS.step([2])
    assert step_graph(plain).graph.ops[0].name == "0.f0"
    step = replace(plain, storages={**plain.storages, 600: Storage(size_bytes=7, first=0, last=4)})
    assert {
        name: size - memory(step_graph(plain).graph).get(name, 0) for name, size in memory(step_graph(step).graph).items()
    } == {
        "between 0": 7,
        **dict.fromkeys(memory(step_graph(plain).graph), 7),
    }


def test_what_is_released_after_the_last_segment_has_an_interval() -> None:
    """A storage of eager code that dies there, in a step that leaves nothing else."""
    step = LAYERS.step([2])
    step = with_segment(step, 3, made=(None,) * len(step.segments[3].made))
    step = replace(step, storages={**step.storages, 600: Storage(size_bytes=7, first=1, last=4, released=True)})
    assert [op.name for op in step_graph(step).graph.ops[-2:]] == ["release 4", "between 4"]


def test_a_gradient_that_eager_code_allocated_counts_once() -> None:
    """With the loss outside of the graph the tangent is a view of what eager code made."""
    plain = LAYERS.step([2])
    step = changed(plain, LOSS_TANGENT, first=2, last=2)
    assert memory(step_graph(plain).graph) == memory(step_graph(step).graph)


def test_a_tensor_that_eager_code_hands_to_a_forward_counts_once() -> None:
    """Such as labels that are padded between two graphs: they are freed after their last reader."""
    step = changed(LAYERS.step([2]), 600, size_bytes=7, first=1, last=2)
    part = step.graphs[1]
    readers = (*part.readers, (1, 3))  # f3 and b3
    step = replace(step, graphs=(step.graphs[0], replace(part, readers=readers)))
    step = with_segment(step, 1, given=(*step.segments[1].given, 600))
    before, after = memory(step_graph(LAYERS.step([2])).graph), memory(step_graph(step).graph)
    grown = {name: after[name] - before[name] for name in before if after[name] != before[name]}
    assert grown == dict.fromkeys(("between 1", "1.f2", "1.f3", "between 2", "1.b3"), 7)


def test_a_view_of_a_handed_tensor_keeps_it() -> None:
    """A later graph that views its input sees no storage: here it is a view of the tensor that was handed over."""
    plain = LAYERS.step([2])
    ops = (
        Op("view", (), (0,), cost=0),
        Op("f", (0,), (1,), cost=1),
        Op("start", (1,), (2,), cost=0, recomputable=False, phase="backward", kind=BOUNDARY),
        Op("b", (0, 2), (3,), cost=1, phase="backward"),
    )
    values = (Value("view", 0), Value("loss", 4, kept=True), Value("tangent", 4), Value("gradient", 20, kept=True))
    later = CapturedGraph(graph=Graph(ops, values), readers=((0,),), views={0: 0}, returned=(1,), tangents=(2,), gradients=(3,))
    step = replace(plain, graphs=(plain.graphs[0], later))
    step = with_segment(step, 1, given=(HIDDEN + 1,))
    step = with_segment(step, 2, made=(GRADIENT + 1,))
    whole = step_graph(step)
    view = next(v for v in whole.graph.values if v.name == "1.view")
    assert view.base is not None and whole.graph.values[view.base].name == "0.h1"
    assert memory(whole.graph)["1.b"] == 10 + 20 + 4 + 4 + 20
    check(step, whole, range(len(whole.graph.ops)))


@pytest.mark.parametrize("held", [False, True])
def test_a_gradient_that_is_handed_on_is_freed_with_its_storage(held: bool) -> None:
    """The gradient of a sum is that of both of its terms: the middle graph returns the storage that it was given."""
    plain = LAYERS.step([1, 2])
    ops = (
        Op("sum", (), (0,), cost=1),
        Op("start", (0,), (1,), cost=0, recomputable=False, phase="backward", kind=BOUNDARY),
    )
    values = (Value("h", 20, kept=True), Value("tangent", 20, kept=True))
    middle = CapturedGraph(graph=Graph(ops, values), readers=((0,),), views={}, returned=(0,), tangents=(1,), gradients=(1,))
    step = replace(plain, graphs=(plain.graphs[0], middle, plain.graphs[2]))
    step = with_segment(changed(step, GRADIENT + 1, last=6 if held else 5), 1, given=(HIDDEN,))
    step = with_segment(step, 4, made=(GRADIENT + 1,))
    step = with_segment(step, 5, given=(GRADIENT + 1,))
    whole = step_graph(step)
    assert memory(whole.graph)["between 6"] == 4 + 5 + 3 + 1 + (20 if held else 0)
    check(step, whole, range(len(whole.graph.ops)))


def test_a_tensor_that_is_handed_over_is_computed_once() -> None:
    """The later graph holds the instance that it was given; a second one would be another allocation."""
    graph = step_graph(LAYERS.step([2])).graph
    assert [graph.ops[o].recomputable for o in named(graph, "0.f0", "0.f1", "1.f2", "1.f3")] == [True, False, True, False]


def test_a_gradient_that_leaves_its_graph_is_computed_once() -> None:
    """Autograd holds the instance that the segment returned: freeing it and computing it again later frees nothing."""
    graph = step_graph(LAYERS.step([2])).graph
    assert [graph.ops[o].recomputable for o in named(graph, "1.b3", "1.b2", "0.b1")] == [False, False, False]


def test_no_plan_frees_a_gradient_that_autograd_holds() -> None:
    """The gradient of the third weight would fit if it were computed again after the widest op, in another graph's segment."""
    layers = Layers(hidden=(60, 2, 2, 4), weights=(1, 1, 40, 1))
    with pytest.raises(InfeasibleBudgetError):
        solve(Problem(step_graph(layers.step([2], resident_bytes=0)).graph, 140), limits=Limits(time_s=5))


@pytest.mark.parametrize("overwritten", [1, 2])
def test_what_reads_an_overwritten_storage_is_not_computed_after_it(overwritten: int) -> None:
    """Its content has changed before the next segment in which the reader could run again."""
    step = changed(LAYERS.step([2]), BATCH, overwritten=overwritten)
    whole = step_graph(step)
    first, second, between, again = named(whole.graph, "0.f0", "0.f1", "between 1", "0.b1")
    assert whole.graph.ops[first].clobbered_by
    assert not whole.graph.ops[second].clobbered_by
    order = list(range(len(whole.graph.ops)))
    for place in (between, again):
        late = [*order[: place + 1], first, *order[place + 1 :]]
        assert "clobber" in {v.rule for v in validate(whole.graph, Plan.from_order(whole.graph, late))}
    check(step, whole, order)


def test_what_reads_a_view_of_an_overwritten_storage_is_not_computed_after_it() -> None:
    """Such as a matrix product with a transposed parameter: the view has no bytes, and may be held."""
    plain = LAYERS.step([2])
    ops = (
        Op("transpose", (), (0,), cost=0),
        Op("f", (0,), (1,), cost=1),
        Op("start", (1,), (2,), cost=0, recomputable=False, phase="backward", kind=BOUNDARY),
        Op("b", (1, 2), (3,), cost=1, phase="backward"),
    )
    values = (Value("view", 0), Value("h1", 20, kept=True), Value("tangent", 20), Value("w0", 1, kept=True))
    first = CapturedGraph(graph=Graph(ops, values), readers=((0,),), views={0: 0}, returned=(1,), tangents=(2,), gradients=(3,))
    step = replace(changed(plain, WEIGHT, overwritten=1), graphs=(first, plain.graphs[1]))
    step = with_segment(step, 0, given=(WEIGHT,))
    step = with_segment(step, 3, made=(WEIGHT_GRADIENT,))
    graph = step_graph(step).graph
    (product,) = named(graph, "0.f")
    assert graph.ops[product].clobbered_by == tuple(named(graph, "between 1"))


@pytest.mark.parametrize("overwritten", [0, 3])
def test_an_overwriting_by_the_graph_itself_is_left_to_its_own_rules(overwritten: int) -> None:
    """They say which op overwrites; after the graph's own backward nothing of it runs."""
    graph = step_graph(changed(LAYERS.step([2]), BATCH, overwritten=overwritten)).graph
    assert not any(op.clobbered_by for op in graph.ops)


def test_a_view_that_is_returned_is_computed_in_its_forward() -> None:
    """It has the storage of another result, and no reader but the caller: only the interval says when it is needed."""
    plain = LAYERS.step([2])
    first = plain.graphs[0]
    ops, values = list(first.graph.ops), list(first.graph.values)
    values.append(Value("view", 0, base=1, kept=True))
    view = len(values) - 1
    start = replace_op(ops[2], inputs=(1, view))
    graph = Graph((*ops[:2], Op("view", (1,), (view,), cost=0), start, *ops[3:]), tuple(values))
    readers = ((0, 5), (0,), (1,))
    step = replace(plain, graphs=(replace(first, graph=graph, returned=(1, view), readers=readers), plain.graphs[1]))
    step = with_segment(step, 0, made=(HIDDEN + 1, HIDDEN + 1))
    whole = step_graph(step)
    rng = random.Random(0)
    for _ in range(20):
        check(step, whole, random_order(whole.graph, rng, 0.2))


def test_an_update_between_a_release_and_its_interval_stays_in_its_forward() -> None:
    """Statistics of `BatchNormalization` are updated before the backward begins, by ops that nothing reads.

    In MobileNetV3 a solver put two of them after the tensors of the step before were released. They moved into the backward.
    """
    plain = LAYERS.step()
    (part,) = plain.graphs
    ops, values = list(part.graph.ops), (*part.graph.values, Value("statistics", 0))
    update = Op("update", (1,), (len(values) - 1,), cost=0, recomputable=False)
    start = part.boundary
    graph = Graph((*ops[:start], update, *ops[start:]), values, order=((start, start + 1),))
    readers = tuple(tuple(o + (o >= start) for o in each) for each in part.readers)
    step = replace(plain, graphs=(replace(part, graph=graph, readers=readers),))
    step = changed(step, 999, size_bytes=10, first=0, last=1, released=True)
    whole = step_graph(step)
    release, between, late = named(whole.graph, "release 1", "between 1", "0.update")
    order = [o for o in range(len(whole.graph.ops)) if o != late]
    order.insert(order.index(between), late)
    assert order.index(release) + 1 == order.index(late)
    check(step, whole, order)


def replace_op(op: Op, *, inputs: tuple[int, ...]) -> Op:
    return Op(op.name, inputs, op.outputs, op.cost, recomputable=op.recomputable, phase=op.phase, kind=op.kind)


def test_the_order_of_keeping_everything_is_cut_into_that_of_each_part() -> None:
    """Nothing has to move."""
    step = LAYERS.step([1, 3])
    whole = step_graph(step)
    order = range(len(whole.graph.ops))
    assert whole.within_segments(order) == list(order)
    assert whole.cut(order) == [list(range(len(part.graph.ops))) for part in step.graphs]


def test_backwards_may_run_in_any_order() -> None:
    """Three graphs with a loss each, whose backwards run as the user called them."""
    towers = [Layers(hidden=(size, 2 * size, 4), weights=(1, 1, 1)) for size in (8, 16, 32)]
    storages, segments, parts = dict[int, Storage](), list[Segment](), list[CapturedGraph]()
    turns = [(0, False), (1, False), (2, False), (1, True), (0, True), (2, True)]
    for p, tower in enumerate(towers):
        step = tower.step()
        parts.append(step.graphs[0])
        storages.update({1000 * p + s: replace(x, last=6 if x.last == 2 else x.last) for s, x in step.storages.items()})
    for p, backward in turns:
        segment = towers[p].step().segments[int(backward)]
        of = [tuple(None if s is None else 1000 * p + s for s in side) for side in (segment.given, segment.made)]
        segments.append(Segment(captured=p, backward=backward, given=of[0], made=of[1]))
    step = ObservedStep(graphs=tuple(parts), segments=tuple(segments), storages=storages, resident_bytes=0)
    whole = step_graph(step)
    held = memory(whole.graph)
    assert held["between 3"] == 8 + 16 + 4 + 16 + 32 + 4 + 32 + 64 + 4 + 4
    assert held["2.b2"] == 4 + 3 + 4 + 3 + 32 + 64 + 4 + 4 + 64 + 1
    rng = random.Random(1)
    for _ in range(20):
        check(step, whole, random_order(whole.graph, rng, 0.3))


@pytest.mark.parametrize("cuts", [[3], [2, 4]])
def test_a_plan_of_the_step_is_a_plan_of_each_part(cuts: list[int]) -> None:
    """Within half of what keeping everything needs; moving the plan into segments keeps its budget here."""
    layers = Layers(hidden=(40, 40, 40, 40, 40, 4), weights=(1,) * 6, output_read=frozenset(range(6)))
    step = layers.step(cuts, resident_bytes=0)
    whole = step_graph(step)
    everything = max(memory(whole.graph).values())
    result = solve(Problem(whole.graph, everything - 60), limits=Limits(time_s=5))
    moved = check(step, whole, result.plan.order)
    assert result.cost > whole.graph.cost
    assert evaluate(whole.graph, Plan.from_order(whole.graph, moved)).peak_bytes <= everything - 60


@st.composite
def chains(draw: st.DrawFn) -> tuple[Layers, list[int]]:
    """A chain of 2 to 7 layers, cut into 1 to 4 parts."""
    count = draw(st.integers(2, 7))
    sizes = st.integers(0, 9)
    layers = Layers(
        hidden=tuple(draw(sizes) for _ in range(count)),
        weights=tuple(draw(sizes) for _ in range(count)),
        output_read=frozenset(draw(st.sets(st.integers(0, count - 1)))),
    )
    return layers, sorted(draw(st.sets(st.integers(1, count - 1), max_size=3)))


@given(chains())
def test_cutting_a_chain_does_not_change_its_memory(chain: tuple[Layers, list[int]]) -> None:
    """Keeping everything takes the same bytes while each op runs: handoffs are views, and no storage counts twice."""
    layers, cuts = chain
    cut, whole = (memory(step_graph(layers.step(c)).graph) for c in (cuts, []))
    assert ops_of(cut) == ops_of(whole)
    assert max(cut.values()) == max(whole.values())


@given(chains(), st.integers(0, 2**32), st.sampled_from([0.0, 0.2, 0.5]))
@settings(max_examples=200)
def test_any_order_of_the_step_can_be_cut(chain: tuple[Layers, list[int]], seed: int, again: float) -> None:
    """What a solver puts elsewhere can be moved into segments, and each part of the order is valid for its graph.

    Resident storages may be overwritten in any segment.
    """
    layers, cuts = chain
    step, rng = layers.step(cuts), random.Random(seed)
    for i in range(len(layers.hidden)):
        step = changed(step, WEIGHT + i, overwritten=rng.choice([None, rng.randrange(len(step.segments))]))
    whole = step_graph(step)
    check(step, whole, random_order(whole.graph, rng, again))


@given(chains(), st.integers(0, 2**32))
def test_a_plan_of_the_cut_chain_is_one_of_the_chain(chain: tuple[Layers, list[int]], seed: int) -> None:
    """Cutting only forbids: without its intervals an order costs the same in the chain, and takes no more memory."""
    layers, cuts = chain
    cut, whole = (step_graph(layers.step(c)).graph for c in (cuts, []))
    order = random_order(cut, random.Random(seed), 0.3)
    places = {op.name.split(".")[-1]: o for o, op in enumerate(whole.ops)}
    loss = f"between {len(cuts) + 1}"
    places[loss] = named(whole, "between 1")[0]
    last = f"between {2 * len(cuts) + 2}"
    places[last] = len(whole.ops) - 1
    names = [cut.ops[o].name.split(".")[-1] for o in order]
    same = [places[name] for name in names if not name.startswith(BETWEEN) or name in (loss, last)]
    assert validate(whole, Plan.from_order(whole, same)) == ()
    mine, its = (simulate(g, Plan.from_order(g, o)) for g, o in ((cut, order), (whole, same)))
    assert its.cost == mine.cost
    assert its.peak_bytes <= mine.peak_bytes


def ops_of(held: dict[str, int]) -> dict[str, int]:
    """Bytes of each op that is no interval, by its name in the chain."""
    return {name.split(".")[1]: size for name, size in held.items() if not name.startswith(BETWEEN)}
