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
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from checkmate.core.budget import Budget
from checkmate.core.result import Result
from checkmate.core.units import format_bytes
from checkmate.torch._compat.dispatch import WATCHES_COMPILED_CODE, top_mode
from checkmate.torch._compat.engine import current_backward, keeps_graph, queue_after_backward, saved_tensors_packer
from checkmate.torch.compilation.accumulation import Accumulation
from checkmate.torch.compilation.eager_watch import EagerWatch
from checkmate.torch.compilation.known_steps import KnownSteps
from checkmate.torch.compilation.program import Flight, PlannedGraph, Program, random_state, version_of, weakly
from checkmate.torch.compilation.recorder import Run, StepRecorder
from checkmate.torch.compilation.step_plan import StepPlan
from checkmate.torch.distributed.wrappers import fsdp_unsharded_bytes
from checkmate.torch.graph.storages import current_bytes, storage_bytes, storage_key, strided_parts
from checkmate.torch.measure.device_memory import DeviceMemory, device_memory

_log = logging.getLogger("checkmate.torch")


@dataclass(frozen=True, slots=True)
class _Limit:
    """The budget of a step that has not been seen yet.

    Attributes:
        planned: The newest graph of the step.
        total_bytes: The budget; None for a share, which is taken of what is known so far.
        fixed_bytes: Bytes that the step cannot give up.
        keep_all_bytes: What the step takes if its graphs keep everything.
    """

    planned: PlannedGraph
    total_bytes: int | None
    fixed_bytes: int = 0
    keep_all_bytes: int = 0

    def total(self, eager_bytes: int) -> int:
        """The budget in bytes.

        Args:
            eager_bytes: What eager code adds if everything is kept.
        """
        if self.total_bytes is not None:
            return self.total_bytes
        keep_all_bytes = self.keep_all_bytes + eager_bytes
        return self.planned.budget.within(fixed_bytes=self.fixed_bytes, keep_all_bytes=keep_all_bytes)


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
        self._warned: dict[tuple[int, bool | None], int] = {}  # bytes, by graph and whether in a first step; None for hooks
        self._limit: _Limit | None = None  # of a step whose eager code is not known yet
        self._besides_eager_bytes = 0  # of the step, after its newest window
        self._watch: EagerWatch | None = None
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
            for noted in (self._callers, self._seen, self._warned):
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
    def step(self) -> StepPlan | None:
        """The plan of the newest step; None if it was not planned as a whole."""
        return self._plan

    def begin_call(self, function: object) -> None:
        """Prepare for a call of a compiled function: see the eager code of a step that has not been seen before.

        Args:
            function: The function, which tells the steps of several networks apart.
        """
        with self._lock:
            if current_backward() >= 0:  # as `torch.utils.checkpoint` calls: autograd undoes what is begun or ended here
                return
            self._end_watch()
            if not self._pending:
                self._end_step()
            self._callers.add(function)
            if (
                function in self._seen
                or self._watch is not None
                or (self._pending and not self._may_be_over())
                or not WATCHES_COMPILED_CODE
                or top_mode() is not None
            ):
                return
            if not self._pending:
                self._new_recorder(watched=True)
            self._watch = EagerWatch(
                made=self._eager_made,
                read=self._eager_read,
                exchanged=lambda t: self._recorder.exchanged(t),
                took=self._eager_took,
            )
            self._watch.__enter__()
            self._complete = True
            self._end_hook = register_optimizer_step_pre_hook(lambda *_: self._end_watch())

    def end_call(self) -> None:
        """Note that a call of a compiled function is over: what it returned may take the place of what the one before did."""
        with self._lock:
            if self._watch is not None:
                self._recorder.end_call()

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
            self._recorder.read(tensor)

    def _eager_made(self, tensor: torch.Tensor) -> None:
        self._recorder.allocated(tensor)
        self._warn_of_eager_code(0)

    def _eager_took(self, size_bytes: int) -> None:
        self._recorder.took(size_bytes)
        self._warn_of_eager_code(size_bytes)

    def _warn_of_eager_code(self, size_bytes: int) -> None:
        """Warn where eager code of a first step, and an op of it that allocates so many bytes, exceed the budget."""
        if self._limit is not None:
            eager_bytes = self._recorder.eager_bytes
            now = self._besides_eager_bytes + eager_bytes + size_bytes
            # What eager code has made has gradients as large, which are still to come.
            self._warn(self._limit, now, now + eager_bytes, 2 * eager_bytes)

    def _end_watch(self) -> None:
        """Take the watch off where its step is over: when the optimizer begins, or the next call. Autograd undoes it before."""
        if self._recorder.over or not self._pending:
            self._take_off_watch()

    def _take_off_watch(self) -> None:
        if self._watch is not None and current_backward() < 0 and self._watch.end():
            self._complete = self._watch.complete
            self._watch = None
            self._end_hook.remove()

    @contextlib.contextmanager
    def _planned_code(self) -> Generator[None]:
        """Context whose allocations are not those of eager code."""
        watch, before = self._watch, self._watch is not None and self._watch.paused
        self.compiling(True)
        try:
            yield
        finally:
            if watch is not None:
                watch.paused = before

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
            return sum(_union(self._pending).values())

    def keep_all_bytes(self) -> int:
        """Bytes that the graphs in flight would take above what is resident if they kept everything."""
        with self._lock:
            return sum(flight.planned.keep_all_bytes for flight in self._pending)

    def outside_bytes(self, inputs: Iterable[torch.Tensor], device: torch.device) -> int:
        """Bytes on a device that belong neither to a graph nor to the step that is under way.

        Args:
            inputs: Inputs of the graph. Their gradients are counted elsewhere as well.
            device: The device.
        """
        with self._lock:
            known = _union(self._pending) | ({} if self._recorder.over else self._recorder.present())
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
            PlanNotFoundError: No plan of the step was found in time.
        """
        packer = saved_tensors_packer()
        if packer is not None:
            self._warn_of_hooks(planned, packer)
            return self._forward_through_hooks(planned, args)
        transient = fsdp_unsharded_bytes()
        with self._lock:
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
                self._warn_if_over(flight)
        assert program.forward is not None
        with self._planned_code():
            results = list(program.forward(args))
            token = torch.empty(0, dtype=torch.uint8)
        flight.symbols = results[len(results) - program.num_symbols :]
        results[len(results) - program.num_symbols :] = [0] * planned.num_symbols  # AOTAutograd expects as many as at first
        results.insert(planned.num_outputs, token)
        key = storage_key(token)
        flight.held = _storages(r for r in results if isinstance(r, torch.Tensor) and storage_key(r) not in flight.inputs)
        with self._lock:
            self._recorder.end_forward(run, results[: planned.num_outputs])
            self._flights[key] = flight
            self._runs[flight] = run
            self._pending.append(flight)
            self._note_besides_eager()
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
        with self._planned_code():
            results = list(program.forward(args))
        results.insert(planned.num_outputs, torch.empty(0, dtype=torch.uint8))
        return results

    def _warn_of_hooks(self, planned: PlannedGraph, packer: Callable[..., Any]) -> None:
        if (id(planned), None) in self._warned:
            return
        self._warned[id(planned), None] = 0
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
            with self._planned_code(), Accumulation({}, frozenset(), self.steps.origins):
                args[first:] = planned.materialized(args[first:])
                return program.backward(args)
        args[: planned.num_symbols] = flight.symbols
        first = len(args) - len(planned.tangents)
        with self._lock:
            run = self._runs[flight]
            recording = flight in self._pending
            if recording:
                self._recorder.begin_backward(run, args[first:])
                self._warn_of_backward(flight, args[first:])
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
            with self._planned_code():
                args[first:] = planned.materialized(args[first:], program.undefined)
            leaves = {k: t for k, leaf in run.leaves if (t := leaf()) is not None}
            accumulation = Accumulation(leaves, program.accumulated, self.steps.origins)
            with self._planned_code(), accumulation:
                results = program.backward(args)
            accumulation.hand_over(results)
        with self._lock:
            if recording:
                self._recorder.end_backward(run, results)
                if not keeps_graph():
                    self._retire(flight)
                    if not self._pending:
                        queue_after_backward(self._end_step)
                self._note_besides_eager()
        del token
        return results

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
        self._plan, self._position, self._updated, self._limit = None, 0, False, None
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
                if program is None or (graph is not planned and program.in_pieces):
                    return planned.own
                if graph is not planned:
                    return planned.program(program.undefined, program.accumulated, program.result.plan.order)
                return program
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

    def _warn_if_over(self, flight: Flight) -> None:
        """Warn before a step that was not planned as a whole exceeds its budget.

        Args:
            flight: The forward that is about to run.
        """
        planned, own = flight.planned, flight.program
        alone = planned.alone and (not self._pending or not planned.replaceable or planned.options.plan is not None)
        if alone and not self._recorder.watched:
            return  # the plan of a graph alone keeps the budget, unless eager code takes more, which is seen in watched steps
        counted = _union([*self._pending, flight])
        made_bytes = sum(size for key, size in self._recorder.made().items() if key not in counted)
        share = None if planned.replaceable else self.steps.share(planned.interface.whole, planned.budget)
        if alone and share is not None and share.eager_bytes is not None and made_bytes <= share.eager_bytes:
            return  # it was compiled to leave as much
        if alone:
            needed, limit = own.result.peak_bytes + made_bytes, _Limit(planned, own.result.budget_bytes)
        else:
            unseen_bytes = 0 if self._recorder.watched else self.steps.eager_bytes  # which is about what it will be
            needed = self._held_bytes(planned, counted) + unseen_bytes + own.memory.peak_bytes
            limit = _Limit(planned, planned.budget.total_bytes, *self._known_so_far(flight, counted))
        self._limit = limit if self._recorder.watched and share is None else None
        self._warn(limit, needed, needed)

    def _known_so_far(self, flight: Flight, counted: Mapping[int, int]) -> tuple[int, int]:
        """Fixed bytes of a step, and what it takes if everything is kept, as far as its graphs are known."""
        flights = [*self._pending, flight]
        unchanged = {key for f in flights for key in f.inputs}
        fixed = flight.planned.resident.total_bytes + sum(size for key, size in counted.items() if key in unchanged)
        return fixed, fixed + sum(f.planned.keep_all_bytes for f in flights)

    def _warn_of_backward(self, flight: Flight, tangents: Sequence[Any]) -> None:
        """Warn before a backward of a first step: what eager code and the graphs after its own hold is known now."""
        if self._limit is None:
            return
        memory = flight.program.memory
        given = {storage_key(t) for t in tangents if isinstance(t, torch.Tensor)}
        held_bytes = self._held_bytes(self._limit.planned, _union(self._pending), besides=given)
        needed = held_bytes - memory.saved_bytes + memory.backward_peak_bytes
        self._warn(self._limit, needed, needed, 2 * self._recorder.eager_bytes)

    def _held_bytes(self, planned: PlannedGraph, flying: Mapping[int, int], besides: Container[int] = ()) -> int:
        """Bytes of a step that exist now, and of all else.

        Args:
            planned: A graph of the step.
            flying: What graphs in flight hold.
            besides: Keys of storages that are counted elsewhere.
        """
        held, resident = {**self._recorder.present(), **flying}, planned.resident
        # What was outside of a graph when it was compiled may be another one's since then.
        outside = resident.other_bytes if self._memory is None else self._memory.besides(held)
        return resident.total_bytes - resident.other_bytes + outside + sum(n for key, n in held.items() if key not in besides)

    def _note_besides_eager(self) -> None:
        if self._limit is not None:
            held_bytes = self._held_bytes(self._limit.planned, _union(self._pending))
            self._besides_eager_bytes = held_bytes - self._recorder.eager_bytes

    def _warn(self, limit: _Limit, needed_bytes: int, most_bytes: int, eager_bytes: int = 0) -> None:
        """Warn that a step may exceed its budget, and again where it takes more than was said.

        Args:
            limit: The budget.
            needed_bytes: What the step needs at least.
            most_bytes: What it may need.
            eager_bytes: What eager code adds to a step that keeps everything.
        """
        first, budget = self._plan is None, limit.planned.budget
        key, total_bytes = (id(limit.planned), first), limit.total(eager_bytes)
        if budget.keeps_everything or most_bytes <= total_bytes or needed_bytes <= self._warned.get(key, 0):
            return
        self._warned[key] = most_bytes
        _log.warning(
            "%s may take up to %s, more than its budget of %s: it is planned as a whole from the next step on",
            "a first step" if first else "a step that runs other graphs than those before",
            format_bytes(most_bytes),
            format_bytes(total_bytes) if budget.total_bytes is not None else budget,
        )

    def optimizer_ran(self) -> None:
        """Record that an optimizer has updated parameters."""
        self._updated = True

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
    register_optimizer_step_post_hook(lambda *_: COORDINATOR.optimizer_ran())


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of each storage, by its key."""
    return {storage_key(t): storage_bytes(t) for t in tensors}


def _without(storages: dict[int, int], transient: Mapping[int, int]) -> dict[int, int]:
    """The storages, with zero bytes for the transient ones, which are counted with their wrapper."""
    return {key: 0 if key in transient else size for key, size in storages.items()}


def _union(flights: Sequence[Flight]) -> dict[int, int]:
    """Bytes of each storage that graphs in flight hold, by its key: one that several hold counts once."""
    found: dict[int, int] = {}
    for flight in flights:
        found.update(flight.inputs)
        found.update(flight.held)
    return found
