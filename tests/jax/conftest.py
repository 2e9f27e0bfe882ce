"""What the JAX tests share: two devices on the CPU, for `jax.shard_map`, and no memory of options."""

from __future__ import annotations

import jax
import pytest

from checkmate.jax import _compat

jax.config.update("jax_num_cpu_devices", 2)


@pytest.fixture(autouse=True, scope="module")
def nothing_is_asked_by_other_modules() -> None:
    """Plans that a module shares are made before its first test."""
    _compat.ASKED.clear()


@pytest.fixture(autouse=True)
def nothing_is_asked() -> None:
    """Whether a program has asked for options counts from the beginning of each test."""
    _compat.ASKED.clear()
