"""Keep Inductor's scheduler to the times of a plan: it fuses what is computed together, and nothing across time.

A plan may compute a product twice rather than hold it. Inductor sees two chains that read the same tensors, fuses them,
and both products have to be there at once: a fifth more than planned on a small network. Two loops are
therefore fused only if between them, in the order of the plan, no kernel of another library runs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any
from weakref import WeakKeyDictionary

from checkmate.torch._compat.inductor import InductorChoices

_WALLS: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()


class PlanChoices(InductorChoices):
    """Inductor's own choices, but for what it may fuse."""

    @staticmethod
    def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: Any) -> bool:
        """Whether two nodes of the scheduler may become one."""
        first, last = min(node1.min_order, node2.min_order), max(node1.max_order, node2.max_order)
        walls = _walls(scheduler)
        if bisect_left(walls, last) > bisect_right(walls, first):
            return False
        return InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)


def _walls(scheduler: Any) -> list[int]:
    """Positions of kernels of other libraries, which are never fused and keep theirs."""
    if scheduler not in _WALLS:
        _WALLS[scheduler] = sorted(n.min_order for n in scheduler.nodes if n.is_extern() or n.is_template())
    return _WALLS[scheduler]
