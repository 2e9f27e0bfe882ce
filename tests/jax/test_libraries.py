"""Losses as the documents of Flax NNX, Equinox and Haliax write them, with Optax: training is that without a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import checkmate
import checkmate.jax as cj
from tests.jax.networks import difference

remat = functools.partial(cj.remat, budget="70%", costs="estimated", time_limit_s=2, verify=False)
X, Y = jax.random.normal(jax.random.key(0), (256, 8)), jnp.arange(256) % 4


def train_nnx(wrap: Callable[[Any], Any]) -> tuple[list[float], Any]:
    """Losses of three steps, and the state afterwards: parameters, BatchNorm's statistics, counts of random draws."""
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.last = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
            self.norm, self.dropout = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            return self.last(self.dropout(jnp.tanh(self.norm(self.first(x)))))

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def loss_fn(model, x, y):
        logits = model(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

    planned = wrap(loss_fn)

    @nnx.jit
    def train_step(model, optimizer, x, y):
        (loss, _), gradients = nnx.value_and_grad(planned, has_aux=True)(model, x, y)
        optimizer.update(model, gradients)
        return loss

    losses = [float(train_step(model, optimizer, X, Y)) for _ in range(3)]
    state = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey)))
    return losses, state


def train_modules(model: Any, loss_fn: Callable[..., Any], x: Any, y: Any) -> tuple[list[float], Any]:
    """Losses of three steps of Equinox modules, and the parameters afterwards."""
    eqx, optimizer = pytest.importorskip("equinox"), optax.adam(1e-2)

    @eqx.filter_jit
    def make_step(model, state, x, y):
        loss, gradients = eqx.filter_value_and_grad(loss_fn)(model, x, y)
        updates, state = optimizer.update(gradients, state)
        return eqx.apply_updates(model, updates), state, loss

    state, losses = optimizer.init(eqx.filter(model, eqx.is_array)), []
    for _ in range(3):
        model, state, loss = make_step(model, state, x, y)
        losses.append(float(loss))
    return losses, eqx.filter(model, eqx.is_array)


def train_equinox(wrap: Callable[[Any], Any]) -> tuple[list[float], Any]:
    """Losses of three steps, and the parameters afterwards."""
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(8, 4, 16, 3, activation=jax.nn.gelu, key=jax.random.key(0))

    def loss_fn(model, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()

    return train_modules(model, wrap(loss_fn), X, Y)


def train_haliax(wrap: Callable[[Any], Any]) -> tuple[list[float], Any]:
    """Losses of three steps of layers in a scan, with named axes, and the parameters afterwards."""
    eqx, hax = pytest.importorskip("equinox"), pytest.importorskip("haliax")
    batch, inputs, hidden, classes, depth = hax.make_axes(batch=256, inputs=8, hidden=16, classes=4, depth=3)

    class Layer(eqx.Module):
        linear: hax.nn.Linear

        @staticmethod
        def init(*, key):
            return Layer(hax.nn.Linear.init(hidden, hidden.alias("made"), key=key))

        def __call__(self, x):
            return x + hax.tanh(self.linear(x)).rename({"made": "hidden"})

    class Net(eqx.Module):
        first: hax.nn.Linear
        layers: hax.nn.Stacked
        last: hax.nn.Linear

        def __call__(self, x):
            return self.last(self.layers.fold(hax.tanh(self.first(x))))

    first, middle, last = jax.random.split(jax.random.key(0), 3)
    layers = hax.nn.Stacked.init(depth, Layer, gradient_checkpointing=False)(key=jax.random.split(middle, depth.size))
    model = Net(hax.nn.Linear.init(inputs, hidden, key=first), layers, hax.nn.Linear.init(hidden, classes, key=last))

    def loss_fn(model, x, y):
        return hax.nn.cross_entropy_loss(model(x), classes, hax.nn.one_hot(y, classes), reduction=hax.mean).scalar()

    return train_modules(model, wrap(loss_fn), hax.named(X, (batch, inputs)), hax.named(Y, (batch,)))


# The layers of Haliax are one op, a loop, which leaves less to compute again.
@pytest.mark.parametrize(
    ("train", "budget"),
    [
        (train_nnx, "70%"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((train_equinox, "70%"), (train_haliax, "95%"))),
    ],
)
def test_training_is_the_same(train, budget):
    """Also where the loss changes its model in place, as BatchNorm and Dropout of NNX do."""
    planned = []

    def wrap(loss):
        planned.append(remat(loss, budget=budget))
        return planned[0]

    expected, given = train(lambda loss: loss), train(wrap)
    assert given[0] == pytest.approx(expected[0], rel=1e-5)
    # A bias before a BatchNorm has no gradient but what rounding leaves, which is another on each processor.
    pairs = zip(jax.tree.leaves(expected[1]), jax.tree.leaves(given[1]), strict=True)
    assert all(np.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in pairs)
    assert planned[0].graph.ops


def test_a_whole_step_that_changes_modules_is_refused():
    """Its changes would be lost."""
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(checkmate.GraphError, match="changes in place"):
        cj.plan(lambda model, x: model(x), model, jnp.ones((1, 2)))


def test_states_of_modules_are_data():
    """As `nnx.split` returns them: what the refusal of modules recommends, in whole steps and in losses."""
    nnx = pytest.importorskip("flax.nnx")
    definition, state = nnx.split(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))

    def loss_fn(state, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(nnx.merge(definition, state)(x), y).mean()

    step = jax.value_and_grad(loss_fn)
    expected = jax.jit(step)(state, X, Y)
    planned = cj.plan(step, state, X, Y, budget="100%", costs="estimated", verify=False)
    loss = remat(loss_fn, budget="100%")
    assert difference(expected, jax.jit(planned)(state, X, Y)) < 1e-5
    assert difference(expected, jax.jit(jax.value_and_grad(loss))(state, X, Y)) < 1e-5
    assert loss.graph.resident_bytes == planned.graph.resident_bytes


def test_variables_that_are_not_changed_are_no_results():
    """Each result has a cotangent and a buffer; parameters that only are read need neither."""
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    loss = remat(lambda model, x: (model(x) ** 2).mean(), budget="100%")
    jax.eval_shape(nnx.value_and_grad(loss), model, X)
    boundary = loss.graph.ops[loss.graph.boundary]
    assert (len(boundary.inputs), len(boundary.outputs)) == (1, 1)
