"""Exact plans have the same bits in a plain `jax.jit` as the exact function that keeps everything, under every transformation.

Second derivatives are right, and not exact: `test_remat.py` has them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import checkmate.jax as cj
from checkmate.core.budget import fixed_bytes
from tests.jax.networks import identical, mlp, mlp_loss, transformer, transformer_loss

exact = functools.partial(cj.remat, exact=True, costs="estimated", time_limit_s=2, verify=False)
BUDGET = "60%"


@functools.cache
def network():
    return mlp(layers=4)


def both(loss, transform, *arguments, budget=BUDGET):
    """Results of the transformed loss, keeping everything and by a plan that computes something again."""
    planned = exact(loss, budget=budget)
    kept, given = (jax.jit(transform(function))(*arguments) for function in (exact(loss), planned))
    assert planned.result.overhead > 1
    return kept, given


def test_a_transformer():
    """Softmax, normalisation and products of matrices: what XLA fuses otherwise in every plan."""
    params, tokens = transformer()
    kept, given = both(transformer_loss, jax.value_and_grad, params, tokens)
    assert identical(kept, given)


def test_what_the_plan_delays_is_not_held():
    """The derivative of each tanh is computed in the backward: computed in the forward, it would be held beside the tanh."""
    weights, x = mlp(layers=8, width=32, batch=1024)
    planned = exact(mlp_loss, budget="90%")
    memory = jax.jit(jax.value_and_grad(planned)).lower(weights, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 1.03 * (planned.result.peak_bytes - fixed_bytes(planned.graph))


def test_vmap():
    """Examples are mapped over the planned computation."""
    weights, x = network()
    kept, given = both(mlp_loss, lambda f: jax.vmap(jax.value_and_grad(f), (None, 0)), weights, x.reshape(2, -1, x.shape[1]))
    assert identical(kept, given)


def test_shard_map():
    """Two devices, each with its part of the batch."""
    weights, x = network()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    split, whole = PartitionSpec("data"), PartitionSpec()

    def averaged(f):
        def on_device(weights, x):
            return jax.lax.pmean(jax.value_and_grad(f)(weights, x), "data")

        return jax.shard_map(on_device, mesh=mesh, in_specs=(whole, split), out_specs=whole)

    kept, given = both(mlp_loss, averaged, weights, x)
    assert identical(kept, given)


def test_dropout():
    """Typed keys are values: a mask that is drawn again is the same mask."""
    weights, x = network()

    def dropout(weights, x, key):
        for i, w in enumerate(weights):
            x = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, x.shape), jnp.tanh(x @ w), 0)
        return (x**2).sum()

    kept, given = both(dropout, jax.value_and_grad, weights, x, jax.random.key(1))
    assert identical(kept, given)


def test_mixed_precision():
    """Parameters in float32, computation in bfloat16."""
    weights, x = network()

    def mixed(weights, x):
        return mlp_loss([w.astype(jnp.bfloat16) for w in weights], x.astype(jnp.bfloat16)).astype(jnp.float32)

    kept, given = both(mixed, jax.value_and_grad, weights, x)
    assert identical(kept, given)


def test_custom_derivatives_inside():
    """A rule of the user's, whose residuals are planned too."""

    @jax.custom_vjp
    def halved(x):
        return jnp.tanh(x)

    halved.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (0.5 * g * jnp.cos(x),))
    weights, x = network()

    def function(weights, x):
        for w in weights:
            x = halved(x @ w)
        return (x**2).mean()

    kept, given = both(function, jax.value_and_grad, weights, x)
    assert identical(kept, given)


def test_whole_steps_with_donated_buffers():
    """Three updates by Optax, with weights and optimizer state donated."""
    weights, x = network()
    optimizer = optax.adamw(1e-2)

    def step(weights, state, x):
        loss, gradients = jax.value_and_grad(mlp_loss)(weights, x)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    found = []
    for budget in (None, BUDGET):
        options = {"budget": budget, "exact": True, "costs": "estimated", "time_limit_s": 2, "verify": False}
        planned = cj.plan(step, weights, optimizer.init(weights), x, donate_argnums=(0, 1), **options)
        run = jax.jit(planned, donate_argnums=(0, 1))
        state = jax.tree.map(jnp.copy, (weights, optimizer.init(weights)))
        for _ in range(3):
            *state, loss = run(*state, x)
        found.append((state, loss))
    assert planned.result.overhead > 1
    assert identical(*found)


def test_booleans_are_no_variables():
    """JAX refuses to differentiate by them; beside others they are constants."""
    weights, x = network()
    chosen = np.resize(np.array([True, False]), x.shape)

    def function(weights, chosen):
        return mlp_loss(weights, x * chosen)

    kept, given = both(function, jax.value_and_grad, weights, chosen)
    assert identical(kept, given)
    with pytest.raises(TypeError, match="real- or complex-valued"):
        jax.grad(exact(function, budget=BUDGET), argnums=1)(weights, chosen)
