"""Recomputations summed by module."""

from __future__ import annotations

import re
from typing import NamedTuple

from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.studies.explain import remats

_PLACE = re.compile(r", [^,]*:\d+$")


class ModuleRemats(NamedTuple):
    """Recomputations of a plan in one module.

    Attributes:
        name: Path of the module; for ops without one their file and line, or their kind.
        ops: Number of ops that are recomputed.
        times: Number of recomputations.
        cost: Cost of the recomputations, in the graph's ``cost_unit``.
    """

    name: str
    ops: int
    times: int
    cost: int


def remats_by_module(graph: Graph, plan: Plan) -> tuple[ModuleRemats, ...]:
    """Recomputations of a plan by module, the most costly first.

    Args:
        graph: The graph.
        plan: The plan.
    """
    groups: dict[str, list[int]] = {}
    for remat in remats(graph, plan):
        group = groups.setdefault(module_of(remat.source) or graph.ops[remat.op].kind or "ops without a source", [0, 0, 0])
        for index, amount in enumerate((1, remat.times, remat.cost)):
            group[index] += amount
    found = (ModuleRemats(name, *counts) for name, counts in groups.items())
    return tuple(sorted(found, key=lambda group: (-group.cost, group.name)))


def module_of(source: str) -> str:
    """The module path of a source, without its file and line; the source itself if it has no path.

    Args:
        source: As `Op.source`.

    Examples:
        >>> module_of("transformer.h.0.mlp, model.py:12"), module_of("model.py:12")
        ('transformer.h.0.mlp', 'model.py:12')
    """
    return _PLACE.sub("", source)
