"""Choices of saved values: integer programs choose those of one layer of a loop, and arrangements of layers are compared.

One model of cost and bytes serves all of them. The derivative of a layer reads values that are either saved or computed again
from saved ones. A choice is a cut of the graph; with a limit on the bytes, the cheapest cut is an integer program. The Lagrangian
relaxation of that limit bounds choices that differ by layer.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from checkmate.core.errors import OptionError
from checkmate.jax._compat import source_of
from checkmate.jax.graph.capture import Costs, phases_of_pair
from checkmate.jax.graph.loops import cheapest_cut, cut_program
from checkmate.jax.graph.trace import Equation, Pure, is_inexact, trace_pair
from checkmate.jax.scan.groups import NAME, LayerGroup, Residuals


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Values to save in one layer, with names and source lines; the choice of all that the derivative reads has no names."""

    names: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    saved_bytes: int
    cost: float  # of recomputations
    bound: float = 0.0  # proven lower bound on the cost of choices of no more bytes
    everything: bool = False

    def group(self, layers: int, nested: int = 1) -> LayerGroup:
        """Some layers that save these values."""
        return LayerGroup(layers=layers, names=self.names, sources=self.sources, nested=nested, everything=self.everything)


class Choices:
    """The choices among the offered names, all names by default, for a layer that is a function of flat arrays.

    ``total`` is the cost of a layer and its derivative without recomputations, ``forward`` the cost of the layer alone.
    ``read_bytes`` are the bytes that the derivative reads: a layer without `jax.checkpoint` saves them all.
    """

    def __init__(self, arrays: Sequence[Any], pure: Pure, costs: Costs, offered: Iterable[str] | None = None) -> None:
        wanted = [i for i, array in enumerate(arrays) if is_inexact(array)]
        trace, boundary = trace_pair(pure, arrays, wanted, jax.eval_shape(pure, *arrays))
        phases = phases_of_pair(trace, boundary)
        measured = zip(trace.equations, costs([(equation,) for equation in trace.equations]), strict=True)
        cost = {id(equation): 0 if equation.kind == NAME else found.cost_ns for equation, found in measured}
        ahead = [equation for equation in trace.equations if phases[id(equation)] == "forward"]
        self._cost = np.array([cost[id(equation)] for equation in ahead], dtype=float)
        self.total, self.forward = float(sum(cost.values())), float(self._cost.sum())
        self.read_bytes = Residuals(pure, arrays).saved_bytes
        named: dict[str, list[Equation]] = {}
        for equation in ahead:
            if equation.kind == NAME:
                named.setdefault(str(equation.eqn.params["name"]), []).append(equation)
        self.offered = tuple(named) if offered is None else tuple(offered)
        if missing := set(self.offered).difference(named):
            raise OptionError(
                f"the body of the loop gives no value the name {', '.join(sorted(missing))}",
                hint="attach names in the body with jax.ad_checkpoint.checkpoint_name, or leave names out",
            )
        saves = {equation.outputs[0]: j for j, name in enumerate(self.offered) for equation in named[name]}
        self._sources = [next(filter(None, (source_of(e.eqn) for e in named[name])), "") for name in self.offered]
        self._bytes = np.array([float(sum(trace.size_bytes(e.outputs[0]) for e in named[name])) for name in self.offered])
        gradients = {v for v in trace.results[boundary.results :] if isinstance(v, int)}
        backward = {v for e in trace.equations if phases[id(e)] == "backward" for v in e.read} | gradients
        self._program = cut_program(ahead, backward, saves, self._bytes)
        self._found: dict[int, Choice] = {}

    def cheapest(self, most_bytes: float) -> Choice:
        """The choice with the cheapest recomputations, of those that save at most `most_bytes` in one layer."""
        limit = int(min(max(0, most_bytes), self._bytes.sum()))
        if limit not in self._found:
            price = 1e-12  # of a byte, to decide between choices of equal cost
            choice, proven = self._solved(limit, price)
            self._found[limit] = replace(choice, bound=min(choice.cost, max(0.0, proven - price * limit)))
        return self._found[limit]

    @functools.cached_property
    def front(self) -> tuple[Choice, ...]:
        """The Pareto-optimal choices by bytes and cost, from saving nothing to no recomputation."""
        found = [self.cheapest(math.inf)]
        step = max(1, found[0].saved_bytes // 64)  # finer steps take longer and gain less than rounding to whole layers loses
        while found[-1].saved_bytes:
            found.append(self.cheapest(found[-1].saved_bytes - step))
        return tuple(found[::-1])

    @functools.cached_property
    def front_with_everything(self) -> tuple[Choice, ...]:
        """The same, and the choice of all that the derivative reads, which names cannot express."""
        everything = Choice(saved_bytes=self.read_bytes, cost=0.0, everything=True)
        return (*(choice for choice in self.front if choice.saved_bytes < self.read_bytes), everything)

    def bound(self, length: int, carry_bytes: int, most_bytes: int) -> float:
        """Proven lower bound on the cost of recomputations in all layers, for any choice in each layer, also in nested loops.

        The price of a byte that gives the highest bound is a slope of the convex hull of all choices (Lagrangian relaxation). A
        layer in a nested loop costs at least its forward, and saves at least its share of one carry. A layer without
        `jax.checkpoint` costs nothing. All layers together save `most_bytes`; outside nested loops each layer saves a carry.
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

    @functools.cache  # noqa: B019 - a few prices of one layer
    def _priced(self, price: float) -> float:
        """Proven lower bound on the cost of recomputations in a layer plus a price for each byte that the layer saves."""
        return self._solved(math.inf, price)[1]

    def _solved(self, most_bytes: float, price: float) -> tuple[Choice, float]:
        """The choice of the least cost plus price, and a proven lower bound on this sum."""
        again, saved, bound = cheapest_cut(self._program, self._cost, self._bytes, most_bytes, price)
        chosen = np.flatnonzero(saved)
        choice = Choice(
            names=tuple(self.offered[j] for j in chosen),
            sources=tuple(self._sources[j] for j in chosen),
            saved_bytes=int(self._bytes[chosen].sum()),
            cost=float(self._cost @ again),
        )
        return choice, bound


def _lower_hull(front: Sequence[Choice]) -> list[Choice]:
    """The corners of the convex hull of choices, from few bytes to many."""

    def slope(a: Choice, b: Choice) -> float:
        return (b.cost - a.cost) / (b.saved_bytes - a.saved_bytes)

    hull: list[Choice] = []
    for choice in front:
        while len(hull) > 1 and slope(hull[-2], hull[-1]) >= slope(hull[-2], choice):
            hull.pop()
        hull.append(choice)
    return hull


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """A loop over layers in groups, with its cost by the model."""

    groups: tuple[LayerGroup, ...]
    cost: float  # of recomputations in all layers
    bound: float = field(default=0.0, compare=False)  # proven, if all layers save the same values; else 0
    saved_bytes: int  # from the forward to the derivative, with carries
    held_bytes: int  # the same plus the bytes that inner loops hold while their derivative is computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The layers of a loop, and the ways to arrange them."""

    choices: Choices
    length: int
    carry_bytes: int
    differ: bool = True  # whether layers may save different values, or be nested
    nested: bool = True

    def cheapest(self, most_bytes: int) -> Arrangement | None:
        """The cheapest arrangement that holds at most some bytes; one that is less simple must be cheaper by half a per cent.

        A smaller gain is not worth more groups.
        """
        best: Arrangement | None = None
        for found in self._candidates(most_bytes):
            if found.held_bytes <= most_bytes and (best is None or found.cost < 0.995 * best.cost):
                best = found
        return best

    def smallest(self) -> list[Arrangement]:
        """Arrangements that save only carries: a simple loop, and the two nested ones that hold the fewest bytes."""
        nothing = self.choices.cheapest(0)
        nested = sorted((self._alike(nothing, inner) for inner in self._inner_lengths), key=lambda found: found.held_bytes)
        return [self._alike(nothing), *nested[:2]]

    def _candidates(self, most_bytes: int) -> Iterator[Arrangement]:
        """Arrangements of every kind, the simplest first: one choice, two, and nested loops with one choice."""
        if most_bytes >= self.length * self.carry_bytes:
            yield self._alike(self.choices.cheapest(most_bytes // self.length - self.carry_bytes))
        if self.differ:
            yield self._alike(self.choices.front_with_everything[-1])
            yield from self._pairs(most_bytes)
        for inner in self._inner_lengths:
            each = (most_bytes - self.length // inner * self.carry_bytes) // inner - self.carry_bytes
            if each >= 0:
                yield self._alike(self.choices.cheapest(each), inner)

    @property
    def _inner_lengths(self) -> list[int]:
        return [d for d in range(2, self.length) if self.differ and self.nested and self.length % d == 0]

    def _alike(self, choice: Choice, inner: int = 1) -> Arrangement:
        """All layers save the same values; `inner` is the number of layers of each inner loop, 1 if loops are not nested."""
        nested, carries = inner > 1, self.length // inner * self.carry_bytes
        saved = carries if nested else carries + self.length * choice.saved_bytes
        return Arrangement(
            groups=(choice.group(self.length, inner),),
            cost=self.length * (choice.cost + (self.choices.forward if nested else 0)),
            bound=0.0 if nested else self.length * choice.bound,
            saved_bytes=saved,
            held_bytes=saved + (inner * (self.carry_bytes + choice.saved_bytes) if nested else 0),
        )

    def _pairs(self, most_bytes: int) -> Iterator[Arrangement]:
        """The cheapest arrangement of two choices, the second for all layers after some number of layers, if there is any."""
        front, length = self.choices.front_with_everything, self.length
        sizes = [choice.saved_bytes for choice in front]
        room = most_bytes - length * self.carry_bytes
        found: list[tuple[float, int, Choice, Choice]] = []
        for few in front:
            for count in range(1, length):
                each = (room - count * few.saved_bytes) // (length - count)
                if each < few.saved_bytes:
                    break
                many = front[bisect.bisect_right(sizes, each) - 1]
                if many is not few:
                    found.append((count * few.cost + (length - count) * many.cost, count, few, many))
        if found:
            cost, count, few, many = min(found, key=lambda pair: pair[0])
            saved = length * self.carry_bytes + count * few.saved_bytes + (length - count) * many.saved_bytes
            # The derivative begins with the last layers, when everything is saved: they recompute less, and hold less.
            groups = (few.group(count), many.group(length - count))
            yield Arrangement(groups=groups, cost=cost, saved_bytes=saved, held_bytes=saved)
