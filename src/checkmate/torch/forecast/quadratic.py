"""A step at any size of a dimension, from traces at three sizes: parabolas through sizes and costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import msgspec

from checkmate.core.graph import Graph
from checkmate.studies.affine import AffineGraph, check_same_structure


@dataclass(frozen=True, slots=True)
class QuadraticGraph:
    """Graph of a step at any size of a dimension, such as the sequence length of attention without a fused kernel.

    Each size and cost is the parabola through its three values if its coefficients are zero or more, so that it rises
    everywhere. Otherwise it is what `AffineGraph` makes of the two nearest traces.

    Attributes:
        traces: The graphs by size, three of them.
        lines: The step through the two nearest sizes.

    Raises:
        GraphError: The graphs differ in more than sizes, costs and names.
    """

    traces: Mapping[int, Graph]
    lines: AffineGraph
    _at: tuple[int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        first, second, third = sorted(self.traces)
        check_same_structure(self.traces[first], first, self.traces[third], third)
        object.__setattr__(self, "_at", (first, second, third))

    def __call__(self, size: int) -> Graph:
        """The graph at a size."""
        line = self.lines(size)
        graphs = [self.traces[at] for at in self._at]
        ops = tuple(
            msgspec.structs.replace(
                op,
                cost=self._value(size, [g.ops[o].cost for g in graphs], op.cost),
                workspace_bytes=self._value(size, [g.ops[o].workspace_bytes for g in graphs], op.workspace_bytes),
                replay_bytes=self._value(size, [g.ops[o].replay_bytes for g in graphs], op.replay_bytes),
            )
            for o, op in enumerate(line.ops)
        )
        values = tuple(
            msgspec.structs.replace(
                value, size_bytes=self._value(size, [g.values[v].size_bytes for g in graphs], value.size_bytes)
            )
            for v, value in enumerate(line.values)
        )
        resident = self._value(size, [g.resident_bytes for g in graphs], line.resident_bytes)
        return msgspec.structs.replace(line, ops=ops, values=values, resident_bytes=resident)

    def _value(self, size: int, known: list[int], on_line: int) -> int:
        """The parabola through three values, rounded up; the value on the line where a coefficient is negative."""
        (a, b, c), (x, y, z) = self._at, known
        first, second = Fraction(y - x, b - a), Fraction(z - y, c - b)
        square = (second - first) / (c - a)
        linear = first - square * (a + b)
        constant = x - linear * a - square * a * a
        if min(square, linear, constant) < 0:
            return on_line
        return -int(-(square * size * size + linear * size + constant) // 1)
