"""The states of a step, and the decision how a step runs that begins again."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from checkmate.torch.steps.state import PlanDecision, StateMachine, StepEvent, StepFacts, StepState

BETWEEN, FIRST, RECORDING = StepState.BETWEEN, StepState.FIRST, StepState.RECORDING
PLANNED, ENDING, INTERRUPTED = StepState.PLANNED, StepState.ENDING, StepState.INTERRUPTED
WATCH, BEGIN, BEGIN_PLANNED = StepEvent.WATCH, StepEvent.BEGIN, StepEvent.BEGIN_PLANNED
NONE_WAITS, END = StepEvent.NONE_WAITS, StepEvent.END

STEPS = {
    "the first step": [(WATCH, FIRST), (BEGIN, RECORDING), (NONE_WAITS, ENDING), (END, BETWEEN)],
    "a step that is known": [(BEGIN_PLANNED, PLANNED), (NONE_WAITS, ENDING), (END, BETWEEN)],
    "a known step whose eager code was not seen": [(WATCH, FIRST), (BEGIN_PLANNED, PLANNED), (NONE_WAITS, ENDING)],
    "another step, whose eager code was seen": [(BEGIN, RECORDING), (NONE_WAITS, ENDING), (END, BETWEEN)],
    "calls without a graph": [(WATCH, FIRST), (WATCH, FIRST), (END, FIRST), (BEGIN, RECORDING)],
    "a call inside of a step": [(BEGIN, RECORDING), (WATCH, RECORDING), (END, RECORDING), (BEGIN, RECORDING)],
    "a call inside of a planned step": [(BEGIN_PLANNED, PLANNED), (WATCH, PLANNED), (END, PLANNED), (BEGIN, PLANNED)],
    "nothing to end": [(END, BETWEEN), (NONE_WAITS, BETWEEN)],
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_each_event_leads_to_one_state(step: list[tuple[StepEvent, StepState]]) -> None:
    """A step is under way from its first forward until none waits for its backward."""
    machine = StateMachine()
    assert machine.state is BETWEEN
    for event, state in step:
        machine.on(event)
        assert machine.state is state
        assert machine.is_under_way is (state in (RECORDING, PLANNED))
        assert state.is_under_way is machine.is_under_way


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside of another one"])
def test_an_update_that_does_not_reach_its_end_leaves_nothing_to_trust(inside: bool) -> None:
    """Whatever comes after, until the account is thrown away: then the next step is a new one."""
    machine = StateMachine()
    machine.on(BEGIN)
    with machine.update():
        assert machine.state is INTERRUPTED and machine.is_under_way
        with machine.update():
            pass
    assert machine.state is RECORDING

    def interrupted() -> None:
        with machine.update():
            raise KeyboardInterrupt

    def nested() -> None:
        with machine.update():
            interrupted()

    with pytest.raises(KeyboardInterrupt):
        nested() if inside else interrupted()
    with machine.update():
        machine.on(NONE_WAITS)
    assert machine.state is INTERRUPTED
    machine.throw_away()
    assert machine.state is BETWEEN and not machine.is_under_way
    machine.on(BEGIN_PLANNED)
    assert machine.state is PLANNED


def test_an_exception_that_is_caught_inside_of_an_update_is_forgotten_with_the_account_alone() -> None:
    """An inner update that failed is one that was not finished, although the outer one was."""
    machine = StateMachine()
    with machine.update(), pytest.raises(MemoryError), machine.update():
        raise MemoryError
    assert machine.state is INTERRUPTED


NOTHING = StepFacts(
    plan_given=False,
    keeps_budget=False,
    can_shrink=False,
    compiled_for_plan=False,
    from_cache=False,
)
RANKED = [
    ("plan_given", PlanDecision.KEEP),
    ("keeps_budget", PlanDecision.KEEP),
    ("can_shrink", PlanDecision.COMPILE_FOR_LESS),
    ("compiled_for_plan", PlanDecision.KEEP),
    ("from_cache", PlanDecision.TRACE_AGAIN),
]


def test_a_step_about_which_nothing_speaks_is_planned_as_one() -> None:
    assert NOTHING.decide() is PlanDecision.PLAN


def test_the_first_fact_that_holds_decides() -> None:
    """Whatever facts of less weight hold in addition."""
    for facts in itertools.product([False, True], repeat=len(RANKED)):
        if any(facts):
            named = {name: holds for (name, _), holds in zip(RANKED, facts, strict=True)}
            _, decision = RANKED[facts.index(True)]
            assert dataclasses.replace(NOTHING, **named).decide() is decision
