"""Runs the planned graphs that a thread calls: it tells where steps begin and end, and chooses the program of each run.

A step begins with a forward while no other forward waits for its backward, and is over when none waits any more. It is also over
when its first graph begins again after an optimizer has run: the user holds the forwards that still wait then, and their
backward may never run. When a step runs for the first time, `StepRecorder` records its segments, and the graphs run their own
programs. When the step begins again, `KnownSteps` plans it as a whole, and each of its forwards runs the program of its place in
the plan. Several kinds of steps may begin with the same graph: the coordinator expects the kind that followed the same step
before. A step that turns out differently runs the graphs' own programs, and is planned in turn. `StateMachine` has the states of
a step.

A forward returns one more tensor for autograd to save. It is empty, and only tells to which forward a backward belongs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from checkmate.core.budget import Budget
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.frontend.planner import order_of
from checkmate.torch._compat.dynamo import untraced
from checkmate.torch._compat.engine import current_backward, keeps_graph, queue_after_backward, saved_tensors_packer
from checkmate.torch.distributed.wrappers import fsdp_unsharded_bytes
from checkmate.torch.graph.storages import current_bytes, leaves, storage_key, strided_parts
from checkmate.torch.measure.device_memory import DeviceMemory, device_memory
from checkmate.torch.steps.accumulation import Accumulation
from checkmate.torch.steps.announcements import Announcements
from checkmate.torch.steps.eager_watch import EagerCode, EagerOp
from checkmate.torch.steps.known_steps import KnownSteps
from checkmate.torch.steps.program import ForwardArguments, PlannedGraph, Program
from checkmate.torch.steps.recorder import StepRecorder
from checkmate.torch.steps.run import Run
from checkmate.torch.steps.state import StateMachine, StepEvent, StepState
from checkmate.torch.steps.step_plan import StepPlan

_log = logging.getLogger("checkmate.torch")

# Autograd runs backwards on other threads, and a finalizer runs on any thread, even on one that already holds the lock. With a
# lock for each coordinator, two threads in finalizers could each wait for the lock of the other.
_LOCK = threading.RLock()


class Coordinator:
    """The step that is under way in one thread, and the steps that were seen before."""

    def __init__(self) -> None:
        self._machine = StateMachine()
        self._pending: list[Run] = []  # forwards that wait for their backwards, in order
        self._recorder = StepRecorder(self._machine)
        self.steps = KnownSteps()
        self._plan: StepPlan | None = None  # of the newest step
        self._position = 0  # of the next forward in the plan
        self._updated = False  # whether an optimizer has run since the step began
        self._announcements = Announcements(self._recorder, self._pending)
        self._eager = EagerCode(self._see_eager_op)
        self._calling = False  # whether a call of a compiled function is under way
        self._budget: Budget | None = None  # of the function that is called
        self._memory: DeviceMemory | None = None  # at the newest look: on a CPU, when a step's first graph was compiled
        _see_updates()

    def forget_steps(self) -> None:
        """Return to the state of a new process: the next step is a first one."""
        with _LOCK:
            self._recover()
            for run in list(self._pending):
                self._give_up(run)
            self._eager.forget()
            self._recorder.close()
            self._announcements = Announcements(self._recorder, self._pending)
            self._new_recorder(watched=False)
            self.steps, self._plan = KnownSteps(), None

    @property
    def state(self) -> StepState:
        """The state of the step."""
        return self._machine.state

    @property
    def result(self) -> Result | None:
        """Plan of the newest step, or of its largest graph if it was not planned as a whole; None before the first step."""
        if self._plan is not None:
            return self._plan.result
        own = [run.planned.own.result for run in self._recorder.forwards]
        return max(own, key=lambda result: result.peak_bytes, default=None)

    @property
    def step_bytes(self) -> int | None:
        """Predicted peak of the newest step, resident bytes included; None before the first step."""
        return None if self.result is None else self.result.peak_bytes

    @property
    def announced_bytes(self) -> int:
        """The largest total of a warning, in bytes; 0 if there was none."""
        return self._announcements.most_bytes

    @property
    def step(self) -> StepPlan | None:
        """The plan of the newest step; None if it was not planned as a whole."""
        return self._plan

    @property
    def planned(self) -> tuple[Graph, Result] | None:
        """Graph and plan of the newest step, or of its only graph, if that has the loss; None if neither was planned."""
        if self._plan is not None:
            return self._plan.graph, self._plan.result
        forwards = self._recorder.forwards
        if len(forwards) == 1 and forwards[0].planned.alone:
            return forwards[0].planned.interface.graph, forwards[0].planned.own.result
        return None

    @property
    def in_flight(self) -> bool:
        """Whether any forward waits for its backward."""
        return self._machine.is_under_way

    def budget_bytes(self, budget: Budget) -> int | None:
        """Bytes of a budget; None for a share before any step is planned."""
        if budget.total_bytes is not None:
            return budget.total_bytes
        forwards = self._recorder.forwards
        same = bool(forwards) and forwards[0].planned.budget == budget
        return self.result.budget_bytes if same and self.result is not None else None

    def held_bytes(self) -> int:
        """Bytes that the graphs in flight hold: inputs, outputs and saved tensors."""
        with _LOCK:
            return sum(self._recorder.held(self._pending).values())

    def outside_bytes(self, inputs: Iterable[torch.Tensor], device: torch.device) -> int:
        """Bytes on a device that belong neither to a graph with some inputs and their gradients, nor to the present step."""
        with _LOCK:
            known = self._recorder.held(self._pending) | ({} if self._recorder.over else self._recorder.present())
            if device.type == "cuda" or self._memory is None or not self.in_flight:
                gc.collect()  # compilation leaves cycles, which hold earlier models
                self._memory = device_memory(device)
        given = [each for t in inputs for each in (t, t.grad if t.is_leaf else None) if each is not None]
        return self._memory.besides(
            known | {storage_key(p): current_bytes(p) for t in given for p in strided_parts(t) if p.device.type == device.type}
        )

    def begin_call(self, function: object, budget: Budget | None = None) -> None:
        """Prepare for a call of a compiled function; the function tells the steps of several networks apart.

        If the eager code of a step has not been seen before, it is watched from here on.
        """
        if current_backward() >= 0:  # as `torch.utils.checkpoint` calls: autograd undoes the begin and end of a mode here
            return
        with _LOCK:
            self._recover()
            with self._machine.update():
                self.end_watch()
                self._calling, self._budget = True, budget
                if not self.in_flight:
                    self._end_step()
                if self._eager.is_due(function) and (not self.in_flight or self._may_be_over()):
                    if not self.in_flight:
                        self.steps.close(self._recorder)
                        self._new_recorder(watched=True)
                    self._machine.on(StepEvent.WATCH)
                    self._eager.begin()

    def end_call(self) -> None:
        """Note that a call of a compiled function is over: its outputs may replace those of the call before."""
        if current_backward() >= 0:
            return
        self._calling = False
        with self._update():
            self._recorder.end_call()

    def compiling(self, paused: bool) -> None:
        """Do not count the allocations of a compiler as allocations of the step."""
        self._eager.pause(paused)

    def optimizer_ran(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer has updated parameters and may have created its state."""
        self._updated = True
        if self._eager.is_watched:
            with self._update():
                for tensor in leaves([*optimizer.state.values()]):
                    self._recorder.keeps(tensor)

    def _see_eager_op(self, op: EagerOp) -> None:
        recorder = self._recorder
        with self._update():
            for tensor in op.given:
                # AOTAutograd detaches the tensors that it saves for a backward: this is not code of the user.
                if not any(storage_key(tensor) in run.held for run in self._pending):
                    recorder.read(tensor)
                if op.is_exchange:
                    recorder.exchanged(tensor)
            recorder.took(op.peak_bytes)
            self._announcements.of_eager_code(op.peak_bytes)
            for tensor in op.made:
                recorder.allocated(tensor)
                self._announcements.of_eager_code(0)
                if self._calling and not recorder.forwards and self._budget is not None:
                    self._announcements.before_any_graph(self._budget, tensor.device)

    def _update(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the account of the step changes; see `StateMachine.update`."""
        return self._machine.update(_LOCK, self._eager.paused()) if self._eager.is_watched else self._machine.update(_LOCK)

    def _recover(self) -> None:
        """Discard the whole account of a step after an exception in it, such as Ctrl-C."""
        if self.state is not StepState.INTERRUPTED:
            return
        self._recorder.close()
        self._new_recorder(watched=self._eager.is_watched)
        self._pending.clear()
        self._plan, self._calling = None, False
        self._eager.pause(False)
        self._machine.throw_away()

    def end_watch(self) -> None:
        """Stop watching eager code if its step is over: when an optimizer begins, or with the next call."""
        if not self._calling and (self._recorder.over or not self.in_flight):  # Dynamo would undo the end of a mode
            self._eager.end()

    def forward(self, planned: PlannedGraph, args: list[Any]) -> Any:
        """Run the forward of a planned graph, after planning a known step; the program clears the list of its arguments."""
        packer = saved_tensors_packer()
        if packer is not None:
            self._announcements.of_saved_tensors_hooks(planned, packer)
            with self._eager.paused():
                return planned.forward_through_hooks(args)
        self._recover()
        with self._machine.update():
            run = self._begin_forward(planned, args)
            program = run.program
            assert program.forward is not None
            with self._eager.paused(), program.running:
                results = list(program.forward(args))
                token = torch.empty(0, dtype=torch.uint8)
            run.symbols = results[len(results) - program.num_symbols :]
            results[len(results) - program.num_symbols :] = [0] * planned.num_symbols  # AOTAutograd expects as many as at first
            results.insert(planned.interface.num_outputs, token)
            # A step may end without a backward: after an exception, or if its loss is dropped. Nothing is called then: the
            # only sign is that the saved tensors are freed.
            key = storage_key(token)
            _IN_FLIGHT[key] = self, run, weakref.ref(token.untyped_storage(), lambda _: _drop(key))
            with self._update():
                self._recorder.end_forward(run, results)
                self._pending.append(run)
                self._announcements.after_segment()
        return results

    def _begin_forward(self, planned: PlannedGraph, args: list[Any]) -> Run:
        transient = fsdp_unsharded_bytes()
        with self._update():
            forwards = self._recorder.forwards
            if self.in_flight and forwards and forwards[0].planned is planned and self._may_be_over():
                for run in list(self._pending):  # the user holds them, and does not differentiate them
                    self._give_up(run)
            if not self.in_flight:
                self._begin_step(planned, args)
            program = self._planned_program(planned)
            run = self._recorder.begin_forward(planned, program or planned.own, args, transient)
            if run.program.undefined:
                run.arguments = ForwardArguments(planned, args)
            if program is None:
                allotted = None if planned.replaceable else self.steps.allotment(planned.interface.whole, planned.budget)
                self._announcements.before_forward(run, allotted, self._memory)
            return run

    def backward_through_hooks(self, planned: PlannedGraph, args: list[Any]) -> Any:
        """Run the backward of a forward whose saved tensors went through hooks."""
        with self._eager.paused(), Accumulation({}, frozenset(), self.steps.sources):
            return planned.backward_through_hooks(args)

    def backward(self, run: Run, args: list[Any]) -> Any:
        """Run the backward of a forward, which is then no longer in flight; the program clears the list of its arguments."""
        planned = run.planned
        args[: planned.num_symbols] = run.symbols
        first = len(args) - len(planned.interface.tangents)
        recording = run in self._pending
        with self._machine.update() if recording else contextlib.nullcontext():
            if recording:
                with self._update():
                    self._recorder.begin_backward(run, args[first:])
                    self._announcements.before_backward(run, args[first:])
            results = self._gradients(run, args, first)
            if recording:
                with self._update():
                    self._recorder.end_backward(run, results)
                    if not keeps_graph():
                        self._retire(run)
                        if not self.in_flight:
                            queue_after_backward(self._after_backward)
                    self._announcements.after_segment()
        return results

    def _gradients(self, run: Run, args: list[Any], first: int) -> list[Any]:
        planned, program = run.planned, run.program
        if any(args[first + t] is not None for t in program.undefined):
            _log.warning(
                "a gradient came for an output that had none before: computed from the inputs, and planned for from now on"
            )
            assert run.arguments is not None
            results = planned.late_backward(run.arguments, args[first:])
            args.clear()
            return results
        assert program.backward is not None
        undefined = frozenset(t for t, value in enumerate(args[first:]) if value is None)
        known = run.leaves is self.steps.sources.seen and not program.accumulated  # as in nearly every step
        leaves = {} if known else {k: t for k, leaf in run.leaves if (t := leaf()) is not None}
        accumulation = Accumulation(leaves, program.accumulated, self.steps.sources)
        with self._eager.paused(), accumulation, program.running:
            args[first:] = planned.materialized(args[first:], program.undefined)
            results = program.backward(args)
        if undefined > program.undefined and planned.replaceable:
            # Eager code before this graph may compute more if it is given zeros.
            results = list(results)
            with self._eager.paused():  # the graph may be captured for this
                for k in planned.without_gradient(undefined):
                    results[k] = None
        accumulation.hand_over(results)
        if accumulation.saw_all and leaves:
            self.steps.sources.seen = run.leaves
        return results

    def _may_be_over(self) -> bool:
        """Whether the step is over if its first graph begins again, although forwards wait for their backwards."""
        segments = self._recorder.segments
        return self._updated and bool(segments) and segments[-1][1]

    def _begin_step(self, planned: PlannedGraph, args: Sequence[Any]) -> None:
        """Plan the step that probably begins with a graph: the kind that followed the same step before, or the newest kind."""
        self._end_step()
        if self._recorder.forwards:
            self.steps.close(self._recorder)
            self._new_recorder(watched=self._eager.is_watched)
        self._plan, self._position, self._updated = None, 0, False
        self._plan = self.steps.plan(planned, args, watched=self._eager.is_watched)
        self._recorder.like = None if self._eager.is_watched else self.steps.record_to_follow(planned)
        self._recorder.bare = self.steps.bare
        # Eager code that is not watched is expected to take as much as in other steps.
        unseen_bytes = 0 if self._recorder.watched else self.steps.eager_bytes
        self._announcements.begin_step(self._recorder, first=self._plan is None, unseen_bytes=unseen_bytes)
        self._machine.on(StepEvent.BEGIN if self._plan is None else StepEvent.BEGIN_PLANNED)
        if any(owner is not self and owner.in_flight for owner, *_ in list(_IN_FLIGHT.values())):
            _warn_of_threads()

    def _after_backward(self) -> None:
        if self.state is not StepState.INTERRUPTED:
            self._end_step()

    def _end_step(self) -> None:
        """Take over a step that is over."""
        if self._recorder.over and self.state is StepState.BETWEEN:
            return
        with self._update():
            if not self.in_flight and not self._recorder.over and self._recorder.complete:
                self._eager.end_step(seen=self.steps.add(self._recorder))
            self._machine.on(StepEvent.END)

    def _new_recorder(self, *, watched: bool) -> None:
        self._recorder = StepRecorder(self._machine, watched=watched)
        self._announcements.begin_step(self._recorder)

    def _planned_program(self, planned: PlannedGraph) -> Program | None:
        """The program that the plan of the step has for its next forward; None if there is none."""
        if self._plan is None:
            return None
        for position in range(self._position, len(self._plan.graphs)):
            program, graph = self._plan.programs[position], self._plan.graphs[position]
            if graph is planned or (planned.replaceable and graph.key == planned.key):
                self._position = position + 1
                if program is None:
                    return planned.own
                if graph is planned:
                    return program
                if program.in_pieces:
                    self.steps.note_compiled_again()
                    return None
                return planned.program(program.undefined, program.accumulated, order_of(program.result.plan))
            if program is not None:
                break
        # This is another step, or a forward whose result will be dropped. The plan goes on after that forward.
        return None

    def _give_up(self, run: Run) -> None:
        """Forget that a forward waits for its backward, which is not expected any more."""
        if run in self._pending:
            self._recorder.abandon(run)
            self._retire(run)

    def _retire(self, run: Run) -> None:
        if run in self._pending:
            self._pending.remove(run)
        if not self._pending:
            self._machine.on(StepEvent.NONE_WAITS)


_IN_FLIGHT: dict[int, tuple[Coordinator, Run, weakref.ref[torch.UntypedStorage]]] = {}
"""Forwards whose saved tensors exist, and the coordinator of the thread that ran each, by the key of the token's storage."""


def run_backward(planned: PlannedGraph, args: list[Any]) -> Any:
    """Run the backward of a planned graph, in the step of its forward."""
    token = args.pop(planned.num_symbols)  # when the token is freed, its forward is forgotten
    found = _IN_FLIGHT.get(storage_key(token))
    if found is None:
        return coordinator().backward_through_hooks(planned, args)
    owner, run, _ = found
    if not _thread.trains:  # on a GPU this is a thread of autograd, and its recomputations belong to the same step
        _thread.coordinator = owner
    results = owner.backward(run, args)
    del token
    return results


def _drop(key: int) -> None:
    """Note that the saved tensors of a forward were freed: its backward cannot run."""
    if key in _IN_FLIGHT and not sys.is_finalizing():
        owner, run, _ = _IN_FLIGHT.pop(key)
        run.arguments = None
        with owner._update():
            owner._give_up(run)


class _Thread(threading.local):
    coordinator: Coordinator | None = None
    trains: bool = False  # whether this is not a thread of autograd


_thread = _Thread()


def coordinator() -> Coordinator:
    """The coordinator of this thread: two threads that train two models have two steps under way."""
    if _thread.coordinator is None:
        _thread.coordinator, _thread.trains = Coordinator(), current_backward() < 0
    return _thread.coordinator


@functools.cache
def _warn_of_threads() -> None:
    _log.warning(
        "two threads train at once: a budget is one of the process, and no plan knows what the other holds\nhint: %s",
        "run the steps in one thread, one after the other, or in two processes, where budgets have to be kept",
    )


@functools.cache
def _see_updates() -> None:
    register_optimizer_step_pre_hook(untraced(lambda *_: coordinator().end_watch()))
    register_optimizer_step_post_hook(untraced(lambda optimizer, *_: coordinator().optimizer_ran(optimizer)))
