"""Networks in Flax NNX for `jax_peaks.py`: each is a loss of a nest of arrays and a batch, whose blocks can be wrapped."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Wraps a block: ``block(module, x) -> x``."""


@dataclass(frozen=True, slots=True)
class Network:
    """A loss with its arguments."""

    loss: Callable[..., jax.Array]  # of parameters and a batch, with `wrap` and `run` for its blocks
    arguments: tuple[Any, ...]


Run = Callable[[Wrap, Callable[..., Any], Sequence[Any], Any], Any]
"""Runs blocks one after the other."""


def in_turn(wrap: Wrap, block: Callable[..., Any], modules: Sequence[Any], x: Any) -> Any:
    """Run blocks one after the other, each wrapped."""
    for module in modules:
        x = wrap(block)(module, x)
    return x


def in_groups(wrap: Wrap, block: Callable[..., Any], modules: Sequence[Any], x: Any) -> Any:
    """Run blocks one after the other, each and about their square root together under a checkpoint."""
    nothing = jax.checkpoint_policies.nothing_saveable
    size = round(math.sqrt(len(modules)))

    def together(some: Sequence[Any], x: Any) -> Any:
        return in_turn(lambda block: checkpoint(block, nothing), block, some, x)

    for start in range(0, len(modules), size):
        x = checkpoint(together, nothing)(list(modules[start : start + size]), x)
    return x


def _group_norm(channels: int, rngs: nnx.Rngs) -> nnx.GroupNorm:
    return nnx.GroupNorm(channels, num_groups=4, rngs=rngs)


def _conv(inputs: int, outputs: int, rngs: nnx.Rngs, size: int = 3, stride: int = 1) -> nnx.Conv:
    return nnx.Conv(inputs, outputs, (size, size), strides=stride, padding="SAME", rngs=rngs)


def network(parts: dict[str, Any], forward: Callable[..., jax.Array], *batch: Any) -> Network:
    """A loss of the arrays of some modules and a batch."""
    definition, state = nnx.split(parts)

    def loss(state: Any, *batch: Any, wrap: Wrap = lambda block: block, run: Run = in_turn) -> jax.Array:
        return forward(nnx.merge(definition, state), *batch, functools.partial(run, wrap))

    return Network(loss, (state, *batch))


def checkpoint(block: Callable[..., Any], policy: Any) -> Callable[..., Any]:
    """The checkpoint of Flax around a block."""
    return nnx.remat(block, policy=policy)


NAMES = {"q": "query_proj", "k": "key_proj", "v": "value_proj"}


def attention(p: Any, x: jax.Array, heads: int, *, causal: bool, rotary: bool = False) -> jax.Array:
    """Attention of several heads; fewer heads of keys and values if their projection is narrower."""

    def split(name: str) -> jax.Array:
        projected = checkpoint_name(p[name](x), NAMES[name])
        return projected.reshape(*x.shape[:2], -1, x.shape[2] // heads).swapaxes(1, 2)

    q, k, v = split("q"), split("k"), split("v")
    if rotary:
        q, k = _rotated(q), _rotated(k)
    k, v = (jnp.repeat(a, q.shape[1] // a.shape[1], 1) for a in (k, v))
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    mixed = checkpoint_name(jax.nn.softmax(scores) @ v, "context")
    return checkpoint_name(p["o"](mixed.swapaxes(1, 2).reshape(x.shape)), "out_proj")


def _rotated(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[-2])[:, None] / 1e4 ** (jnp.arange(half) / half)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1)


def _layer(rngs: nnx.Rngs, width: int) -> dict[str, Any]:
    linear = functools.partial(nnx.Linear, rngs=rngs)
    projections = {name: linear(width, width) for name in "qkvo"}
    norms = {name: nnx.LayerNorm(width, rngs=rngs) for name in ("first", "second")}
    return {**projections, **norms, "up": linear(width, 4 * width), "down": linear(4 * width, width)}


def _pre_norm(heads: int, causal: bool, p: Any, x: jax.Array) -> jax.Array:
    x = x + attention(p, p["first"](x), heads, causal=causal)
    return x + p["down"](jax.nn.gelu(p["up"](p["second"](x))))


def _tokens(batch: int, length: int, count: int) -> tuple[jax.Array, jax.Array]:
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, count, (batch, length + 1))
    return jnp.asarray(tokens[:, :-1], jnp.int32), jnp.asarray(tokens[:, 1:], jnp.int32)


def _images(batch: int, size: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(batch, size, size, 3)), jnp.float32)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def transformer(layers: int = 12, width: int = 32, length: int = 64, batch: int = 4) -> Network:
    """GPT-shaped: causal attention, norms before."""
    rngs = nnx.Rngs(0)
    parts = {
        "embedding": nnx.Embed(64, width, rngs=rngs),
        "layers": [_layer(rngs, width) for _ in range(layers)],
        "norm": nnx.LayerNorm(width, rngs=rngs),
        "head": nnx.Linear(width, 64, use_bias=False, rngs=rngs),
    }

    def forward(p: Any, tokens: jax.Array, labels: jax.Array, run: Any) -> jax.Array:
        x = run(functools.partial(_pre_norm, 4, True), p["layers"], p["embedding"](tokens))
        return _cross_entropy(p["head"](p["norm"](x)), labels)

    return network(parts, forward, *_tokens(batch, length, 64))


def _llama_layer(rngs: nnx.Rngs, width: int) -> dict[str, Any]:
    linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
    narrow = {name: linear(width, width // 2) for name in "kv"}
    norms = {name: nnx.RMSNorm(width, rngs=rngs) for name in ("first", "second")}
    mlp = {"gate": linear(width, 3 * width), "up": linear(width, 3 * width)}
    return {**narrow, **{name: linear(width, width) for name in "qo"}, **norms, **mlp, "down": linear(3 * width, width)}


def _llama(p: Any, x: jax.Array) -> jax.Array:
    """A block whose values have the names that MaxText gives them."""
    x = x + attention(p, p["first"](x), 4, causal=True, rotary=True)
    y = p["second"](x)
    gate, up = checkpoint_name(p["gate"](y), "mlpwi_0"), checkpoint_name(p["up"](y), "mlpwi_1")
    return x + checkpoint_name(p["down"](jax.nn.silu(gate) * up), "mlpwo")


def llama(layers: int = 4, width: int = 32, length: int = 64, batch: int = 4) -> Network:
    """Llama-shaped: RMS norms, rotary positions, two heads of keys and values for four of queries, SwiGLU."""
    rngs = nnx.Rngs(0)
    parts = {
        "embedding": nnx.Embed(64, width, rngs=rngs),
        "layers": [_llama_layer(rngs, width) for _ in range(layers)],
        "norm": nnx.RMSNorm(width, rngs=rngs),
        "head": nnx.Linear(width, 64, use_bias=False, rngs=rngs),
    }

    def forward(p: Any, tokens: jax.Array, labels: jax.Array, run: Any) -> jax.Array:
        x = run(_llama, p["layers"], p["embedding"](tokens))
        return _cross_entropy(p["head"](p["norm"](x)), labels)

    return network(parts, forward, *_tokens(batch, length, 64))


def _conv_block(rngs: nnx.Rngs, inputs: int, outputs: int) -> dict[str, Any]:
    block = {
        "conv1": _conv(inputs, outputs, rngs),
        "norm1": _group_norm(outputs, rngs),
        "conv2": _conv(outputs, outputs, rngs),
        "norm2": _group_norm(outputs, rngs),
    }
    return block if inputs == outputs else block | {"skip": _conv(inputs, outputs, rngs, 1)}


def _double(p: Any, x: jax.Array) -> jax.Array:
    x = jax.nn.relu(p["norm1"](p["conv1"](x)))
    return jax.nn.relu(p["norm2"](p["conv2"](x)))


def unet(width: int = 8, size: int = 32, batch: int = 4) -> Network:
    """U-Net-shaped: three levels, halved by strides and doubled by repetition, with skips."""
    rngs = nnx.Rngs(0)
    widths = [width, 2 * width, 4 * width]
    parts = {
        "down": [_conv_block(rngs, a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True)],
        "halve": [_conv(w, w, rngs, 3, 2) for w in widths[:-1]],
        "up": [_conv_block(rngs, a + b, a) for a, b in zip(widths[1::-1], widths[:0:-1], strict=True)],
        "head": _conv(width, 2, rngs, 1),
    }

    def doubled(x: jax.Array) -> jax.Array:
        for axis in (1, 2):
            x = jnp.repeat(x, 2, axis)
        return x

    def forward(p: Any, images: jax.Array, labels: jax.Array, run: Any) -> jax.Array:
        block = _double
        skips = [run(block, p["down"][:1], images)]
        for halve, down in zip(p["halve"], p["down"][1:], strict=True):
            skips.append(run(block, [down], halve(skips[-1])))
        x = skips.pop()
        for up in p["up"]:
            x = run(block, [up], jnp.concatenate([skips.pop(), doubled(x)], -1))
        return _cross_entropy(p["head"](x), labels)

    labels = jnp.asarray(np.random.default_rng(1).integers(0, 2, (batch, size, size)))
    return network(parts, forward, _images(batch, size), labels)


NETWORKS: dict[str, Callable[[], Network]] = {
    "transformer": transformer,
    "unet": unet,
    "llama": llama,
}

LENGTH = 32


def scanned_layer(width: int = 32, length: int = 64, batch: int = 16) -> tuple[Callable[..., Any], Any, Any]:
    """The body of a loop over layers, its carry, and the parameters of 32 layers, stacked."""
    draw = np.random.default_rng(0)
    carry = jnp.asarray(draw.normal(size=(batch, length, width)), jnp.float32)
    definition, parameters = nnx.split(_llama_layer(nnx.Rngs(0), width))

    def layer(x: jax.Array, parameters: Any) -> tuple[jax.Array, None]:
        return _llama(nnx.merge(definition, parameters), x), None

    stacked = jax.tree.map(lambda a: jnp.asarray(draw.normal(size=(LENGTH, *a.shape)) / width, a.dtype), parameters)
    return layer, carry, stacked
