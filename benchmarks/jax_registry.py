"""A registry of losses in the shape of public JAX programs, and draws of their arguments; `SOURCES` says which programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Wraps a block of a program."""

SOURCES: dict[str, str] = {}
PROGRAMS: dict[str, Callable[[Wrap], tuple[Callable[..., Any], tuple[Any, ...]]]] = {}
WITH_BLOCKS: list[str] = []
"""Programs whose blocks `wrap` is given."""


def program(source: str, *, blocks: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a program under the name of its function, with the public program whose shape it has."""

    def register(build: Callable[..., Any]) -> Callable[..., Any]:
        name = build.__name__.strip("_")
        SOURCES[name], PROGRAMS[name] = source, build if blocks else lambda wrap: build()
        WITH_BLOCKS.extend([name] * blocks)
        return build

    return register


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape), jnp.float32)


def integers(most: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, most, shape), jnp.int32)


def matrices(key: int, **shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    return {n: normal(*s, seed=key + i, scale=s[-2] ** -0.5 if len(s) > 1 else 0.0) for i, (n, s) in enumerate(shapes.items())}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
