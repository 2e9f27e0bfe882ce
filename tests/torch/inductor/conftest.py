"""Compilations by Inductor share no measured plans, and start no worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkmate.cost.store import Store
from checkmate.torch._compat.inductor import inductor_config

inductor_settings = inductor_config.patch
"""A context with other settings of Inductor."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what other tests measured from answering; op costs are shared, as everywhere."""

    def store(kind: str, of: type[Any], without: str, path: str | None = None) -> Store[Any]:
        return Store(kind, of, without, path if kind == "solved plans" else tmp_path / "plans.sqlite")

    monkeypatch.setattr("checkmate.frontend.plan_store.Store", store)


@pytest.fixture(autouse=True)
def _in_this_process() -> Iterator[None]:
    with inductor_settings(compile_threads=1):
        yield
