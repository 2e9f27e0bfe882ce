"""Planned bytes are those of the compiled plan: what XLA stores, copies and holds is in the graph, or is not done."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkmate.jax as cj
from checkmate.core.budget import fixed_bytes
from checkmate.core.plan import Plan
from checkmate.cost.store import OpCost
from checkmate.jax.apply_plan import PlannedProgram
from checkmate.jax.calibrate import temp_bytes
from checkmate.jax.fusions import _read
from checkmate.jax.graph.capture import capture_trace
from checkmate.jax.graph.trace import as_called, trace_flat
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


def wide():
    """Weights larger than what is computed: the buffer of a gradient holds another value until the gradient is made."""

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x**2).sum()

    return loss, ([normal(128, 128, seed=i) for i in range(6)], normal(96, 128))


@pytest.mark.parametrize(("build", "share"), [(heads, 0.7), (messages, 0.7), (batches, 0.8), (experts, 1.0), (wide, 1.0)])
def test_plans_take_the_planned_bytes(build, share, own_cache):
    """A plan compiles to its planned bytes, before anything is corrected."""
    loss, arguments = build()
    plain = jax.jit(jax.value_and_grad(loss)).lower(*arguments).compile().memory_analysis()
    budget = plain.argument_size_in_bytes + plain.output_size_in_bytes + int(share * plain.temp_size_in_bytes)
    planned = cj.remat(loss, budget=budget, costs="estimated", time_limit_s=2)
    compiled = jax.jit(jax.value_and_grad(planned)).lower(*arguments).compile()
    taken = compiled.memory_analysis().temp_size_in_bytes
    assert (planned.result.overhead > 1) == (share < 1)
    assert abs(math.log((planned.result.peak_bytes - fixed_bytes(planned.graph)) / taken)) < 0.05


def test_what_is_joined_twice_is_joined_once():
    """XLA reads the parts of a part, and stores them until then."""
    trace = trace_flat(lambda a, b: jnp.concatenate([b, jnp.concatenate([a, b])]), jnp.ones(3), jnp.ones(4))
    assert [len(equation.inputs) for equation in trace.equations] == [3]
    given = dict(zip(trace.arguments, (jnp.ones(3), jnp.zeros(4)), strict=True))
    assert next(iter(trace.equations[0].computed(given).values())).tolist() == [0] * 4 + [1] * 3 + [0] * 4


def test_a_fusion_computes_no_view_again():
    """XLA names a view of an array after the equation of the array, also inside of fusions that only read it."""
    named = 'metadata={op_name="checkmate.equation.%d/tanh"}'
    lines = [
        "%fused (param: f32[8,4]) -> f32[4,8] {",
        f"  %view = f32[4,8] bitcast(%param), {named % 0}",
        f"  ROOT %product = f32[4,8] multiply(%view, %view), {named % 1}",
        "}",
        "ENTRY %main (x: f32[8,4]) -> f32[4,8] {",
        f"  %made = f32[8,4] tanh(%x), {named % 0}",
        f"  ROOT %twice = f32[4,8] fusion(%made), kind=kLoop, calls=%fused, {named % 1}",
        "}",
    ]
    assert _read("\n".join(lines), 128).members == {0: (0,), 1: (1,)}


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
    jax.jit(jax.value_and_grad(planned)).lower(layers, normal(512, 32))
    again = len(planned.plan.order) - len(planned.graph.ops)
    assert 0 < len(PlannedProgram(planned._planned.capture, planned.plan)._fences) < again + len(layers) / 2


def test_a_plan_without_recomputations_keeps_its_order():
    """XLA would compute what is delayed as early as it likes; here the first product is read last."""

    def function(x, w, v):
        return (x @ w) @ v, (x @ (w + 1)) @ v

    trace = trace_flat(function, normal(256, 64), normal(64, 4096), normal(4096, 8))
    capture = capture_trace(trace, lambda chains: [OpCost(1, 0)] * len(chains))
    kinds = [op.kind for op in capture.graph.ops]
    assert kinds == ["dot_general", "dot_general", "add", "dot_general", "dot_general"]
    program = PlannedProgram(capture, Plan.from_order(capture.graph, (0, 2, 3, 1, 4)))
    assert temp_bytes(*as_called(program, trace, None)) >= 2 * 256 * 4096 * 4
