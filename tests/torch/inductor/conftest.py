"""Compilations by Inductor share no measured plans, and start no worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from checkmate.torch._compat.inductor import inductor_config

inductor_settings = inductor_config.patch
"""A context with other settings of Inductor."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what other tests measured from answering; op costs are shared, as everywhere."""
    monkeypatch.setattr("checkmate.frontend.plan_store.cache_folder", lambda: tmp_path)


@pytest.fixture(autouse=True)
def _in_this_process() -> Iterator[None]:
    with inductor_settings(compile_threads=1):
        yield
