"""Updates that can wait run in one call: the same bits, within the same budget, and as few calls as it has room for."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import checkmate
from checkmate import Compute, Graph, Limits, Op, Plan, Value
from checkmate.studies.reserved import allocator_peaks
from checkmate.torch import Step, measure_peak
from checkmate.torch.partition.update_groups import group_updates

DEPTH = 6


def backward_with_updates(rng: random.Random, scale: int = 1) -> Graph:
    """Activations, a backward that frees them, and an update for each of its gradients; some ops have to follow an update."""
    depth = rng.randint(1, 5)
    values = [Value(f"x{k}", scale * rng.randint(0, 6)) for k in range(depth)]
    ops = [Op(f"f{k}", (k - 1,) if k else (), (k,), cost=1) for k in range(depth)]
    order: list[tuple[int, int]] = []
    for k in reversed(range(depth)):
        read = (k, len(values) - rng.choice([2, 2, 1])) if k + 1 < depth else (k,)  # a gradient may have another reader
        values += [Value(f"d{k}", scale * rng.randint(0, 3)), Value(f"g{k}", scale * rng.randint(0, 4))]
        made = (len(values) - 2, len(values) - 1)
        updates = [o for o, op in enumerate(ops) if op.phase == "optimizer"]
        order += [(o, len(ops)) for o in updates if rng.random() < 0.1]
        ops.append(Op(f"b{k}", read, made, cost=1, phase="backward"))
        size = scale * rng.choice([0, 0, 1, 4])
        ops.append(Op(f"u{k}", made[1:], (), cost=1, workspace_bytes=size, recomputable=False, phase="optimizer"))
    return Graph(tuple(ops), tuple(values), tuple(order), resident_bytes=scale)


def as_run(graph: Graph, groups: Iterable[Sequence[int]]) -> Graph:
    """The graph with all temporary tensors of a group at its first update, when all of its gradients are there."""
    ops = list(graph.ops)
    for group in groups:
        for o in group:
            size = sum(graph.ops[g].workspace_bytes for g in group) if o == group[0] else 0
            ops[o] = msgspec.structs.replace(ops[o], workspace_bytes=size)
    return msgspec.structs.replace(graph, ops=tuple(ops))


def runs_of(updates: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every way to cut a sequence."""
    for cuts in itertools.product([False, True], repeat=len(updates) - 1):
        runs = [[updates[0]]]
        for cut, update in zip(cuts, updates[1:], strict=True):
            if cut:
                runs.append([])
            runs[-1].append(update)
        yield runs


def fewest(graph: Graph, plan: Plan, budget_bytes: int) -> int:
    """The fewest groups by trying all, each in the place of its last update; without room in the budget the peak stays."""
    peak, held = (timeline := checkmate.simulate(graph, plan)).peak_bytes, timeline.bytes
    at = {step.op: p for p, step in enumerate(plan.steps) if isinstance(step, Compute)}
    found: list[int] = []
    for runs in runs_of([o for o in plan.order if graph.ops[o].phase == "optimizer"]):
        group = {o: run for run in runs for o in run}
        order: list[int] = []
        for o in plan.order:
            order += [o] if o not in group else group[o] if o == group[o][-1] else []
        moves_peak = any(held[at[o]] == peak == budget_bytes for run in runs for o in run[:-1])
        if not moves_peak and not checkmate.validate(graph, Plan.from_order(graph, order)):
            real = as_run(graph, runs)
            if checkmate.simulate(real, Plan.from_order(real, order)).peak_bytes <= budget_bytes:
                found.append(len(runs))
    return min(found)


@given(st.integers(0, 2**32 - 1))
def test_the_fewest_groups_within_the_budget(seed: int) -> None:
    """By trying all of them; the plan still holds every rule of the graph, and its peak is that of the calls."""
    rng = random.Random(seed)
    graph = backward_with_updates(rng)
    plan = Plan.from_order(graph, range(len(graph.ops)))
    budget_bytes = checkmate.simulate(graph, plan).peak_bytes + rng.choice([0, 0, 1, 3, 9])
    result, groups = group_updates(graph, checkmate.evaluate(graph, plan), budget_bytes, None, sys.maxsize)
    runs = [[update.op for update in group] for group in groups]
    order = [o for o in result.plan.order if graph.ops[o].phase == "optimizer"]
    assert order == [o for run in runs for o in run]
    assert checkmate.validate(graph, result.plan, budget_bytes) == ()
    real = checkmate.simulate(as_run(graph, runs), msgspec.structs.replace(result.plan, graph_digest=""))
    assert real.peak_bytes == result.peak_bytes <= budget_bytes
    assert len(groups) == fewest(graph, plan, budget_bytes)


@given(st.integers(0, 2**32 - 1))
def test_what_an_allocator_counts_keeps_the_budget(seed: int) -> None:
    """Blocks are larger than their requests, and by how much depends on the order of the requests."""

    def counted(graph: Graph, plan: Plan) -> int:
        return allocator_peaks(graph, plan).allocated_bytes

    graph = backward_with_updates(random.Random(seed), scale=700_000)
    result = checkmate.evaluate(graph, Plan.from_order(graph, range(len(graph.ops))))
    for room in (0, 1_000_000):
        budget_bytes = counted(graph, result.plan) + room
        grouped, groups = group_updates(graph, result, budget_bytes, counted, sys.maxsize)
        real = as_run(graph, [[update.op for update in group] for group in groups])
        assert counted(real, msgspec.structs.replace(grouped.plan, graph_digest="")) <= budget_bytes


def wide(rows: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(rows, 64), torch.arange(rows) % 64


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, **options: Any) -> Step:
    given = {"time_limit_s": 1, **options}
    return checkmate.torch.compile(model, nn.functional.cross_entropy, optimizer, example=(x, y), **given)


def calls_of(op: str, run: Callable[[], Any]) -> int:
    """Number of calls of an op."""
    with torch.autograd.profiler.profile() as profile:
        run()
    return sum(event.name == op for event in profile.function_events)


ADAMW = {"fused": "aten::_fused_adamw_", "foreach": "aten::_foreach_sqrt"}
"""Implementation of AdamW -> an op that each of its calls has once."""


@pytest.mark.parametrize("kind", ADAMW)
def test_one_call_updates_all_parameters(kind: str) -> None:
    """Activations are freed in the backward: the gradients fit in their place, and so do the temporary tensors of all updates."""
    model, x, y = wide(2048)
    step = compiled(model, torch.optim.AdamW(model.parameters(), **{kind: True}), x, y)
    step(x, y)
    assert calls_of(ADAMW[kind], lambda: step(x, y)) == 1
    assert measure_peak(lambda: step(x, y)) == step.result.peak_bytes - step.graph.resident_bytes


def test_the_smallest_budget_is_kept_in_fewer_calls() -> None:
    """What the groups hold at once is counted: the planned peak is the measured one, and no budget is out of reach for them."""
    model, x, y = wide(64)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    graph = compiled(model, optimizer, x, y, budget="100%", chunking="off").graph
    smallest = checkmate.min_budget(graph, limits=Limits(time_s=0.5)).peak_bytes
    step = compiled(model, optimizer, x, y, budget=smallest, chunking="off")
    step(x, y)
    assert 1 < calls_of(ADAMW["foreach"], lambda: step(x, y)) < len([*model.parameters()])
    assert measure_peak(lambda: step(x, y)) == step.result.peak_bytes - step.graph.resident_bytes
    assert step.result.peak_bytes <= smallest
    assert checkmate.validate(step.graph, step.plan, step.result.budget_bytes) == ()


def test_one_call_where_the_budget_has_room() -> None:
    """Few activations leave the gradients no room below the peak of the plan, and the budget may."""
    model, x, y = wide(8)
    calls: list[int] = []
    for budget in ("100%", "1MiB"):
        step = compiled(model, torch.optim.AdamW(model.parameters(), fused=True), x, y, budget=budget)
        step(x, y)
        calls.append(calls_of(ADAMW["fused"], lambda step=step: step(x, y)))
        assert step.result.peak_bytes <= step.result.budget_bytes
        assert abs(measure_peak(lambda step=step: step(x, y)) - step.result.peak_bytes + step.graph.resident_bytes) <= 64
    assert calls[0] > calls[1] == 1


@pytest.mark.parametrize("foreach", [True, False])
def test_temporary_tensors_of_a_call_are_planned(foreach: bool) -> None:
    """All at once by ``foreach``, but for a few scalars of each. A loop over parameters saves no launches: its peak stays."""
    model, x, y = wide(8)
    step = compiled(model, torch.optim.AdamW(model.parameters(), foreach=foreach), x, y, budget="1MiB")
    step(x, y)
    excess = step.result.peak_bytes - step.graph.resident_bytes - measure_peak(lambda: step(x, y))
    assert -64 <= excess <= (32 * len([*model.parameters()]) if foreach else 64)


def test_updates_run_in_groups_within_reserved_memory() -> None:
    """As far as temporary tensors of a call are small requests of the allocator."""
    model, x, y = wide(2048)
    options = {"budget": "100%", "budget_of": "reserved"}
    step = compiled(model, torch.optim.AdamW(model.parameters(), fused=True), x, y, **options)
    step(x, y)
    assert calls_of(ADAMW["fused"], lambda: step(x, y)) == 1


def test_updates_of_a_given_plan_are_grouped_again() -> None:
    """The plan of a step is what runs: written and given to another step, it is the plan of that one."""
    model, x, y = wide(2048)
    steps: list[Step] = []
    for plan in (None, True):
        given = {"plan": steps[0].plan} if plan else {}
        steps.append(compiled(model, torch.optim.AdamW(model.parameters(), fused=True), x, y, **given))
    assert steps[0].plan == steps[1].plan
    steps[1](x, y)
    assert calls_of(ADAMW["fused"], lambda: steps[1](x, y)) == 1
