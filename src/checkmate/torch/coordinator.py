"""Several planned graphs in flight at once: one budget over what they hold together.

A plan is made for one graph by itself. A graph break, or two forwards before a backward, puts what an
earlier graph holds beside a later one's peak. That is predicted when a forward begins, from the plans
and the storages really held, and refused if it breaks the budget: never a silent run over it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from checkmate.core.errors import CheckmateError
from checkmate.core.plan import Compute
from checkmate.core.result import Result
from checkmate.core.simulate import simulate
from checkmate.core.units import format_at_least, format_bytes
from checkmate.torch.capture import Capture
from checkmate.torch.sizes import storage_bytes, storage_key


class InFlightError(CheckmateError, RuntimeError):
    """Graphs in flight together would take more than the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What one planned graph takes above what is resident.

    Attributes:
        budget_bytes: The budget it was planned for.
        resident_bytes: What it was planned beside, but for what was in flight then.
        planned_gradient_bytes: Gradients among that: there when it was planned, or expected.
        forward_peak_bytes: Peak of its forward.
        backward_peak_bytes: Peak from the boundary on.
        gradient_bytes: What its backward leaves behind.
    """

    budget_bytes: int
    resident_bytes: int
    planned_gradient_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    gradient_bytes: int

    @classmethod
    def of(cls, capture: Capture, result: Result, *, in_flight_bytes: int, planned_gradient_bytes: int) -> Account:
        """The account of a graph and its plan, planned beside so much in flight and so many gradients."""
        graph, plan = capture.graph, result.plan
        assert plan is not None
        assert capture.boundary is not None
        held = simulate(graph, plan).bytes - graph.resident_bytes
        boundary = plan.steps.index(Compute(capture.boundary))
        outputs = {v for op in graph.ops if op.phase == "backward" for v in op.outputs if graph.values[v].kept}
        return cls(
            budget_bytes=result.budget_bytes,
            resident_bytes=graph.resident_bytes - in_flight_bytes,
            planned_gradient_bytes=planned_gradient_bytes,
            forward_peak_bytes=int(held[: boundary + 1].max()),
            backward_peak_bytes=int(held[boundary:].max()),
            gradient_bytes=sum(graph.values[v].size_bytes for v in {graph.root[v] for v in outputs}),
        )


@dataclass(eq=False, slots=True)
class _Flight:
    account: Account
    inputs: dict[int, int]  # storage -> bytes
    gradients: int  # bytes of gradients that were there when its forward began
    held: dict[int, int] = field(default_factory=dict)


class Coordinator:
    """What is in flight in this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._flights: list[_Flight] = []

    def held_bytes(self) -> int:
        """Bytes that graphs in flight hold, their inputs included."""
        with self._lock:
            return sum(_union(self._flights).values())

    def forward(self, account: Account, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run a planned forward if it fits beside what is in flight.

        Raises:
            InFlightError: It would not.
        """
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        flight = _Flight(account, _storages(tensors), _gradients(tensors))
        del tensors
        with self._lock:
            self._check([*self._flights, flight])
        results = run(args)
        self._register(flight, results)
        return results

    def backward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run the backward of a flight; it is over unless what it saved is kept for another."""
        with self._lock:
            mine = {storage_key(a) for a in args if isinstance(a, torch.Tensor)}
            over = [f for f in self._flights if f.held and not mine.isdisjoint(f.held)]
        results = run(args)
        for flight in over[-1:]:
            self._land(flight)
        return results

    def _register(self, flight: _Flight, results: Sequence[Any]) -> None:
        made = [t for t in results if isinstance(t, torch.Tensor) and storage_key(t) not in flight.inputs]
        flight.held = _storages(made)
        if not made:
            return
        # Saved tensors come last. When the last of them dies without a backward, the step was given up.
        weakref.finalize(made[-1].untyped_storage(), self._land, flight).atexit = False
        with self._lock:
            self._flights.append(flight)

    def _land(self, flight: _Flight) -> None:
        with self._lock:
            if flight in self._flights:
                self._flights.remove(flight)

    def _check(self, flights: list[_Flight]) -> None:
        """Refuse the last of some flights if any moment of them together breaks the budget."""
        now, earlier = flights[-1], flights[:-1]
        unplanned = max(0, now.gradients - now.account.planned_gradient_bytes)
        inputs = _union(flights, inputs_only=True)
        resident = now.account.resident_bytes + unplanned + sum(size for key, size in inputs.items() if key not in now.inputs)
        budget = max(f.account.budget_bytes for f in flights)
        worst = resident + now.account.forward_peak_bytes + _held_beside(earlier, inputs)
        for position, flight in enumerate(flights):
            # Backwards run from the last flight to the first, and leave their gradients.
            later = sum(f.account.gradient_bytes for f in flights[position + 1 :])
            held = _held_beside(flights[:position], inputs)
            worst = max(worst, resident + held + flight.account.backward_peak_bytes + later)
        if worst <= budget:
            return
        if len(flights) == 1:
            raise InFlightError(
                f"this step would take {format_bytes(worst)}, and its budget is {format_bytes(budget)}: "
                f"{format_bytes(unplanned)} of gradients are there already that were not when it was planned",
                hint="call zero_grad(set_to_none=True) before the forward, or plan with room for them: accumulate=True",
            )
        raise InFlightError(
            f"{len(flights)} planned graphs in flight together would take {format_bytes(worst)}, and the budget is "
            f"{format_bytes(budget)}: a graph break, or a forward before the backward of the one before",
            hint=f"find the break with torch.compile(..., fullgraph=True), call backward before the next forward, or raise "
            f"the budget to at least {format_at_least(worst)}",
        )


IN_FLIGHT = Coordinator()
"""The coordinator of this process."""


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    return {storage_key(t): storage_bytes(t) for t in tensors}


def _gradients(tensors: Iterable[torch.Tensor]) -> int:
    return sum(_storages(t.grad for t in tensors if t.is_leaf and t.grad is not None).values())


def _union(flights: Iterable[_Flight], *, inputs_only: bool = False) -> dict[int, int]:
    found: dict[int, int] = {}
    for flight in flights:
        found.update(flight.inputs)
        if not inputs_only:
            found.update(flight.held)
    return found


def _held_beside(flights: Iterable[_Flight], inputs: dict[int, int]) -> int:
    return sum(size for key, size in _union(flights).items() if key not in inputs)
