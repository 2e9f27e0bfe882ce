"""Several planned graphs in flight at once: one budget over what they hold together.

A plan is made for one graph by itself. A graph break, or two forwards before a backward, puts what an
earlier graph holds beside a later one's peak. The first step that does so is watched, and says what it takes; when
it is over the budget is divided over its graphs, and they are compiled anew. From then on what a forward
and its backward will take is predicted when it begins, from the plans and the storages really held, and
refused if it breaks the budget: never a silent run over it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from checkmate.core.errors import CheckmateError
from checkmate.core.graph import Graph
from checkmate.core.units import Amount, format_at_least, format_bytes, parse_budget
from checkmate.torch.division import Choice, choices, divide, together
from checkmate.torch.sizes import storage_bytes, storage_key

_log = logging.getLogger("checkmate.torch")
_TIME_S = 30.0  # for the plans to choose from, where there is no limit


class InFlightError(CheckmateError, RuntimeError):
    """Graphs in flight together would take more than the budget."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Account:
    """What one planned graph takes above what is resident, and what it takes to plan it anew.

    Attributes:
        graph: The graph.
        boundary: Its boundary op.
        choice: Its plan, and what that takes.
        budget: The budget as it was asked for.
        budget_bytes: The budget it was planned for.
        resident_bytes: What it was planned beside, but for what was in flight then.
        planned_gradient_bytes: Gradients among that: there when it was planned, or expected.
        time_limit_s: Seconds that planning may take.
        forget: Makes torch compile it anew; None if nothing can.
        key: See `key_of`.
    """

    graph: Graph
    boundary: int
    choice: Choice
    budget: Amount
    budget_bytes: int
    resident_bytes: int
    planned_gradient_bytes: int
    time_limit_s: float | None
    forget: Callable[[], None] | None
    key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", key_of(self.graph, self.budget))


@dataclass(frozen=True, slots=True)
class Share:
    """What a division gives a graph.

    Attributes:
        order: Its plan, as the order of its computations.
        budget_bytes: The budget of all graphs together.
    """

    order: tuple[int, ...]
    budget_bytes: int


def key_of(graph: Graph, budget: Amount) -> str:
    """What is divided: a graph, whatever is resident beside it, and a budget as it was asked for."""
    return f"{budget} {msgspec.structs.replace(graph, resident_bytes=0).digest}"


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
        self._step: list[_Flight] = []  # forwards since nothing was in flight
        self._most_bytes = 0  # what a moment of this step was to take
        self._shares: dict[str, Share] = {}
        self._settled: set[str] = set()

    def forget_divisions(self) -> None:
        """Divide anew from the next step on, as in a fresh process."""
        with self._lock:
            self._shares.clear()
            self._settled.clear()

    def share(self, graph: Graph, budget: Amount) -> Share | None:
        """What a division gave a graph, if there was one."""
        return self._shares.get(key_of(graph, budget))

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
            if not self._flights:
                self._step, self._most_bytes = [], 0
            self._check([*self._flights, flight])
            self._step.append(flight)
        results = run(args)
        self._register(flight, results)
        return results

    def backward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run the backward of a flight; it is over unless what it saved is kept for another."""
        with self._lock:
            mine = {storage_key(a) for a in args if isinstance(a, torch.Tensor)}
            over = [f for f in self._flights if f.held and not mine.isdisjoint(f.held)]
        results = run(args)
        with self._lock:
            for flight in over[-1:]:
                self._land(flight)
            if over and not self._flights:
                self._settle()
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
        worst = resident + now.account.choice.forward_peak_bytes + _held_beside(earlier, inputs)
        for position, flight in enumerate(flights):
            # Backwards run from the last flight to the first, and leave their gradients.
            later = sum(f.account.choice.gradient_bytes for f in flights[position + 1 :])
            held = _held_beside(flights[:position], inputs)
            worst = max(worst, resident + held + flight.account.choice.backward_peak_bytes + later)
        self._most_bytes = max(self._most_bytes, worst)
        if worst <= budget:
            return
        if len(flights) == 1:
            raise InFlightError(
                f"this step would take {format_bytes(worst)}, and its budget is {format_bytes(budget)}: "
                f"{format_bytes(unplanned)} of gradients are there already that were not when it was planned",
                hint="call zero_grad(set_to_none=True) before the forward, or plan with room for them: accumulate=True",
            )
        if not all(f.account.key in self._settled or f.account.forget is None for f in flights):
            return  # the first of its kind: `_settle` says what it took
        raise InFlightError(
            f"{len(flights)} planned graphs in flight together would take {format_bytes(worst)}, and the budget is "
            f"{format_bytes(budget)}: a graph break, or a forward before the backward of the one before",
            hint=f"find the break with torch.compile(..., fullgraph=True), call backward before the next forward, or raise "
            f"the budget to at least {format_at_least(worst)}",
        )

    def _settle(self) -> None:
        """Divide the budget over the graphs of a step that is over, if that was not done and there is something to gain."""
        step, self._step = self._step, []
        accounts = {f.account.key: f.account for f in step}
        if len(step) < 2 or self._settled.issuperset(accounts) or any(a.forget is None for a in accounts.values()):
            return
        self._settled.update(accounts)
        budget = max(a.budget_bytes for a in accounts.values())
        if self._most_bytes <= budget and all(a.choice.cost == a.graph.cost for a in accounts.values()):
            return
        keys = list(accounts)
        sequence = [keys.index(f.account.key) for f in step]
        time_s = (step[0].account.time_limit_s or _TIME_S) / len(keys)
        offers = [[a.choice, *choices(a.graph, a.boundary, time_s)] for a in accounts.values()]
        resident = _resident_bytes(step)
        amount = step[0].account.budget
        if isinstance(amount, str) and amount.strip().endswith("%"):
            freest = [min(offer, key=lambda c: c.cost) for offer in offers]
            budget = parse_budget(amount, resident_bytes=resident, keep_all_bytes=resident + together(sequence, freest))
        picked = divide(sequence, offers, budget - resident)
        if picked is None:
            took = f"{len(step)} graphs were in flight together, and this first step took up to {format_bytes(self._most_bytes)}"
            _log.warning("%s; no division of %s over them was found, so that the next is refused", took, format_bytes(budget))
            return
        chosen = [offer[c] for offer, c in zip(offers, picked, strict=True)]
        peak = resident + together(sequence, chosen)
        _log.warning(
            "%d graphs were in flight together, and this first step took up to %s; with the budget of %s divided over them "
            "the next takes up to %s",
            len(step),
            format_bytes(self._most_bytes),
            format_bytes(budget),
            format_bytes(peak),
        )
        for key, account, choice in zip(keys, accounts.values(), chosen, strict=True):
            self._shares[key] = Share(choice.plan.order, budget)
            assert account.forget is not None
            account.forget()


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


def _resident_bytes(step: Sequence[_Flight]) -> int:
    """What is resident beside the graphs of a step: the inputs that none of them made, and what was planned beside."""
    first = step[0]
    made = {key for flight in step for key in flight.held}
    outside = sum(size for key, size in _union(step, inputs_only=True).items() if key not in made)
    return outside + first.account.resident_bytes - sum(first.inputs.values())


def _held_beside(flights: Iterable[_Flight], inputs: dict[int, int]) -> int:
    return sum(size for key, size in _union(flights).items() if key not in inputs)
