"""Overhead and lower bound against budget, as SVG."""

from __future__ import annotations

import math
from itertools import pairwise

from checkmate.core.curve import Curve
from checkmate.core.graph import Graph
from checkmate.core.units import format_bytes

_WIDE, _HIGH = 760, 320
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 18, 14, 38


def curve_svg(graph: Graph, curve: Curve, peak_bytes: int, cost: int) -> str:
    """Draw overhead and lower bound against budget, and mark the point of one plan.

    Args:
        graph: Graph of the curve.
        curve: Plans and bounds by budget.
        peak_bytes: Peak of the plan to mark, resident memory included.
        cost: Cost of the plan to mark.

    Returns:
        The SVG element.
    """
    every_op_once = graph.cost or 1
    found = [(p.budget_bytes, p.cost / every_op_once, p.bound / every_op_once) for p in curve.points]
    chosen = (peak_bytes, cost / every_op_once)
    low, high = min(chosen[0], found[0][0]), max(chosen[0], found[-1][0])
    top = max(chosen[1], *(overhead for _, overhead, _ in found))
    top = 1 + max(1e-4, top - 1) * 1.08

    def x(budget_bytes: float) -> float:
        return _LEFT + (_WIDE - _LEFT - _RIGHT) * (budget_bytes - low) / max(1, high - low)

    def y(overhead: float) -> float:
        return _TOP + (_HIGH - _TOP - _BOTTOM) * (1 - (overhead - 1) / (top - 1))

    # Both are step functions: a plan is valid for larger budgets up to the next point, a bound for smaller ones.
    costs = _stairs([(x(b), y(o)) for b, o, _ in found], ahead=True)
    bounds = _stairs([(x(b), y(bound)) for b, _, bound in found], ahead=False)
    parts = [f'<svg id="curve" viewBox="0 0 {_WIDE} {_HIGH}" role="img" aria-label="Overhead against budget">']
    for tick in _ticks(1.0, top):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDE - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.4g}x</text>')
    unit, name = next(((size, name) for size, name in _UNITS if high >= size), (1, "B"))
    for tick in _ticks(low / unit, high / unit):
        parts.append(f'<text x="{x(tick * unit):.1f}" y="{_HIGH - _BOTTOM + 18}" text-anchor="middle">{tick:g} {name}</text>')
    parts.append(f'<text x="{_WIDE - _RIGHT}" y="{_HIGH - 4}" text-anchor="end">budget</text>')
    parts.append(f'<polygon class="band" points="{_points(costs)} {_points(list(reversed(bounds)))}"/>')
    parts.append(f'<polyline class="bound" points="{_points(bounds)}"/><polyline class="cost" points="{_points(costs)}"/>')
    for budget_bytes, overhead, bound in found:
        words = f"{format_bytes(budget_bytes)}: {overhead:.4f}x, bound {bound:.4f}x"
        place = f'cx="{x(budget_bytes):.1f}" cy="{y(overhead):.1f}"'
        numbers = f'data-budget="{budget_bytes}" data-overhead="{overhead!r}" data-bound="{bound!r}"'
        parts.append(f'<circle class="point" r="3.5" {place} {numbers}><title>{words}</title></circle>')
    words = f"this plan: {format_bytes(chosen[0])}, {chosen[1]:.4f}x"
    place = f'cx="{x(chosen[0]):.1f}" cy="{y(chosen[1]):.1f}"'
    numbers = f'data-peak="{peak_bytes}" data-overhead="{chosen[1]!r}"'
    parts.append(f'<circle class="chosen" r="6" {place} {numbers}><title>{words}</title></circle>')
    return "\n".join([*parts, "</svg>"])


def _stairs(points: list[tuple[float, float]], *, ahead: bool) -> list[tuple[float, float]]:
    """Corners of a step function that is constant after each point (``ahead``) or before it."""
    corners = [points[0]]
    for (x0, y0), (x1, y1) in pairwise(points):
        corners += [(x1, y0) if ahead else (x0, y1), (x1, y1)]
    return corners


def _points(corners: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)


def _ticks(low: float, high: float) -> list[float]:
    raw = (high - low or 1.0) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    size = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    first = math.ceil(low / size - 1e-9)
    return [k * size for k in range(first, math.floor(high / size + 1e-9) + 1)]
