"""Runs the planned graphs of this process: which program each run takes, and what a step is.

A step begins with a forward while no other is waiting for its backward, and is over when none is waiting any more. It is over
as well when its first graph begins again after an optimizer has run: forwards that still wait then are held by the user, and
their backward may never run. The first time that a step is seen its windows are recorded (`StepRecorder`), and the graphs run
programs of their own. When it begins again it is planned as a whole (`KnownSteps`), and each of its forwards runs the program
that the plan has for its place in the step. Several kinds of steps may begin with the same graph: expected is the kind
that followed the same step before. A step that turns out differently runs on the graphs' own programs from there on, and is
planned in turn.

A forward returns one more tensor for autograd to save: empty, and only there to tell which forward a backward belongs to.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from checkmate.core.budget import Budget
from checkmate.core.errors import PlanNotFoundError
from checkmate.core.result import Result
from checkmate.torch._compat.dispatch import top_mode
from checkmate.torch._compat.dynamo import untraced
from checkmate.torch._compat.engine import current_backward, keeps_graph, queue_after_backward, saved_tensors_packer
from checkmate.torch.distributed.wrappers import fsdp_unsharded_bytes
from checkmate.torch.graph.storages import current_bytes, leaves, storage_bytes, storage_key, strided_parts
from checkmate.torch.measure.device_memory import DeviceMemory, device_memory
from checkmate.torch.steps.accumulation import Accumulation
from checkmate.torch.steps.announcements import Announcements, Now, held_in_flight
from checkmate.torch.steps.eager_watch import EagerWatch
from checkmate.torch.steps.known_steps import KnownSteps
from checkmate.torch.steps.program import Flight, PlannedGraph, Program, random_state, version_of, weakly
from checkmate.torch.steps.recorder import Run, StepRecorder
from checkmate.torch.steps.step_plan import StepPlan

_log = logging.getLogger("checkmate.torch")


class Coordinator:
    """The planned graphs that are in flight in this process.

    Attributes:
        steps: The steps that were seen, and their plans.
    """

    def __init__(self) -> None:
        # Autograd runs backwards on other threads, and a finalizer runs on any thread, even on one that already holds the lock.
        self._lock = threading.RLock()
        self._flights: dict[int, Flight] = {}  # by the key of the token's storage
        self._pending: list[Flight] = []  # in the order of their forwards
        self._recorder = StepRecorder()
        self._runs: dict[Flight, Run] = {}
        self.steps = KnownSteps()
        self._position = 0  # of the next forward in the plan
        self._updated = False  # whether an optimizer has run since the step began
        self._plan: StepPlan | None = None
        self._announcements = Announcements()
        self._told_of_hooks: set[int] = set()  # graphs
        self._watch: EagerWatch | None = None
        self._calling = False  # whether a call of a compiled function is under way
        self._thread = threading.current_thread()  # which trains
        self._budget: Budget | None = None  # of that function
        self._callers = WeakSet[Any]()  # compiled functions that were called in the step
        self._seen = WeakSet[Any]()  # those of steps whose eager code has been seen
        self._memory: DeviceMemory | None = None  # as it was when the first graph of the step was compiled
        self._complete = True  # whether all of the eager code that was seen was measured

    def forget_steps(self) -> None:
        """Return to the state of a new process: the next step is a first one."""
        with self._lock:
            self._leave_pending()
            self._take_off_watch()
            self._new_recorder(watched=False)
            self.steps = KnownSteps()
            self._plan = None
            self._announcements = Announcements()
            for noted in (self._callers, self._seen, self._told_of_hooks):
                noted.clear()

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
        """The most that a step was said to take beyond its budget; 0 where nothing was said."""
        return self._announcements.most_bytes

    @property
    def step(self) -> StepPlan | None:
        """The plan of the newest step; None if it was not planned as a whole."""
        return self._plan

    def begin_call(self, function: object, budget: Budget | None = None) -> None:
        """Prepare for a call of a compiled function: see the eager code of a step that has not been seen before.

        Args:
            function: The function, which tells the steps of several networks apart.
            budget: Its budget.
        """
        with self._lock:
            if current_backward() >= 0:  # as `torch.utils.checkpoint` calls: autograd undoes what is begun or ended here
                return
            if self._another_trains():
                return  # Dynamo restores its state after the call alone: the forward raises
            self._thread = threading.current_thread()
            self._end_watch()
            self._calling, self._budget = True, budget
            if not self._pending:
                self._end_step()
            self._callers.add(function)
            if (
                function in self._seen
                or self._watch is not None
                or (self._pending and not self._may_be_over())
                or top_mode() is not None
            ):
                return
            if not self._pending:
                self._new_recorder(watched=True)
                self._announcements.begin_step()
            self._watch = EagerWatch(
                made=self._eager_made,
                read=self._eager_read,
                exchanged=lambda t: self._recorder.exchanged(t),
                took=self._eager_took,
            )
            self._watch.__enter__()
            self._complete = True
            self._end_hook = register_optimizer_step_pre_hook(untraced(lambda *_: self._end_watch()))

    def end_call(self) -> None:
        """Note that a call of a compiled function is over: what it returned may take the place of what the one before did."""
        with self._lock:
            if current_backward() >= 0 or self._thread is not threading.current_thread():
                return
            self._recorder.end_call()
            self._calling = False

    def compiling(self, paused: bool) -> None:
        """Do not take the allocations of a compiler for those of the step.

        Args:
            paused: Whether Dynamo compiles now.
        """
        if self._watch is not None:
            self._watch.paused = paused

    def _eager_read(self, tensor: torch.Tensor) -> None:
        # AOTAutograd detaches what it saves for a backward: that is no code of the user.
        key = storage_key(tensor)
        if not any(key in flight.held for flight in self._pending):
            with self._own_code():
                self._recorder.read(tensor)

    def _eager_made(self, tensor: torch.Tensor) -> None:
        with self._own_code():
            self._recorder.allocated(tensor)
        self._announcements.of_eager_code(0, self._now())
        if self._calling and not self._recorder.forwards and self._budget is not None:
            self._announcements.before_any_graph(self._budget, tensor.device, self._recorder.eager_bytes)

    def _eager_took(self, size_bytes: int) -> None:
        with self._own_code():
            self._recorder.took(size_bytes)
        self._announcements.of_eager_code(size_bytes, self._now())

    @contextlib.contextmanager
    def _own_code(self) -> Generator[None]:
        """Context of code that is not the user's: nothing that it allocates is taken for that of eager code.

        The step is forgotten if an exception leaves it: Ctrl-C comes between any two statements.
        """
        watch, before = self._watch, self._watch is not None and self._watch.paused
        try:
            try:
                self.compiling(True)
                yield
            finally:
                if watch is not None:
                    watch.paused = before
        except BaseException:
            with self._lock:
                self.compiling(False)
                self._recorder.close()
                self._recorder = StepRecorder(watched=self._watch is not None)
                self._pending.clear()
                self._plan = None
            raise

    def _end_watch(self) -> None:
        """Take the watch off where its step is over: when the optimizer begins, or the next call. Autograd undoes it before."""
        if self._recorder.over or not self._pending:
            self._take_off_watch()

    def _take_off_watch(self) -> None:
        # Autograd and Dynamo undo what is ended while they run.
        if self._watch is not None and not self._calling and current_backward() < 0 and self._watch.end():
            self._complete = self._watch.complete
            self._watch = None
            self._end_hook.remove()

    def in_flight(self) -> bool:
        """Whether any forward waits for its backward."""
        with self._lock:
            return bool(self._pending)

    def searched_s(self) -> float:
        """Seconds of the searches for the graphs of the step that is under way."""
        with self._lock:
            return self._recorder.searched_s if self._pending else 0.0

    def budget_bytes(self, budget: Budget) -> int | None:
        """Bytes of a budget; None for a share of which no step has been planned yet.

        Args:
            budget: The budget.
        """
        if budget.total_bytes is not None:
            return budget.total_bytes
        forwards = self._recorder.forwards
        same = bool(forwards) and forwards[0].planned.budget == budget
        return self.result.budget_bytes if same and self.result is not None else None

    def held_bytes(self) -> int:
        """Bytes that the graphs in flight hold: inputs, outputs and saved tensors."""
        with self._lock:
            return sum(held_in_flight(self._pending).values())

    def keep_all_saved_bytes(self) -> int:
        """Bytes that the graphs in flight would save for their backwards if they kept everything."""
        with self._lock:
            return sum(flight.planned.keep_all.saved_bytes for flight in self._pending)

    def outside_bytes(self, inputs: Iterable[torch.Tensor], device: torch.device) -> int:
        """Bytes on a device that belong neither to a graph nor to the step that is under way.

        Args:
            inputs: Inputs of the graph. Their gradients are counted elsewhere as well.
            device: The device.
        """
        with self._lock:
            known = held_in_flight(self._pending) | ({} if self._recorder.over else self._recorder.present())
            if device.type == "cuda" or self._memory is None or not self._pending:
                gc.collect()  # compilation leaves cycles, and with them models of before
                self._memory = device_memory(device)
        parts = [
            p for t in inputs for each in (t, t.grad if t.is_leaf else None) if each is not None for p in strided_parts(each)
        ]
        return self._memory.besides(known | {storage_key(p): current_bytes(p) for p in parts})

    def forward(self, planned: PlannedGraph, args: list[Any]) -> Any:
        """Run the forward of a planned graph.

        Args:
            planned: The graph.
            args: Its arguments; the program clears the list.

        Raises:
            InfeasibleBudgetError: A step is planned before it begins, and no plan of it keeps the budget.
            PlanNotFoundError: No plan of the step was found in time, or another thread is in the middle of one.
        """
        packer = saved_tensors_packer()
        if packer is not None:
            self._warn_of_hooks(planned, packer)
            return self._forward_through_hooks(planned, args)
        transient = fsdp_unsharded_bytes()
        with self._lock:
            if current_backward() < 0:
                if self._another_trains():
                    raise PlanNotFoundError(
                        "two threads train at once: a budget is one of the process, and no plan knows what the other holds",
                        hint="run the steps in one thread, one after the other, or in two processes",
                    )
                self._thread = threading.current_thread()
        with self._lock, self._own_code():
            forwards = self._recorder.forwards
            if self._pending and forwards and forwards[0].planned is planned and self._may_be_over():
                self._leave_pending()
            if not self._pending:
                self._begin_step(planned, args)
            program = self._planned_program(planned)
            deviates = program is None and self._plan is not None
            program = program or planned.own
            run = self._recorder.begin_forward(planned, args, transient)
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            flight = Flight(planned, program, _without(_storages(tensors), transient))
            if program.undefined:
                flight.arguments = [weakly(a) for a in args]
                flight.versions = [version_of(a) for a in args]
                flight.random_state = random_state() if planned.random else None
            del tensors  # a reference here would keep inputs alive that the forward frees
            if self._plan is None or deviates:
                self._announcements.before_forward(flight, self._now(), self.steps.share)
        assert program.forward is not None
        with self._own_code():
            results = list(program.forward(args))
            token = torch.empty(0, dtype=torch.uint8)
        flight.symbols = results[len(results) - program.num_symbols :]
        results[len(results) - program.num_symbols :] = [0] * planned.num_symbols  # AOTAutograd expects as many as at first
        results.insert(planned.num_outputs, token)
        key = storage_key(token)
        flight.held = _storages(r for r in results if isinstance(r, torch.Tensor) and storage_key(r) not in flight.inputs)
        with self._lock, self._own_code():
            self._recorder.end_forward(run, results[: planned.num_outputs])
            self._flights[key] = flight
            self._runs[flight] = run
            self._pending.append(flight)
            self._announcements.after_window(self._now())
        # A step may end without a backward: after an exception, or if its loss is dropped. Nothing is called then; that the saved
        # tensors are freed is the only sign of it. At exit there is nothing left to count.
        weakref.finalize(token.untyped_storage(), self._drop, key).atexit = False
        return results

    def _forward_through_hooks(self, planned: PlannedGraph, args: list[Any]) -> list[Any]:
        """Run a forward whose saved tensors go through hooks: what exists until its backward is known to the hooks alone.

        It runs the same program each time, so that what is saved does not depend on the budget, and is the same where
        ``torch.utils.checkpoint`` runs the forward again. Its backward finds no flight, since the hooks may copy the token.
        """
        program = planned.keeping_everything
        assert program.forward is not None
        with self._own_code():
            results = list(program.forward(args))
        results.insert(planned.num_outputs, torch.empty(0, dtype=torch.uint8))
        return results

    def _warn_of_hooks(self, planned: PlannedGraph, packer: Callable[..., Any]) -> None:
        if id(planned) in self._told_of_hooks:
            return
        self._told_of_hooks.add(id(planned))
        module, name = getattr(packer, "__module__", None), getattr(packer, "__qualname__", repr(packer))
        _log.warning(
            "torch.autograd.graph.saved_tensors_hooks are active around a compiled graph: everything is saved and passes through "
            "%s, and the budget of %s is not kept for it\nhint: %s",
            name if module is None else f"{module}.{name}",
            planned.budget,
            "compile the function that calls torch.utils.checkpoint instead of what is inside of it"
            if module == "torch.utils.checkpoint"
            else "call the compiled function outside of the context",
        )

    def backward(self, planned: PlannedGraph, args: list[Any]) -> Any:
        """Run the backward of a planned graph; its forward is then no longer in flight.

        Args:
            planned: The graph.
            args: Its arguments, saved tensors among them; the program clears the list.
        """
        token = args.pop(planned.num_symbols)  # when it is freed its flight is forgotten
        flight = self._flights.get(storage_key(token))
        if flight is None:
            program, first = planned.keeping_everything, len(args) - len(planned.tangents)
            assert program.backward is not None
            with self._own_code(), Accumulation({}, frozenset(), self.steps.origins):
                args[first:] = planned.materialized(args[first:])
                return program.backward(args)
        args[: planned.num_symbols] = flight.symbols
        first = len(args) - len(planned.tangents)
        with self._lock, self._own_code():
            run = self._runs[flight]
            recording = flight in self._pending
            if recording:
                self._recorder.begin_backward(run, args[first:])
                self._announcements.before_backward(flight, args[first:], self._now())
        program = flight.program
        late = any(args[first + t] is not None for t in program.undefined)
        if late:
            _log.warning(
                "a gradient came for an output that had none before: computed from the inputs, and planned for from now on"
            )
            results = planned.late_backward(flight, args[first:])
            args.clear()
        else:
            assert program.backward is not None
            undefined = frozenset(t for t, value in enumerate(args[first:]) if value is None)
            with self._own_code():
                args[first:] = planned.materialized(args[first:], program.undefined)
            leaves = {k: t for k, leaf in run.leaves if (t := leaf()) is not None}
            accumulation = Accumulation(leaves, program.accumulated, self.steps.origins)
            with self._own_code(), accumulation:
                results = program.backward(args)
            if undefined > program.undefined and planned.replaceable:
                # Eager code before this graph may compute more where it is given zeros.
                results = list(results)
                with self._own_code():  # it may be captured for this
                    for k in planned.without_gradient(undefined):
                        results[k] = None
            accumulation.hand_over(results)
        with self._lock, self._own_code():
            if recording:
                self._recorder.end_backward(run, results)
                if not keeps_graph():
                    self._retire(flight)
                    if not self._pending:
                        queue_after_backward(self._end_step)
                self._announcements.after_window(self._now())
        del token
        return results

    def _another_trains(self) -> bool:
        """Whether a thread other than this one is in the middle of a step."""
        other = self._thread is not threading.current_thread() and self._thread.is_alive()
        return other and (self._calling or (bool(self._pending) and not self._may_be_over()))

    def _may_be_over(self) -> bool:
        """Whether the step is over if its first graph begins again, although forwards wait for their backwards."""
        return self._updated and self._recorder.after_backward

    def _leave_pending(self) -> None:
        """End a step whose remaining forwards are held by the user, and are not differentiated."""
        for flight in list(self._pending):
            self._give_up(flight)

    def _begin_step(self, planned: PlannedGraph, args: Sequence[Any]) -> None:
        """Plan the step that probably begins with a graph: the one that followed the same step before, or the newest one."""
        self._end_step()
        if self._recorder.forwards:
            self._new_recorder(watched=self._watch is not None)
        self._plan, self._position, self._updated = None, 0, False
        self._announcements.begin_step()
        _note_updates()
        self._plan = self.steps.plan(planned, args, watched=self._watch is not None)

    def _new_recorder(self, *, watched: bool) -> None:
        self.steps.close(self._recorder)
        self._recorder = StepRecorder(watched=watched)

    def _planned_program(self, planned: PlannedGraph) -> Program | None:
        """The program that the plan of the step has for its next forward; None where there is none."""
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
                return planned.program(program.undefined, program.accumulated, program.result.plan.order)
            if program is not None:
                break
        # Another step, or a forward whose result will be dropped: after that one the plan goes on.
        return None

    def _end_step(self) -> None:
        """Take over a step that is over."""
        with self._lock:
            if not self._pending and not self._recorder.over and self._recorder.complete:
                seen = self.steps.add(self._recorder) and self._complete
                self._seen = self._seen | self._callers if seen else self._seen - self._callers
                self._callers.clear()

    def _now(self) -> Now:
        # Where eager code is not seen it is expected to take what it takes in other steps.
        unseen_bytes = 0 if self._recorder.watched else self.steps.eager_bytes
        return Now(self._recorder, self._pending, self._memory, self._plan is None, unseen_bytes)

    def optimizer_ran(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer has updated parameters, in which it may have made its state.

        Args:
            optimizer: The optimizer.
        """
        self._updated = True
        if self._watch is not None:
            for tensor in leaves([*optimizer.state.values()]):
                self._recorder.keeps(tensor)

    def _give_up(self, flight: Flight) -> None:
        """Forget that a forward waits for its backward: it is not expected any more."""
        run = self._runs.get(flight)
        if flight in self._pending and run is not None and self._recorder.waits(run):
            self._recorder.abandon(run)
        self._retire(flight)

    def _retire(self, flight: Flight) -> None:
        if flight in self._pending:
            self._pending.remove(flight)

    def _drop(self, key: int) -> None:
        with self._lock:
            flight = self._flights.pop(key, None)
            if flight is not None:
                self._give_up(flight)
                del self._runs[flight]


COORDINATOR = Coordinator()
"""The coordinator of this process."""


@functools.cache
def _note_updates() -> None:
    register_optimizer_step_post_hook(untraced(lambda optimizer, *_: COORDINATOR.optimizer_ran(optimizer)))


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of each storage, by its key."""
    return {storage_key(t): storage_bytes(t) for t in tensors}


def _without(storages: dict[int, int], transient: Mapping[int, int]) -> dict[int, int]:
    """The storages, with zero bytes for the transient ones, which are counted with their wrapper."""
    return {key: 0 if key in transient else size for key, size in storages.items()}
