"""Overhead and lower bound against budget, as SVG."""

from __future__ import annotations

import math
from itertools import pairwise

from checkmate.core.curve import Curve
from checkmate.core.graph import Graph
from checkmate.core.units import format_bytes
from checkmate.report.markup import Markup

_WIDE, _HIGH = 760, 320
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 18, 14, 38


def curve_svg(graph: Graph, curve: Curve, peak_bytes: int, cost: int) -> Markup:
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
    parts = [Markup('<svg id="curve" viewBox="0 0 {} {}" role="img" aria-label="Overhead against budget">').format(_WIDE, _HIGH)]
    line = Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>')
    text = Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>')
    for tick in _ticks(1.0, top):
        parts.append(line.format(_LEFT, _WIDE - _RIGHT, y(tick), y(tick)))
        parts.append(text.format(_LEFT - 6, y(tick) + 4, "end", f"{tick:.4g}x"))
    unit, name = next(((size, name) for size, name in _UNITS if high >= size), (1, "B"))
    for tick in _ticks(low / unit, high / unit):
        parts.append(text.format(x(tick * unit), _HIGH - _BOTTOM + 18, "middle", f"{tick:g} {name}"))
    parts.append(text.format(_WIDE - _RIGHT, _HIGH - 4, "end", "budget"))
    parts.append(Markup('<polygon class="band" points="{} {}"/>').format(_points(costs), _points(list(reversed(bounds)))))
    for kind, corners in (("bound", bounds), ("cost", costs)):
        parts.append(Markup('<polyline class="{}" points="{}"/>').format(kind, _points(corners)))
    point = Markup('<circle class="{}" r="{}" cx="{:.1f}" cy="{:.1f}" {}><title>{}</title></circle>')
    for budget_bytes, overhead, bound in found:
        words = f"{format_bytes(budget_bytes)}: {overhead:.4f}x, bound {bound:.4f}x"
        numbers = Markup('data-budget="{}" data-overhead="{!r}" data-bound="{!r}"').format(budget_bytes, overhead, bound)
        parts.append(point.format("point", 3.5, x(budget_bytes), y(overhead), numbers, words))
    words = f"this plan: {format_bytes(chosen[0])}, {chosen[1]:.4f}x"
    numbers = Markup('data-peak="{}" data-overhead="{!r}"').format(peak_bytes, chosen[1])
    parts.append(point.format("chosen", 6, x(chosen[0]), y(chosen[1]), numbers, words))
    return Markup("\n").join([*parts, Markup("</svg>")])


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
