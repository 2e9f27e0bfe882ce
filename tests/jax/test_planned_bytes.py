"""Planned bytes are those of the compiled plan: what XLA stores, copies and holds is in the graph, or is not done."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkmate.jax as cj
from tests.jax.networks import difference


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / shape[0] ** 0.5, jnp.float32)


def heads():
    """A head with many weights, whose gradient is ready early: XLA computes it transposed, and fences would hold a copy."""

    def loss(p, x):
        for w in p["layers"]:
            x = jnp.tanh(x @ w)
        return ((x.reshape(8, -1) @ p["head"]) ** 2).sum()

    return loss, ({"layers": [normal(64, 64, seed=i) for i in range(5)], "head": normal(16384, 32)}, normal(2048, 64))


def messages():
    """Messages summed by receiver: zeros to add to are constants, which XLA would make and copy when the program begins."""
    ends = np.random.default_rng(0).integers(0, 100, (2, 1200))

    def loss(layers, nodes):
        for p in layers:
            sent = jax.nn.relu(jnp.concatenate([nodes[ends[0]], nodes[ends[1]]], -1) @ p["e"])
            nodes = nodes + jax.nn.relu(jax.ops.segment_sum(sent, jnp.asarray(ends[1]), 100) @ p["n"])
        return (nodes**2).sum()

    return loss, ([{"e": normal(64, 64, seed=i), "n": normal(64, 32, seed=i)} for i in range(4)], normal(100, 32))


def batches():
    """A loop over batches: the workspace of an iteration is what XLA allocates."""

    def loss(p, xs):
        def batch(total, x):
            return total + (jax.nn.swish(jax.nn.swish(x @ p["a"]) @ p["b"]) ** 2).sum(), None

        return jax.lax.scan(batch, jnp.zeros(()), xs)[0]

    return loss, ({"a": normal(24, 64), "b": normal(64, 64)}, normal(4, 256, 24))


def experts():
    """A mixture of experts: XLA fuses and stores other values than rules for single primitives foresee."""

    def loss(layers, x):
        for p in layers:
            gates = jax.nn.softmax(x @ p["route"])
            best, chosen = jax.lax.top_k(gates, 2)
            weights = (jax.nn.one_hot(chosen, 4) * best[..., None]).sum(1)
            hidden = jax.nn.gelu(jnp.einsum("td,edh->teh", x, p["up"]))
            x = x + jnp.einsum("teh,ehd,te->td", hidden, p["down"], weights)
        return (x**2).mean()

    layers = [{"route": normal(32, 4), "up": normal(4, 32, 64), "down": normal(4, 64, 32)} for _ in range(2)]
    return loss, (layers, normal(256, 32))


@pytest.mark.parametrize(("build", "share"), [(heads, 0.7), (messages, 0.7), (batches, 0.8), (experts, 1.0)])
def test_plans_take_the_planned_bytes(build, share, own_cache):
    """A plan compiles to its planned bytes, before anything is corrected."""
    loss, arguments = build()
    plain = jax.jit(jax.value_and_grad(loss)).lower(*arguments).compile().memory_analysis()
    budget = plain.argument_size_in_bytes + plain.output_size_in_bytes + int(share * plain.temp_size_in_bytes)
    planned = cj.remat(loss, budget=budget, costs="estimated", time_limit_s=2)
    compiled = jax.jit(jax.value_and_grad(planned)).lower(*arguments).compile()
    taken = compiled.memory_analysis().temp_size_in_bytes
    assert (planned.result.overhead > 1) == (share < 1)
    assert abs(math.log((planned.result.peak_bytes - planned.graph.resident_bytes) / taken)) < 0.05


def test_what_the_backward_reads_in_another_layout_is_copied_when_it_is_read(own_cache):
    """XLA would copy the frames for the gradient of the weights as soon as they are known, and hold the copy."""

    def loss(p, frames):
        first = jax.nn.relu(jax.lax.conv(frames, p["a"], (4, 4), "SAME"))
        return (jax.nn.relu(jax.lax.conv(first, p["b"], (2, 2), "SAME")) ** 2).sum()

    arguments = {"a": normal(16, 4, 8, 8), "b": normal(32, 16, 4, 4)}, normal(16, 4, 64, 64)
    plain = jax.jit(jax.value_and_grad(loss)).lower(*arguments).compile()
    planned = cj.remat(loss, budget="80%", time_limit_s=2)
    compiled = jax.jit(jax.value_and_grad(planned)).lower(*arguments).compile()
    taken = compiled.memory_analysis().temp_size_in_bytes
    assert planned.result.overhead == 1
    assert taken <= 0.8 * plain.memory_analysis().temp_size_in_bytes
    assert difference(compiled(*arguments), plain(*arguments)) < 1e-6


def test_one_fence_follows_the_gradients_of_a_layer(own_cache):
    """Each fence forbids fusions: one after each gradient of a weight and of a bias would be slower."""

    def loss(p, x):
        for q in p:
            x = jnp.tanh(x @ q["w"] + q["bias"])
        return (x**2).sum()

    layers = [{"w": normal(32, 32, seed=i), "bias": normal(32)} for i in range(8)]
    planned = cj.remat(loss, budget="60%", costs="estimated", time_limit_s=2)
    program = jax.jit(jax.value_and_grad(planned)).lower(layers, normal(512, 32)).as_text()
    again = len(planned.plan.order) - len(planned.graph.ops)
    assert 0 < program.count("call @optimization_barrier") < again + len(layers) / 2
