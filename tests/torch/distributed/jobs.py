"""Ranks of a job that are threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def at_once(*runs: Callable[[], Any]) -> list[Any]:
    """What several calls return or raise, run at the same time."""

    def caught(run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Exception as error:  # noqa: BLE001 - it is what the test looks at
            return error

    with ThreadPoolExecutor(len(runs)) as pool:
        return list(pool.map(caught, runs))
