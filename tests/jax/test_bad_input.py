"""What does not belong to a plan is refused by an error that says what it is: Checkmate's own, or that of JAX."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

import checkmate
import checkmate.jax as cj
from tests.jax.networks import difference, mlp, mlp_loss

OPTIONS = {"costs": "estimated", "time_limit_s": 1, "verify": False}
remat = functools.partial(cj.remat, budget="80%", **OPTIONS)


def step(weights, x):
    value, gradients = jax.value_and_grad(mlp_loss)(weights, x)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value


@pytest.fixture(scope="module")
def planned():
    return cj.plan(step, *mlp(layers=3), budget="100%", **OPTIONS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: jax.enable_x64(True), "jax_enable_x64 is True, and was False while the step was planned"),
        (lambda: jax.default_matmul_precision("highest"), "jax_default_matmul_precision is 'highest'"),
        (lambda: jax.threefry_partitionable(False), "jax_threefry_partitionable is False"),
        (lambda: jax.set_mesh(jax.make_mesh((2,), ("data",))), "the mesh is AbstractMesh('data': 2"),
    ],
)
def test_a_step_is_refused_under_settings_that_it_was_not_planned_with(planned, change, said):
    """They decide what a step computes, and the plan would compute what it was planned for."""
    arguments = mlp(layers=3)
    with change(), pytest.raises(checkmate.OptionError) as refused:
        jax.eval_shape(planned, *arguments)
    assert said in str(refused.value)
    assert "plan it again" in refused.value.hint
    assert difference(planned(*arguments), step(*arguments)) < 1e-5


def test_a_step_for_an_explicit_mesh_is_refused_under_another():
    """The mesh is part of the types of its values."""
    one, two = (jax.make_mesh((count,), ("data",), devices=jax.devices()[:count]) for count in (1, 2))
    with jax.set_mesh(two):
        planned = cj.plan(step, *mlp(layers=3), budget="100%", **OPTIONS)
    for mesh in (one, None):
        with pytest.raises(checkmate.OptionError, match="mesh"), jax.set_mesh(mesh) if mesh else jax.enable_x64(False):
            planned(*mlp(layers=3))


def checked_loss(weights, x):
    checkify.check(x.sum() < 1e9, "the batch is too large")
    return mlp_loss(weights, x)


def test_checks_are_results_of_a_planned_function():
    """A check is an effect until `checkify` makes it a result; the values pass, with what they were checked for."""
    weights, x = mlp(layers=4)
    with pytest.raises(checkmate.GraphError, match="has checks") as refused:
        checkify.checkify(jax.grad(remat(checked_loss)))(weights, x)
    assert "remat(checkify.checkify(loss))" in refused.value.hint
    assert checkify.checkify(remat(checked_loss))(weights, x)[0].get() is None  # nothing is planned without a derivative
    inside = remat(checkify.checkify(checked_loss))

    def swapped(weights, x):
        error, value = inside(weights, x)
        return value, error

    for scale, failed in ((1, False), (1e9, True)):
        gradients, error = jax.grad(swapped, has_aux=True)(weights, abs(scale * x))
        assert ("too large" in (error.get() or "")) == failed
        assert difference(gradients, jax.grad(mlp_loss)(weights, abs(scale * x))) < 1e-5
    error, gradients = checkify.checkify(jax.grad(remat(mlp_loss)), errors=checkify.all_checks)(weights, x)
    assert error.get() is None
    assert difference(gradients, jax.grad(mlp_loss)(weights, x)) < 1e-5


def test_donated_buffers_are_not_used_twice(planned):
    """JAX itself refuses: after the call, and within it."""
    donating = jax.jit(cj.plan(step, *mlp(layers=3), budget="100%", donate_argnums=0, **OPTIONS), donate_argnums=0)
    weights, x = mlp(layers=3)
    weights = [jnp.array(w) for w in weights]
    donating(weights, x)
    for again in (donating, planned):
        with pytest.raises((RuntimeError, ValueError), match="deleted"):
            again(weights, x)
    with pytest.raises(Exception, match="donate the same buffer twice"):
        donating([jnp.array(mlp()[0][0])] * 3, x)


def test_arrays_of_another_device():
    """Under `jax.jit` they are constants, as without a plan; op by op JAX names the devices."""
    weights, x = mlp(layers=4)
    far = jax.device_put(x, jax.devices()[1])
    weights = jax.device_put(weights, jax.devices()[0])
    gradient = jax.grad(remat(lambda weights: mlp_loss(weights, far)))
    assert difference(jax.jit(gradient)(weights), jax.grad(mlp_loss)(weights, x)) < 1e-5
    with pytest.raises(ValueError, match=r"device ids \[1\].*device ids \[0\]"):
        gradient(weights)


def test_tracers_and_shapes_where_arrays_are_asked_for(planned):
    """A step is planned outside of transformations, and called with arrays."""
    weights, x = mlp(layers=3)
    with pytest.raises(checkmate.GraphError, match="inside a transformation"):
        jax.jit(lambda x: cj.plan(step, weights, x, budget="100%", **OPTIONS)(weights, x))(x)
    with pytest.raises(checkmate.GraphError, match="inside a transformation"):
        jax.jit(lambda x: cj.policy(lambda c, w: (c @ w, None), x, weights[0], length=2, budget="1MiB"))(x)
    for function in (planned, jax.grad(remat(mlp_loss))):
        with pytest.raises(TypeError, match="ShapeDtypeStruct"):
            function(weights, jax.ShapeDtypeStruct(x.shape, x.dtype))
