"""Ways to arrange a loop over layers in groups, nested or not, compared by one model of cost and bytes."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from checkmate.jax.scan.choices import Choice, Choices
from checkmate.jax.scan.groups import LayerGroup

_WORTH: Final = 0.005
"""Share of the cost by which an arrangement with more groups must be cheaper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """A loop over layers in groups, with what it costs by the model.

    Attributes:
        groups: Groups of layers.
        cost: Cost of what is computed again, in all layers.
        bound: Proven lower bound on the cost of arrangements of the same kind; 0 if there is none.
        saved_bytes: Bytes that are saved from the forward to the derivative, with carries.
        held_bytes: The same, with what inner loops hold while their derivative is computed.
    """

    groups: tuple[LayerGroup, ...]
    cost: float
    bound: float = 0.0
    saved_bytes: int
    held_bytes: int


Family = Callable[[int], Arrangement | None]
"""Gives the cheapest arrangement of a kind that holds no more than some bytes; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The layers of a loop.

    Attributes:
        choices: What one of them can save.
        length: Number of layers.
        carry_bytes: Bytes of the carry.
        nested: Whether loops may be nested.
    """

    choices: Choices
    length: int
    carry_bytes: int
    nested: bool = True

    def families(self, *, groups: bool) -> dict[str, Family]:
        """Kinds of arrangements, the simplest first; each gives its cheapest one that holds no more than some bytes.

        Args:
            groups: Whether layers may save different values, or be nested.
        """
        found: dict[str, Family] = {"uniform": self._uniform}
        if groups:
            found["everything"] = self._everything
            found["pair"] = self._pair
            found |= {f"nested {inner}": functools.partial(self._nested, inner) for inner in self._inner_lengths}
        return found

    def least(self, *, groups: bool) -> dict[str, Arrangement]:
        """The arrangement that holds the fewest bytes, for each kind of one group.

        Args:
            groups: Whether loops may be nested.
        """
        held = {"uniform": self.length * self.carry_bytes}
        held |= {f"nested {d}": (self.length // d + d) * self.carry_bytes for d in self._inner_lengths}
        families = self.families(groups=groups)
        return {kind: found for kind, limit in held.items() if kind in families and (found := families[kind](limit)) is not None}

    @property
    def _inner_lengths(self) -> list[int]:
        return [d for d in range(2, self.length) if self.nested and self.length % d == 0]

    def _uniform(self, most_bytes: int) -> Arrangement | None:
        each = most_bytes // self.length - self.carry_bytes
        if each < 0:
            return None
        choice = self.choices.cheapest(each)
        saved = self.length * (self.carry_bytes + choice.saved_bytes)
        return Arrangement(
            groups=(_group(self.length, choice),),
            cost=self.length * choice.cost,
            bound=self.length * choice.bound,
            saved_bytes=saved,
            held_bytes=saved,
        )

    def _everything(self, most_bytes: int) -> Arrangement | None:
        saved = self.length * (self.carry_bytes + self.choices.read_bytes)
        if saved > most_bytes:
            return None
        groups = (LayerGroup(layers=self.length, names=(), everything=True),)
        return Arrangement(groups=groups, cost=0.0, saved_bytes=saved, held_bytes=saved)

    def _nested(self, inner: int, most_bytes: int) -> Arrangement | None:
        outer = self.length // inner * self.carry_bytes
        each = (most_bytes - outer) // inner - self.carry_bytes
        if each < 0:
            return None
        choice = self.choices.cheapest(each)
        return Arrangement(
            groups=(_group(self.length, choice, inner),),
            cost=self.length * (self.choices.forward + choice.cost),
            saved_bytes=outer,
            held_bytes=outer + inner * (self.carry_bytes + choice.saved_bytes),
        )

    def _pair(self, most_bytes: int) -> Arrangement | None:
        """Two choices, the second for all layers after some number of layers."""
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
        if not found:
            return None
        cost, count, few, many = min(found, key=lambda pair: pair[0])
        saved = length * self.carry_bytes + count * few.saved_bytes + (length - count) * many.saved_bytes
        # The derivative begins with the last layers, when everything is saved: they compute less again, and hold less.
        groups = (_group(count, few), _group(length - count, many))
        return Arrangement(groups=groups, cost=cost, saved_bytes=saved, held_bytes=saved)


def cheapest(candidates: Iterable[Arrangement]) -> Arrangement | None:
    """The cheapest of some arrangements, of which an earlier one is preferred to one that is hardly cheaper.

    Args:
        candidates: Arrangements, the simplest first.
    """
    best: Arrangement | None = None
    for candidate in candidates:
        if best is None or candidate.cost < (1 - _WORTH) * best.cost:
            best = candidate
    return best


def _group(layers: int, choice: Choice, nested: int = 1) -> LayerGroup:
    return LayerGroup(layers=layers, names=choice.names, sources=choice.sources, nested=nested, everything=choice.everything)
