"""Restrict Inductor's fusion to ops that are close together in the order of a plan.

A plan may compute a value twice instead of holding it. Inductor sees two chains that read the same tensors and fuses them, and
both values then exist at once: a fifth more than planned on a small network. Two loops are therefore fused only if no
kernel of another library, such as a matrix product, runs between them in the order of the plan.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any
from weakref import WeakKeyDictionary

from checkmate.torch._compat.inductor import InductorChoices

_BARRIERS: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
"""Fusion barriers of each scheduler. They are computed once, since `can_fuse` is called for every pair of nodes."""


class PlanChoices(InductorChoices):
    """Inductor's choices with a restriction of `can_fuse`."""

    @staticmethod
    def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: Any) -> bool:
        """Whether two nodes of the scheduler can become one kernel: Inductor fuses them, and no barrier is between them."""
        first, last = min(node1.min_order, node2.min_order), max(node1.max_order, node2.max_order)
        barriers = _fusion_barriers(scheduler)
        if bisect_left(barriers, last) > bisect_right(barriers, first):
            return False
        return InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)


def _fusion_barriers(scheduler: Any) -> list[int]:
    """Sorted positions of kernels of other libraries and of templates; they are never fused with each other and keep theirs."""
    if scheduler not in _BARRIERS:
        _BARRIERS[scheduler] = sorted(n.min_order for n in scheduler.nodes if n.is_extern() or n.is_template())
    return _BARRIERS[scheduler]
