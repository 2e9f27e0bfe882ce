"""Small losses whose activations need several times the bytes of their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import checkmate.jax as cj


def mlp_loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def mlp(layers: int = 6, width: int = 16, batch: int = 512) -> tuple[list[jax.Array], jax.Array]:
    """Weights and a batch."""
    draw = np.random.default_rng(0)
    weights = [jnp.asarray(draw.normal(size=(width, width)) / width**0.5, jnp.float32) for _ in range(layers)]
    return weights, jnp.asarray(draw.normal(size=(batch, width)), jnp.float32)


def _normalised(x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A transformer block with one head."""
    q, k, v = jnp.split(_normalised(x) @ p["qkv"], 3, -1)
    x = x + jax.nn.softmax(q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5, -1) @ v
    return x + jax.nn.gelu(_normalised(x) @ p["up"]) @ p["down"]


def transformer_loss(params: dict[str, Any], tokens: jax.Array, block: Callable[..., jax.Array] = block) -> jax.Array:
    x = params["embedding"][tokens]
    for p in params["blocks"]:
        x = block(p, x)
    logits = jax.nn.log_softmax(x @ params["embedding"].T)
    return -jnp.take_along_axis(logits, jnp.roll(tokens, -1, 1)[..., None], -1).mean()


def transformer(layers: int = 1, width: int = 16, length: int = 64, batch: int = 4) -> tuple[dict[str, Any], jax.Array]:
    """Parameters and a batch of tokens."""
    draw = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> jax.Array:
        return jnp.asarray(draw.normal(size=(rows, columns)) / rows**0.5, jnp.float32)

    blocks = [
        {"qkv": matrix(width, 3 * width), "up": matrix(width, 4 * width), "down": matrix(4 * width, width)} for _ in range(layers)
    ]
    return {"embedding": matrix(32, width), "blocks": blocks}, jnp.asarray(draw.integers(0, 32, (batch, length)))


def difference(a: Any, b: Any) -> float:
    """Largest difference of two nests of arrays, relative to the largest entry of each array."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(u) - np.asarray(v)).max() / (np.abs(np.asarray(u)).max() + 1e-30)) for u, v in pairs)


def identical(a: Any, b: Any) -> bool:
    """Whether two nests of arrays are bitwise equal."""
    return all(np.array_equal(u, v) for u, v in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def value_and_grad(function):
    """A loss with its gradients under `jax.jit`, with the options with which XLA respects `jax.checkpoint`."""
    return jax.jit(jax.value_and_grad(function), compiler_options=cj.compiler_options())
