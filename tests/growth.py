"""How the work of a reader grows with its input: processor time, so that other programs on the machine decide nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

MOST = 9.0
"""Four times the input takes four times as long if each part of it is looked at once, and sixteen times if each pair is."""


def growth(make: Callable[[int], T], run: Callable[[T], object], n: int) -> float:
    """Processor time of a call on an input of four times ``n`` over that on one of ``n``, the least of three calls each.

    Args:
        make: The input of a size.
        run: The call; what is cached in its input must not make it faster, so that each call has another one.
        n: The size.
    """

    def seconds(size: int) -> float:
        taken: list[float] = []
        for _ in range(3):
            given = make(size)
            began = time.process_time()
            run(given)
            taken.append(time.process_time() - began)
        return min(taken)

    return seconds(4 * n) / seconds(n)
