"""Losses in the shape of public JAX programs of science and control, as `jax_models.py` has networks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax_registry import matrices, normal, program


@program("patrick-kidger/diffrax examples/neural_ode")
def neural_ode() -> Any:
    """Runge-Kutta steps in a `scan` around a network."""
    p = matrices(0, a=(16, 64), b=(64, 64), c=(64, 16))

    def loss(p: Any, start: jax.Array, wanted: jax.Array) -> jax.Array:
        def slope(y: jax.Array) -> jax.Array:
            return jax.nn.softplus(jax.nn.softplus(y @ p["a"]) @ p["b"]) @ p["c"]

        def step(y: jax.Array, _: Any) -> Any:
            a = slope(y)
            b = slope(y + 0.05 * a)
            c = slope(y + 0.05 * b)
            y = y + 0.1 / 6 * (a + 2 * b + 2 * c + slope(y + 0.1 * c))
            return y, y

        return ((jax.lax.scan(step, start, None, length=20)[1] - wanted) ** 2).mean()

    return loss, (p, normal(64, 16), normal(20, 64, 16))


@program("jax-md/jax-md examples/neural_networks")
def jax_md() -> Any:
    """Energies of pairs of particles and forces, so a derivative in the loss."""
    p = matrices(0, a=(8, 32), b=(32, 1))

    def energy(p: Any, places: jax.Array) -> jax.Array:
        distances = jnp.sqrt(((places[:, None] - places[None]) ** 2).sum(-1) + 1e-2)
        features = jnp.exp(-((distances[..., None] - jnp.arange(8) / 2) ** 2))
        return (jnp.tanh(features @ p["a"]) @ p["b"]).sum()

    def loss(p: Any, places: jax.Array, forces: jax.Array) -> jax.Array:
        return ((jax.vmap(jax.grad(energy, 1), (None, 0))(p, places) + forces) ** 2).mean()

    return loss, (p, normal(4, 48, 3), normal(4, 48, 3))


@program("google-deepmind/distrax, dm-haiku examples (mixture of experts)")
def experts() -> Any:
    """Top-2 routing with a capacity by one-hot products, as in Switch and Mixtral ports."""
    layers = [matrices(10 * i, route=(64, 4), up=(4, 64, 128), down=(4, 128, 64)) for i in range(3)]

    def loss(layers: Any, x: jax.Array, wanted: jax.Array) -> jax.Array:
        for p in layers:
            gates = jax.nn.softmax(x @ p["route"])
            best, chosen = jax.lax.top_k(gates, 2)
            weights = (jax.nn.one_hot(chosen, 4) * (best / best.sum(-1, keepdims=True))[..., None]).sum(1)
            hidden = jax.nn.gelu(jnp.einsum("td,edh->teh", x, p["up"]))
            x = x + jnp.einsum("teh,ehd,te->td", hidden, p["down"], weights)
        return ((x - wanted) ** 2).mean()

    return loss, (layers, normal(512, 64), normal(512, 64, seed=3))


@program("google-research/google-research jaxnerf")
def nerf() -> Any:
    """Positional encodings, a skip, and volume rendering by cumulative products."""
    p = matrices(0, a=(60, 128), b=(128, 128), c=(188, 128), d=(128, 4))

    def loss(p: Any, origins: jax.Array, ways: jax.Array, pixels: jax.Array) -> jax.Array:
        depths = jnp.linspace(2.0, 6.0, 32)
        points = origins[:, None] + ways[:, None] * depths[:, None]
        waves = (points[..., None] * 2.0 ** jnp.arange(10)).reshape(*points.shape[:2], -1)
        encoded = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1)
        x = jax.nn.relu(jax.nn.relu(encoded @ p["a"]) @ p["b"])
        raw = jax.nn.relu(jnp.concatenate([x, encoded], -1) @ p["c"]) @ p["d"]
        alpha = 1 - jnp.exp(-jax.nn.relu(raw[..., 3]) * (depths[1] - depths[0]))
        weights = alpha * jnp.cumprod(1 - alpha + 1e-10, -1)
        return ((jax.nn.sigmoid(raw[..., :3]) * weights[..., None]).sum(1) - pixels).__pow__(2).mean()

    return loss, (p, normal(128, 3), normal(128, 3, seed=2), jax.nn.sigmoid(normal(128, 3, seed=3)))


def _joined(left: Any, right: Any) -> Any:
    return left[0] * right[0], left[1] * right[0] + right[1]


@program("state-spaces ports (S5, mamba-jax)")
def state_space() -> Any:
    """A linear recurrence by `associative_scan`, four layers."""
    layers = [matrices(10 * i, b=(32, 64), c=(64, 32), gate=(32, 32)) for i in range(4)]

    def loss(layers: Any, x: jax.Array, wanted: jax.Array) -> jax.Array:
        for p in layers:
            inputs = x @ p["b"]
            decay = jax.nn.sigmoid(inputs)
            _, states = jax.lax.associative_scan(_joined, (decay, inputs), axis=1)
            x = x + (states @ p["c"]) * jax.nn.silu(x @ p["gate"])
        return ((x - wanted) ** 2).mean()

    return loss, (layers, normal(4, 128, 32), normal(4, 128, 32, seed=3))


@program("google/jax docs, ericjang/maml-jax")
def maml() -> Any:
    """An inner update of each task, so a derivative through a derivative."""
    p = matrices(0, a=(1, 64), b=(64, 64), c=(64, 1))

    def fit(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return ((jax.nn.relu(jax.nn.relu(x @ p["a"]) @ p["b"]) @ p["c"] - y) ** 2).mean()

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def task(x: jax.Array, y: jax.Array) -> jax.Array:
            gradient = jax.grad(fit)(p, x[:64], y[:64])
            return fit(jax.tree.map(lambda w, g: w - 0.1 * g, p, gradient), x[64:], y[64:])

        return jax.vmap(task)(x, y).mean()

    return loss, (p, normal(16, 128, 1), jnp.sin(normal(16, 128, 1)))


@program("google/brax training/agents/ppo")
def brax() -> Any:
    """Minibatches in a `scan`: advantages by a reversed loop, then losses summed."""
    p = matrices(0, a=(24, 128), b=(128, 128), policy=(128, 8), value=(128, 1))

    def loss(p: Any, seen: jax.Array, actions: jax.Array, rewards: jax.Array) -> jax.Array:
        def minibatch(total: jax.Array, batch: Any) -> Any:
            seen, actions, rewards = batch
            hidden = jax.nn.swish(jax.nn.swish(seen @ p["a"]) @ p["b"])
            values = (hidden @ p["value"])[..., 0]

            def back(gain: jax.Array, pair: Any) -> Any:
                gain = pair[0] - pair[1] + 0.95 * gain
                return gain, gain

            _, gains = jax.lax.scan(back, jnp.zeros(values.shape[1]), (rewards, values), reverse=True)
            chance = -((hidden @ p["policy"] - actions) ** 2).sum(-1)
            return total - (chance * jax.lax.stop_gradient(gains)).mean() + 0.5 * (gains**2).mean(), None

        return jax.lax.scan(minibatch, jnp.zeros(()), (seen, actions, rewards))[0]

    return loss, (p, normal(4, 20, 32, 24), normal(4, 20, 32, 8), normal(4, 20, 32))
