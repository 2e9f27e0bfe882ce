"""Runs the planned graphs of this process: which program each run takes, and what a step is.

A step begins with a forward while no other is waiting for its backward, and is over when none is waiting any more. The first
time that a step is seen its windows are recorded (`StepRecorder`), and the graphs run programs of their own. When it is over it
is planned as a whole (`plan_step`), and from then on each of its forwards runs the program that the plan has for its place in the
step. A step that turns out differently runs on the graphs' own programs from there on, and is planned in turn.

A forward returns one more tensor for autograd to save: empty, and only there to tell which forward a backward belongs to.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from checkmate.core.budget import Budget
from checkmate.core.errors import CheckmateError
from checkmate.core.graph import Graph
from checkmate.core.units import format_bytes
from checkmate.torch._compat.dispatch import WATCHES_COMPILED_CODE, top_mode
from checkmate.torch._compat.engine import keeps_graph, queue_after_backward
from checkmate.torch.compilation.accumulation import Accumulation, Origins
from checkmate.torch.compilation.eager_watch import EagerWatch
from checkmate.torch.compilation.program import Flight, PlannedGraph, Program, random_state, version_of, weakly
from checkmate.torch.compilation.recorder import Run, StepRecorder
from checkmate.torch.compilation.step_plan import StepPlan, plan_step
from checkmate.torch.distributed.wrappers import fsdp_unsharded_bytes
from checkmate.torch.graph.storages import SCALAR_TANGENT_BYTES, storage_bytes, storage_key, unique_bytes

_log = logging.getLogger("checkmate.torch")


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Gradients that exist before a step.

    Attributes:
        existing: Run and input of each.
        accumulated: Inputs to whose gradients the backward of a run adds, for each run. Autograd adds to the others.
    """

    existing: frozenset[tuple[int, int]]
    accumulated: tuple[frozenset[int], ...]


@dataclass(eq=False, slots=True)
class _KnownStep:
    """A step that was recorded, with its plans.

    Attributes:
        recorder: The record.
        plans: Plans by the gradients that exist before the step. None where the graph's own plan is one of the step; an error
            where there is no plan.
    """

    recorder: StepRecorder
    plans: dict[_Gradients, StepPlan | CheckmateError | None] = field(default_factory=dict)

    def gradients(self, origins: Origins, existing: Set[tuple[int, int]] | None = None) -> _Gradients:
        """The gradients before the step.

        Args:
            origins: What is known of where gradients come from.
            existing: Run and input of each; those that exist now by default.
        """
        leaves = [(r, k, t) for r, run in enumerate(self.recorder.runs) for k, leaf in run.leaves if (t := leaf()) is not None]
        if existing is None:
            existing = {(r, k) for r, k, t in leaves if t.grad is not None}
        replaceable = all(run.planned.replaceable for run in self.recorder.runs)
        added = {(r, k) for r, k, t in leaves if replaceable and (r, k) in existing and origins.accumulates(t)}
        of_run = tuple(frozenset(k for other, k in added if other == r) for r in range(len(self.recorder.runs)))
        return _Gradients(frozenset(existing), of_run)

    def gradient_bytes(self) -> int:
        """Bytes of the gradients that exist now."""
        leaves = (leaf() for run in (*self.recorder.runs, *self.recorder.abandoned) for _, leaf in run.leaves)
        return unique_bytes(t.grad for t in leaves if t is not None and t.grad is not None)


class Coordinator:
    """The planned graphs that are in flight in this process, and the plans of its steps.

    Attributes:
        origins: What backwards have shown of where the gradients of leaves come from.
    """

    def __init__(self) -> None:
        # Autograd runs backwards on other threads, and a finalizer runs on any thread, even on one that already holds the lock.
        self._lock = threading.RLock()
        self._flights: dict[int, Flight] = {}  # by the key of the token's storage
        self._pending: list[Flight] = []  # in the order of their forwards
        self._recorder = StepRecorder()
        self._runs: dict[Flight, Run] = {}
        self._known: dict[int, list[_KnownStep]] = {}  # by the identity of the first graph
        self._plan: StepPlan | None = None
        self._shares: dict[str, tuple[int, ...]] = {}
        self._warned: set[int] = set()
        self.origins = Origins()
        self._watch: EagerWatch | None = None
        self._watches = True  # whether the next step is one whose eager code has not been seen

    def forget_steps(self) -> None:
        """Return to the state of a new process: the next step is a first one."""
        with self._lock:
            self._known.clear()
            self._shares.clear()
            self._new_record(watched=False)
            self._plan, self._watches = None, True
            self._end_watch()

    @property
    def step_bytes(self) -> int | None:
        """Predicted peak of the newest step, resident bytes included; None before the first step."""
        if self._plan is not None:
            return self._plan.result.peak_bytes
        own = [run.planned.own.result.peak_bytes for run in self._recorder.runs]
        return max(own, default=None)

    @property
    def step(self) -> StepPlan | None:
        """The plan of the newest step; None if it was not planned as a whole."""
        return self._plan

    def shared_order(self, graph: Graph, budget: Budget) -> tuple[int, ...] | None:
        """The order of a graph in the plan of a step whose graphs have to be compiled again for it."""
        return self._shares.get(key_of(graph, budget))

    def begin_call(self) -> None:
        """Prepare for a call of a compiled function: see the eager code of a step that has not been seen before."""
        with self._lock:
            self._end_watch()
            if (
                not self._watches
                or self._watch is not None
                or self._pending
                or not WATCHES_COMPILED_CODE
                or top_mode() is not None
            ):
                return
            self._new_record(watched=True)
            self._watch = EagerWatch(lambda tensor: self._recorder.allocated(tensor))
            self._watch.__enter__()
            self._end_hook = register_optimizer_step_pre_hook(lambda *_: self._end_watch())

    def compiling(self, paused: bool) -> None:
        """Do not take the allocations of a compiler for those of the step.

        Args:
            paused: Whether Dynamo compiles now.
        """
        if self._watch is not None:
            self._watch.paused = paused

    def _end_watch(self) -> None:
        """Take the watch off where its step is over: when the optimizer begins, or the next call. Autograd undoes it before."""
        if self._watch is not None and (self._recorder.over or not self._pending) and self._watch.end():
            self._watch = None
            self._end_hook.remove()

    @contextmanager
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

    def held_bytes(self) -> int:
        """Bytes that the graphs in flight hold: inputs, outputs and saved tensors."""
        with self._lock:
            return sum(_union(self._pending).values())

    def forward(self, planned: PlannedGraph, args: list[Any]) -> Any:
        """Run the forward of a planned graph.

        Args:
            planned: The graph.
            args: Its arguments; the program clears the list.

        Raises:
            InfeasibleBudgetError: A step is planned before it begins, and no plan of it keeps the budget.
            PlanNotFoundError: No plan of the step was found in time.
        """
        transient = fsdp_unsharded_bytes()
        with self._lock:
            if not self._pending:
                self._begin_step(planned)
            program = self._program(planned, len(self._recorder.runs))
            run = self._recorder.begin_forward(planned, args, transient)
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            flight = Flight(planned, program, _without(_storages(tensors), transient))
            if program.undefined:
                flight.arguments = [weakly(a) for a in args]
                flight.versions = [version_of(a) for a in args]
                flight.random_state = random_state() if planned.random else None
            del tensors  # a reference here would keep inputs alive that the forward frees
            self._warn_if_over(planned, flight)
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
        # A step may end without a backward: after an exception, or if its loss is dropped. Nothing is called then; that the saved
        # tensors are freed is the only sign of it. At exit there is nothing left to count.
        weakref.finalize(token.untyped_storage(), self._drop, key).atexit = False
        return results

    def backward(self, planned: PlannedGraph, args: list[Any]) -> Any:
        """Run the backward of a planned graph; its forward is then no longer in flight.

        Args:
            planned: The graph.
            args: Its arguments, saved tensors among them; the program clears the list.
        """
        token = args.pop(planned.num_symbols)  # when it is freed its flight is forgotten
        flight = self._flights[storage_key(token)]
        args[: planned.num_symbols] = flight.symbols
        first = len(args) - len(planned.tangents)
        with self._lock:
            run = self._runs[flight]
            recording = flight in self._pending
            if recording:
                self._recorder.begin_backward(run, args[first:])
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
            args[first:] = planned.materialized(args[first:], program.undefined)
            leaves = {k: t for k, leaf in run.leaves if (t := leaf()) is not None}
            accumulation = Accumulation(leaves, program.accumulated, self.origins)
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
        del token
        return results

    def _new_record(self, *, watched: bool) -> None:
        self._recorder.close()
        self._recorder = StepRecorder(watched=watched)

    def _begin_step(self, planned: PlannedGraph) -> None:
        """Plan the step that probably begins with a graph: the newest one that did."""
        if self._recorder.began:
            self._new_record(watched=self._watch is not None)
        self._plan = None
        known = self._known.get(id(planned))
        if not known:
            return
        step = known[-1]
        gradients = step.gradients(self.origins)
        if gradients not in step.plans:
            step.plans[gradients] = self._planned(step, gradients, step.gradient_bytes())
        plan = step.plans[gradients]
        if isinstance(plan, CheckmateError):
            del step.plans[gradients]
            raise plan
        self._plan = plan

    def _planned(self, step: _KnownStep, gradients: _Gradients, gradient_bytes: int) -> StepPlan | CheckmateError | None:
        """The plan of a step, where its graphs' own plans are not one."""
        runs = step.recorder.runs
        if any(run.planned.options.plan is not None for run in runs):
            return None  # a plan that the user gave is for one of the graphs
        alone = len(runs) == 1 and runs[0].planned.alone and not runs[0].undefined
        alone = alone and gradient_bytes <= runs[0].planned.planned_gradient_bytes
        if alone and _same_accumulation(runs[0].planned.own, gradients):
            own = runs[0].planned.own.result
            if own.peak_bytes + step.recorder.eager_peak_bytes <= own.budget_bytes or not _matters(step.recorder):
                return None
        compiled_again = [
            key_of(run.planned.joint.capture.graph, run.planned.budget) for run in runs if not run.planned.replaceable
        ]
        if compiled_again and all(key in self._shares for key in compiled_again):
            return None  # they were compiled for the plan of this step
        try:
            plan = plan_step(step.recorder, gradient_bytes, gradients.existing, gradients.accumulated)
        except CheckmateError as error:
            return error
        _log.info("the step runs %d graphs: planned as one, peak %s", len(runs), format_bytes(plan.result.peak_bytes))
        if all(planned.replaceable for planned in plan.graphs):
            return plan
        for planned, program in zip(plan.graphs, plan.programs, strict=True):
            self._shares[key_of(planned.joint.capture.graph, planned.budget)] = program.result.plan.order
            if planned.recompile is not None:
                planned.recompile()
        return None

    def _program(self, planned: PlannedGraph, position: int) -> Program:
        plan = self._plan
        if plan is not None and position < len(plan.graphs) and plan.graphs[position] is planned:
            return plan.programs[position]
        # Another step, or a forward whose result will be dropped: after that one the plan goes on.
        return planned.own

    def _end_step(self) -> None:
        """Plan a step that is over, if it is a new one; an error is raised when the step begins again."""
        with self._lock:
            recorder = self._recorder
            if self._pending or recorder.over or not recorder.complete:
                return
            recorder.close()
            known = self._known.setdefault(id(recorder.runs[0].planned), [])
            same = next((k for k in known if k.recorder.sequence == recorder.sequence), None)
            self._watches = not recorder.watched and (same is None or not same.recorder.watched)
            if same is not None:
                known.remove(same)
            if same is not None and (same.recorder.watched or not recorder.watched):
                known.append(same)  # the newest
            else:
                step = _KnownStep(recorder)
                known.append(step)
                gradients = step.gradients(self.origins, recorder.existing)
                step.plans[gradients] = self._planned(step, gradients, recorder.gradient_bytes)

    def _warn_if_over(self, planned: PlannedGraph, flight: Flight) -> None:
        """Warn before a step that was not planned as a whole exceeds its budget."""
        total = planned.budget.total_bytes
        if self._plan is not None or total is None or id(planned) in self._warned:
            return
        flights = [*self._pending, flight]
        held = sum(_union(flights).values()) + planned.resident.total_bytes
        memory = flight.program.memory
        needed = held + max(memory.forward_peak_bytes, memory.backward_peak_bytes)
        if needed > total:
            self._warned.add(id(planned))
            _log.warning(
                "a first step may take up to %s, more than its budget of %s: it is planned as a whole from the next step on",
                format_bytes(needed),
                format_bytes(total),
            )

    def _retire(self, flight: Flight) -> None:
        if flight in self._pending:
            self._pending.remove(flight)

    def _drop(self, key: int) -> None:
        with self._lock:
            flight = self._flights.pop(key, None)
            if flight is not None:
                run = self._runs.pop(flight)
                if flight in self._pending and run in self._recorder.runs and not run.gradients:
                    self._recorder.abandon(run)
                self._retire(flight)


def _same_accumulation(program: Program, gradients: _Gradients) -> bool:
    """Whether a program of a step of one graph adds to exactly those existing gradients that it can add to."""
    return {k for k in program.accumulated if (0, k) in gradients.existing} == gradients.accumulated[0]


def _matters(recorder: StepRecorder) -> bool:
    """Whether eager code took more than the gradient of a loss, a loss and the like."""
    return recorder.eager_peak_bytes > 4 * SCALAR_TANGENT_BYTES


def key_of(graph: Graph, budget: Budget) -> str:
    """Key of a graph and the budget that was asked for; resident bytes are ignored."""
    return f"{budget} {msgspec.structs.replace(graph, resident_bytes=0).digest}"


COORDINATOR = Coordinator()
"""The coordinator of this process."""


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
