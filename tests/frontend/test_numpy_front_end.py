"""The front end of the how-to page keeps the laws of every front end: planned peak, bits, refusals, measured budget."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from checkmate import Free, InfeasibleBudgetError, LocalSearch, Plan, PlanError
from checkmate.frontend.calibration import Offset
from checkmate.frontend.planner import keep_everything
from checkmate.frontend.step_memory import StepMemory

EXAMPLE = Path(__file__).parents[2] / "examples" / "numpy_front_end.py"
BUDGETS = ["100%", "60%", "40%", "smallest"]
MOST_LINES = 150
SOLVER = LocalSearch(decodes=1000)  # an amount of work, so that the plans do not depend on how busy the machine is


def loaded() -> ModuleType:
    """A module of its own, in which a test can replace a name."""
    spec = importlib.util.spec_from_file_location("numpy_front_end", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


toy: Any = loaded()


@pytest.fixture
def kernels() -> Iterator[dict[str, Any]]:
    """The kernels, and after the test those that were there before."""
    before = dict(toy.KERNELS)
    yield toy.KERNELS
    toy.KERNELS.update(before)


@cache
def tape() -> Any:
    return toy.example()


@cache
def refusal() -> InfeasibleBudgetError:
    """The error of an impossible budget, with no kernel to run."""
    without: Any = loaded()
    without.KERNELS.clear()
    with pytest.raises(InfeasibleBudgetError) as refused:
        without.compile(without.example(), budget=1, time_limit_s=1)
    return refused.value


@cache
def planned(budget: str) -> Any:
    if budget == "smallest":
        return toy.compile(tape(), budget=refusal().smallest_bytes, time_limit_s=1)
    return toy.compile(tape(), budget=budget, solver=SOLVER, time_limit_s=None)


@cache
def keeping_everything() -> Any:
    return toy.plan_step(tape(), keep_everything)


def run(step: Any, round_to: int = 1) -> tuple[list[np.ndarray], int]:
    return toy.run(step, toy.Memory(round_to))


def same_bits(ours: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    return [a.tobytes() for a in ours] == [b.tobytes() for b in theirs]


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_measured_peak_is_the_planned_one(budget: str) -> None:
    """The allocator gives exactly what it is asked for, so that a difference is a byte that the graph does not count."""
    step = planned(budget)
    assert run(step)[1] == step.result.peak_bytes <= step.result.budget_bytes


@pytest.mark.parametrize("budget", BUDGETS)
def test_loss_and_gradients_are_bitwise_those_of_keeping_everything(budget: str) -> None:
    """A plan changes when a value is computed, and never what it is."""
    assert same_bits(run(planned(budget))[0], run(keeping_everything())[0])


def test_smaller_budgets_compute_dropout_again_with_the_same_masks(kernels: dict[str, Any]) -> None:
    """The law of equal bits says something about random state only if a dropout is computed more than once."""
    masks: dict[int, set[bytes]] = {}
    drawn: list[bytes] = []
    draw = kernels["dropout"]

    def watched(*args: Any, **options: Any) -> Any:
        made = draw(*args, **options)
        drawn.append(made[1].tobytes())
        return made

    kernels["dropout"] = watched
    run(keeping_everything())
    once = list(drawn)
    assert len(set(once)) == len(once) == 5
    drawn.clear()
    step = planned("smallest")
    run(step)
    random = [o for o in step.result.plan.order if step.graph.ops[o].replay_bytes]
    assert len(random) > 5
    for o, mask in zip(random, drawn, strict=True):
        masks.setdefault(o, set()).add(mask)
    assert [masks[o] for o in sorted(masks)] == [{mask} for mask in once]


def test_without_replayed_states_the_bits_differ() -> None:
    """The comparison of bits sees a front end that forgets the random state."""
    forgetful: Any = loaded()
    forgetful.Replays.before = lambda self, o: self.random
    step = forgetful.compile(forgetful.example(), plan=planned("smallest").result.plan)
    assert not same_bits(forgetful.run(step, forgetful.Memory())[0], run(keeping_everything())[0])


def test_an_impossible_budget_is_refused_before_anything_runs() -> None:
    """The error names a budget that works, and the planner that refused had no kernel to call."""
    assert refusal().budget_bytes == 1
    assert refusal().smallest_bytes is not None
    assert run(planned("smallest"))[1] <= refusal().smallest_bytes < planned("40%").result.budget_bytes


def test_a_given_plan_runs_exactly_as_given() -> None:
    """Kernels are called in the order of the plan, repetitions included."""
    plan = planned("40%").result.plan
    ran: list[int] = []
    watched: Any = loaded()

    class Watched(watched.Step):
        def _compute(self, o: int, *rest: Any) -> Any:
            ran.append(o)
            return super()._compute(o, *rest)

    watched.Step = Watched
    step = watched.compile(watched.example(), plan=plan)
    watched.run(step, watched.Memory())
    assert step.result.plan == plan
    assert tuple(ran) == plan.order
    assert len(ran) > len(step.graph.ops)


def test_a_given_plan_that_does_not_hold_is_refused() -> None:
    """One that is over the budget, or reads what is freed."""
    graph, plan = keeping_everything().graph, planned("100%").result.plan
    with pytest.raises(PlanError, match="budget"):
        toy.compile(tape(), plan=plan, budget="40%")
    early = Plan((plan.steps[0], Free(graph.ops[0].outputs[0]), *plan.steps[1:]), graph.digest)
    with pytest.raises(PlanError):
        toy.compile(tape(), plan=early)


@pytest.mark.parametrize("round_to", [64, 512])
@pytest.mark.parametrize("budget", ["60%", "45%"])
def test_an_allocator_that_rounds_is_held_to_the_budget(budget: str, round_to: int) -> None:
    """The measured peak counts: the plan with just as many live bytes as the budget takes more."""
    limit = planned(budget).result.peak_bytes
    assert run(planned(budget), round_to)[1] > limit
    step = toy.compile(tape(), budget=limit, solver=SOLVER, time_limit_s=None, round_to=round_to)
    results, peak = run(step, round_to)
    assert step.result.peak_bytes < peak <= limit
    assert same_bits(results, run(keeping_everything())[0])


def test_rounding_that_no_plan_makes_up_for_is_refused_with_the_smallest_measured_peak() -> None:
    """The planner finds a plan within the budget, the measured peak of none keeps it, and the peak that is named can be had."""
    quick: Any = loaded()
    quick.Offset = partial(Offset, most_trials=2)  # a search that proves nothing takes a second each
    small, page = quick.example(width=12, blocks=1, rows=20), 4096
    limit = quick.plan_step(small, keep_everything).result.peak_bytes
    with pytest.raises(InfeasibleBudgetError, match="measured") as refused:
        quick.compile(small, budget=limit, solver=SOLVER, time_limit_s=None, round_to=page)
    assert refused.value.smallest_bytes is not None
    assert refused.value.smallest_bytes > limit
    step = quick.compile(small, budget=refused.value.smallest_bytes, solver=SOLVER, time_limit_s=None, round_to=page)
    assert quick.run(step, quick.Memory(page))[1] <= refused.value.smallest_bytes


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_boundary_divides_the_step_where_the_backward_begins(budget: str, kernels: dict[str, Any]) -> None:
    """`StepMemory` of the plan is what the memory measures on both sides of the boundary."""
    seen: dict[str, int] = {}
    start = kernels["start_backward"]

    def watched(memory: Any, like: np.ndarray) -> np.ndarray:
        made = start(memory, like)
        seen.update(forward=memory.peak_bytes, saved=memory.live_bytes - made.nbytes)
        memory.reset_peak()
        return made

    kernels["start_backward"] = watched
    step = planned(budget)
    results, backward_peak = run(step)
    above, resident = StepMemory.of(step.graph, step.result.plan), step.graph.resident_bytes
    assert above.forward_peak_bytes == seen["forward"] - resident
    assert above.saved_bytes == seen["saved"] - resident
    assert above.backward_peak_bytes == backward_peak - resident
    assert above.gradient_bytes == sum(g.nbytes for g in results[1:])


def test_gradients_are_the_derivatives_of_the_loss() -> None:
    """The tape itself is right: central differences of the loss along one direction for each parameter."""
    small = toy.example(width=5, blocks=1, rows=4)
    step = toy.plan_step(small, keep_everything)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(var.shape).astype(np.float32) / 2 for var in small.parameters + small.batch]
    gradients = step(arrays, toy.Random(3), toy.Memory())[1:]
    for i, gradient in enumerate(gradients):
        way = rng.standard_normal(gradient.shape).astype(np.float32)
        ends = [
            float(step([a + sign * 1e-2 * way if j == i else a for j, a in enumerate(arrays)], toy.Random(3), toy.Memory())[0])
            for sign in (1, -1)
        ]
        assert (ends[0] - ends[1]) / 2e-2 == pytest.approx(float((gradient * way).sum()), rel=2e-2, abs=1e-2)


def test_the_front_end_is_short() -> None:
    """The page promises at most 150 lines; the framework itself and the example are not counted."""
    lines = EXAMPLE.read_text().splitlines()
    front = lines[lines.index("# front end: capture") : lines.index("# example")]
    assert len(front) <= MOST_LINES
