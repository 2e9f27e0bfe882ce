"""The states of a step, the events that change them, and the decisions about a step that begins again: without any tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any


class StepState(Enum):
    """State of the step of a thread."""

    BETWEEN = "no step is under way"
    FIRST = "eager code of a new step is seen, and no graph of it has run"
    RECORDING = "a step runs that no plan is known for: each graph runs its own program"
    PLANNED = "a step runs its plan"
    ENDING = "no forward waits for its backward any more, and eager code of the step may follow"
    INTERRUPTED = "an exception came while the account of the step was changed"

    __hash__ = object.__hash__  # that of `Enum` is written in Python

    @property
    def is_under_way(self) -> bool:
        """Whether a forward waits for its backward."""
        return self in (StepState.RECORDING, StepState.PLANNED)


class StepEvent(Enum):
    """Change of the state of a step."""

    WATCH = "a function is called whose eager code has not been seen"
    BEGIN = "the first graph of a step begins, and no plan is known"
    BEGIN_PLANNED = "the first graph of a step begins, and a plan is known"
    NONE_WAITS = "the last forward that waited has run its backward, or was given up"
    END = "the step was taken over"

    __hash__ = object.__hash__


TRANSITIONS: Mapping[tuple[StepState, StepEvent], StepState] = {
    (StepState.BETWEEN, StepEvent.WATCH): StepState.FIRST,
    (StepState.BETWEEN, StepEvent.BEGIN): StepState.RECORDING,
    (StepState.BETWEEN, StepEvent.BEGIN_PLANNED): StepState.PLANNED,
    (StepState.FIRST, StepEvent.BEGIN): StepState.RECORDING,
    (StepState.FIRST, StepEvent.BEGIN_PLANNED): StepState.PLANNED,
    (StepState.RECORDING, StepEvent.NONE_WAITS): StepState.ENDING,
    (StepState.PLANNED, StepEvent.NONE_WAITS): StepState.ENDING,
    (StepState.ENDING, StepEvent.END): StepState.BETWEEN,
}
"""The state after an event. Any other event leaves the state as it is."""


class _Update(AbstractContextManager[None]):
    """An update; a step has a dozen, and a context of `contextlib.contextmanager` would take 2 us more for each."""

    def __init__(self, unfinished: set[_Update], within: Sequence[AbstractContextManager[Any]]) -> None:
        self._unfinished, self._within = unfinished, within

    def __enter__(self) -> None:
        for context in self._within:
            context.__enter__()
        self._unfinished.add(self)

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            self._unfinished.discard(self)
        for context in reversed(self._within):
            context.__exit__(kind, *error)


class StateMachine:
    """The state of successive steps.

    Every update of the account of a step runs inside of `update`. After Ctrl-C or any other exception in it the state is
    ``INTERRUPTED`` until `throw_away`: the half-done account is not used.
    """

    def __init__(self) -> None:
        self._state = StepState.BETWEEN
        self._unfinished = set[_Update]()  # no counter: a finalizer may run in any thread, and `add` is one instruction

    @property
    def state(self) -> StepState:
        """The present state, as seen outside of an update."""
        return StepState.INTERRUPTED if self._unfinished else self._state

    @property
    def is_under_way(self) -> bool:
        """Whether a forward waits for its backward, as seen inside of an update too."""
        return self._state.is_under_way

    def on(self, event: StepEvent) -> None:
        """Change to the next state."""
        self._state = TRANSITIONS.get((self._state, event), self._state)

    def update(self, *within: AbstractContextManager[Any]) -> AbstractContextManager[None]:
        """Context of an update, in other contexts.

        Only an update that reaches its end is trusted: no code has to run after an exception.
        """
        return _Update(self._unfinished, within)

    def throw_away(self) -> None:
        """Begin again, after an interrupt."""
        self._state = StepState.BETWEEN
        self._unfinished.clear()


class PlanDecision(Enum):
    """How a recorded step runs when it begins again."""

    KEEP = "as its graphs were compiled"
    COMPILE_FOR_LESS = "its only graph is compiled again, for less than the budget"
    TRACE_AGAIN = "its graphs are compiled again: their code came from a cache, and nothing can be planned without a trace"
    PLAN = "its graphs run the programs of one plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """The facts that decide how a step runs."""

    plan_given: bool  # the user gave a plan for one of the graphs
    keeps_budget: bool  # its only graph, as it was compiled, keeps the budget next to everything else
    can_shrink: bool  # its only graph can be compiled again for fewer bytes, and was not
    compiled_for_plan: bool  # its graphs were compiled again for the plan of this step
    from_cache: bool  # code of a graph came from a cache

    def decide(self) -> PlanDecision:
        """The first decision whose guard holds."""
        guards = (
            (self.plan_given or self.keeps_budget, PlanDecision.KEEP),
            (self.can_shrink, PlanDecision.COMPILE_FOR_LESS),
            (self.compiled_for_plan, PlanDecision.KEEP),
            (self.from_cache, PlanDecision.TRACE_AGAIN),
        )
        return next((decision for holds, decision in guards if holds), PlanDecision.PLAN)
