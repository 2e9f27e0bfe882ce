"""Which named values of a loop's body to save: integer programs, and a bound for choices that differ by layer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from checkmate.core.errors import OptionError, SolverError
from checkmate.cost.store import OpCost
from checkmate.jax._compat import source_of
from checkmate.jax.graph.capture import phases_of_pair
from checkmate.jax.graph.pair import Pure, derivative, is_inexact, trace_pair
from checkmate.jax.scan.named_block import NAME
from checkmate.jax.scan.residuals import Residuals

_FRONT: Final = 64
"""Most choices that are compared with each other for layers that differ."""


_PRICE: Final = 1e-12
"""Price of a byte that decides between choices of equal cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Values to save in one layer.

    Attributes:
        names: Their names.
        sources: Where in the user's program they are computed.
        saved_bytes: Their bytes.
        cost: Cost of what is computed again.
        bound: Proven lower bound on that cost within as many bytes.
        everything: Whether all that the derivative reads is saved, which names cannot say.
    """

    names: tuple[str, ...]
    sources: tuple[str, ...]
    saved_bytes: int
    cost: float
    bound: float
    everything: bool = False


class Choices:
    """Which named values to save: `jax.checkpoint` computes again what the derivative needs and cannot be computed from them.

    An equation is computed again if the derivative, or another equation that is computed again, reads one of its outputs that is
    not saved. That is a cut of the graph; with a limit of bytes it is an integer program.

    Args:
        arrays: Shapes and types of the flat arguments of the body.
        pure: The body with all names, as a function of flat arrays.
        costs: Gives the costs of equations.
        offered: Names to choose among; None for all.

    Attributes:
        offered: The names to choose among.
        total: Cost of a layer and its derivative if nothing is computed again.
        forward: Cost of a layer without its derivative.
        read_bytes: Bytes that JAX saves of a layer without `jax.checkpoint`: what the derivative reads.

    Raises:
        OptionError: A name is not attached in the body.
    """

    def __init__(
        self,
        arrays: Sequence[Any],
        pure: Pure,
        costs: Callable[..., Sequence[OpCost]],
        offered: Iterable[str] | None = None,
    ) -> None:
        wanted = [i for i, array in enumerate(arrays) if is_inexact(array)]
        trace, boundary = trace_pair(pure, arrays, wanted)
        phases = phases_of_pair(trace, boundary)
        cost = [c.cost_ns for c in costs([(equation,) for equation in trace.equations], trace)]
        ahead = [i for i, equation in enumerate(trace.equations) if phases[id(equation)] == "forward"]
        maker = {v: i for i in ahead for v in trace.equations[i].outputs}
        equations = [trace.equations[i] for i in ahead]
        self._cost = np.array([0 if equations[k].kind == NAME else cost[i] for k, i in enumerate(ahead)], dtype=float)
        self.total = float(sum(c for c, equation in zip(cost, trace.equations, strict=True) if equation.kind != NAME))
        self.forward = float(self._cost.sum())
        index = {i: k for k, i in enumerate(ahead)}
        named = {k: str(e.eqn.params["name"]) for k, e in enumerate(equations) if e.kind == NAME}
        attached = tuple(dict.fromkeys(named.values()))
        self.offered = attached if offered is None else tuple(offered)
        if missing := set(self.offered).difference(attached):
            raise OptionError(
                f"the body of the loop gives no value the name {', '.join(sorted(missing))}",
                hint="attach names in the body with jax.ad_checkpoint.checkpoint_name, or leave names out",
            )
        number = {name: j for j, name in enumerate(self.offered)}
        saves = {k: number[name] for k, name in named.items() if name in number}
        self._bytes, self._sources = np.zeros(len(number)), [""] * len(number)
        for k, j in saves.items():
            self._bytes[j] += trace.size_bytes(equations[k].outputs[0])
            self._sources[j] = self._sources[j] or source_of(equations[k].eqn)
        gradients = {v for v in trace.results[boundary.results :] if isinstance(v, int)}
        read = {v for e in trace.equations if phases[id(e)] == "backward" for v in e.read} | gradients
        self.read_bytes = Residuals(lambda given: derivative(pure, given, wanted)[1], arrays).saved_bytes
        # Rows: what the derivative reads is computed again or saved; so is what is read by an equation that is computed again.
        rows: list[tuple[int | None, int]] = [(None, index[maker[v]]) for v in sorted(read) if v in maker]
        rows += [(k, index[maker[v]]) for k, equation in enumerate(equations) for v in equation.read if v in maker]
        least: Any = np.array([1.0 if k is None else 0.0 for k, _ in rows])
        self._rows = LinearConstraint(self._matrix(rows, saves), least, np.inf)
        self._lines: dict[float, float] = {}
        self._found: dict[int, Choice] = {}

    def cheapest(self, most_bytes: float) -> Choice:
        """The choice with the least cost of what is computed again.

        Args:
            most_bytes: The most bytes to save in one layer.
        """
        limit = int(min(max(0, most_bytes), self._bytes.sum()))
        if limit not in self._found:
            within = LinearConstraint(csr_array([[0.0] * len(self._cost) + list(self._bytes)]), -np.inf, limit)
            choice, proven = self._solved([self._rows, within], _PRICE)
            self._found[limit] = replace(choice, bound=min(choice.cost, max(0.0, proven - _PRICE * limit)))
        return self._found[limit]

    @functools.cached_property
    def front(self) -> tuple[Choice, ...]:
        """Choices none of which is better than another in both bytes and cost, from saving nothing to computing nothing again."""
        found = [self.cheapest(math.inf)]
        step = max(1, found[0].saved_bytes // _FRONT)
        while found[-1].saved_bytes:
            found.append(self.cheapest(found[-1].saved_bytes - step))
        return tuple(found[::-1])

    @functools.cached_property
    def front_with_everything(self) -> tuple[Choice, ...]:
        """The same, with the choice of what names cannot say: all that the derivative reads."""
        everything = Choice(names=(), sources=(), saved_bytes=self.read_bytes, cost=0.0, bound=0.0, everything=True)
        return (*(choice for choice in self.front if choice.saved_bytes < self.read_bytes), everything)

    def bound(self, length: int, carry_bytes: int, most_bytes: int) -> float:
        """Proven lower bound on what all layers compute again, whatever each of them saves, also in nested loops.

        The price of a byte that gives the highest bound is that of the convex hull of all choices (Lagrangian relaxation). A
        layer in a nested loop costs at least its forward, and saves at least its share of one carry. A layer without
        `jax.checkpoint` costs nothing.

        Args:
            length: Number of layers.
            carry_bytes: Bytes of the carry that each layer saves outside of nested loops.
            most_bytes: The most bytes that all layers save.
        """

        def at(price: float) -> float:
            flat = min(self._priced(price), price * self.read_bytes) + price * carry_bytes
            return length * min(flat, self.forward + price * carry_bytes / length) - price * most_bytes

        corners = _lower_hull(self.front)
        prices = {(a.cost - b.cost) / (b.saved_bytes - a.saved_bytes) for a, b in pairwise(corners)}
        share = carry_bytes * (1 - 1 / length)
        prices |= {(self.forward - c.cost) / (c.saved_bytes + share) for c in corners if c.saved_bytes + share > 0}
        prices |= {c.cost / (self.read_bytes - c.saved_bytes) for c in corners if c.saved_bytes < self.read_bytes}
        return max(0.0, *(at(price) for price in sorted(prices) if price >= 0))

    def _priced(self, price: float) -> float:
        """Proven lower bound on what a layer computes again, and a price for each byte that it saves."""
        if price not in self._lines:
            self._lines[price] = self._solved([self._rows], price)[1]
        return self._lines[price]

    def _solved(self, constraints: Sequence[LinearConstraint], price: float) -> tuple[Choice, float]:
        """The choice of least cost and price, and a proven lower bound on both together."""
        count = len(self._cost)
        weights = np.concatenate([self._cost, price * self._bytes])
        found = milp(weights, constraints=constraints, integrality=np.ones(len(weights)), bounds=Bounds(0, 1))
        if found.x is None:
            raise SolverError(f"the integer program for the saved values of a loop has no solution: {found.message}")
        again = float(self._cost @ (found.x[:count] > 0.5))
        chosen = [j for j in range(len(self._bytes)) if found.x[count + j] > 0.5]
        choice = Choice(
            names=tuple(self.offered[j] for j in chosen),
            sources=tuple(self._sources[j] for j in chosen),
            saved_bytes=int(self._bytes[chosen].sum()),
            cost=again,
            bound=0.0,
        )
        return choice, float(found.mip_dual_bound)

    def _matrix(self, rows: Sequence[tuple[int | None, int]], saves: Mapping[int, int]) -> csr_array:
        """A row for each value that is read: its equation is computed again, or it is saved, if its reader is."""
        count = len(self._cost)
        entries: list[tuple[int, int, float]] = []
        for row, (reader, maker) in enumerate(rows):
            entries.append((row, maker, 1.0))
            if maker in saves:
                entries.append((row, count + saves[maker], 1.0))
            if reader is not None:
                entries.append((row, reader, -1.0))
        positions, columns, values = zip(*entries, strict=True) if entries else ((), (), ())
        return csr_array((values, (positions, columns)), shape=(len(rows), count + len(self._bytes)))


def _lower_hull(front: Sequence[Choice]) -> list[Choice]:
    """The corners of the convex hull of choices, from few bytes to many."""
    hull: list[Choice] = []
    for choice in front:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _slope(a: Choice, b: Choice) -> float:
    return (b.cost - a.cost) / (b.saved_bytes - a.saved_bytes)
