"""The body of a loop is planned with the function around it: what the loop stacks for its derivative fits the budget."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

import checkmate
import checkmate.jax as cj
from checkmate.core.budget import fixed_bytes
from tests.jax.networks import difference, identical, transformer, transformer_loss

LAYERS = 6


def block(x, w):
    return x + jnp.tanh(jnp.tanh(x @ w["up"]) @ w["down"]), (x**2).mean()


def layers(width=16):
    keys = jax.random.split(jax.random.key(0), 3)
    up = jax.random.normal(keys[0], (LAYERS, width, 4 * width)) / 4
    return {"up": up, "down": jax.random.normal(keys[1], (LAYERS, 4 * width, width)) / 8}, jax.random.normal(
        keys[2], (512, width)
    )


def stacked(weights, x):
    """A model of stacked layers."""
    x, norms = jax.lax.scan(block, x, weights)
    return (x**2).mean() + norms.sum()


def backwards_with_dropout(weights, x):
    """Layers from the last to the first, with a key and a counter in the carry."""

    def body(carry, w):
        x, key, count = carry
        key, own = jax.random.split(key)
        x, norm = block(x * jax.random.bernoulli(own, 0.9, x.shape), w)
        return (x, key, count + 1), norm

    (x, _, count), norms = jax.lax.scan(body, (x, jax.random.key(1), 0), weights, reverse=True)
    return (x**2).mean() * count + norms.sum()


def recurrent(weights, x):
    """Two recurrent layers: the inputs of the second loop are what the first one returns."""

    def cell(w, state, x):
        gates = jax.nn.sigmoid(x @ w["up"][0] + state @ w["up"][1])
        state = jnp.tanh(gates @ w["down"][0]) + state
        return state, state

    xs = x.reshape(16, 32, -1)
    for _ in range(2):
        _, xs = jax.lax.scan(functools.partial(cell, weights), jnp.zeros((32, 16)), xs)
    return (xs**2).mean()


def unread(weights, x):
    """Runge-Kutta steps through `jax.nn.softplus`, whose derivative has values in its loop that nothing reads."""

    def slope(y):
        return jax.nn.softplus(jax.nn.softplus(y @ weights["up"][0]) @ weights["down"][0])

    def step(y, _):
        return y + 0.1 * slope(y + 0.05 * slope(y)), None

    return (jax.lax.scan(step, x, None, length=8)[0] ** 2).mean()


def temp_bytes(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("loss", [stacked, backwards_with_dropout, recurrent])
def test_loops_save_less_within_a_budget(loss):
    """Half of the bytes is kept, with the gradients of the loss, at less than the cost of a second forward."""
    weights, x = layers()
    planned = cj.remat(loss, budget="50%", costs="estimated", time_limit_s=2)
    taken = temp_bytes(jax.value_and_grad(planned), weights, x)
    assert fixed_bytes(planned.graph) + taken <= planned.budget_bytes
    assert taken < 0.6 * temp_bytes(jax.value_and_grad(loss), weights, x)
    assert 1 < planned.result.overhead < 1.34
    exact, given = (jax.jit(jax.value_and_grad(f))(weights, x) for f in (loss, planned))
    assert difference(exact, given) < 1e-5


def narrow(weights, x, wrap=lambda body: body):
    """Many layers whose carry is most of what they save."""
    many = jax.tree.map(lambda w: jnp.concatenate([w] * 4), weights)

    def body(x, w):
        return x + 0.1 * jnp.tanh(x @ w["up"][:, :16] @ w["down"][:16]), None

    return (jax.lax.scan(wrap(body), x, many)[0] ** 2).mean()


@pytest.mark.parametrize("exact", [False, True])
def test_loops_are_nested_within_smaller_budgets(exact):
    """Inner loops save only their first carries, and run again: fewer bytes than `jax.checkpoint` around each body needs."""
    weights, x = layers()
    of_bodies = jax.jit(jax.grad(functools.partial(narrow, wrap=jax.checkpoint)), compiler_options=cj.compiler_options())
    needed = of_bodies.lower(weights, x).compile().memory_analysis().temp_size_in_bytes
    whole, refused = (cj.remat(narrow, budget=budget, costs="estimated", time_limit_s=2, exact=exact) for budget in ("100%", 1))
    with pytest.raises(checkmate.InfeasibleBudgetError) as error:
        jax.eval_shape(jax.grad(refused), weights, x)
    planned = cj.remat(narrow, budget=error.value.smallest_bytes, costs="estimated", time_limit_s=2, exact=exact)
    taken = temp_bytes(jax.grad(planned), weights, x)
    assert taken < 0.9 * needed
    assert fixed_bytes(planned.graph) + taken <= planned.budget_bytes
    expected, given = (jax.jit(jax.grad(f))(weights, x) for f in (whole, planned))
    assert difference(expected, given) < 1e-5
    assert not exact or identical(expected, given)


@pytest.mark.parametrize(("loss", "arguments"), [(unread, layers), (transformer_loss, transformer)])
def test_the_graph_has_the_bytes_that_are_compiled(loss, arguments):
    """Ops are fused as XLA fuses them, and stacks that nothing reads are left out: what is planned is nearly what is compiled."""
    given = arguments()
    planned = cj.remat(loss, budget="100%", costs="estimated")
    jax.eval_shape(jax.grad(planned), *given)
    assert planned.result.peak_bytes - fixed_bytes(planned.graph) == pytest.approx(planned.temp_bytes, rel=0.15)


@pytest.mark.parametrize("averages", [False, True])
def test_loops_in_shard_map(averages):
    """Collectives in the body of a loop, or only around it."""

    def loss(weights, x):
        def body(x, w):
            x, norm = block(x, w)
            return (x - jax.lax.pmean(x.mean(), "data") if averages else x), norm

        x, norms = jax.lax.scan(body, x, weights)
        return (x**2).mean() + norms.sum()

    def program(loss):
        def on_device(weights, x):
            found = jax.value_and_grad(loss)(weights, x)
            return jax.tree.map(lambda a: jax.lax.pmean(a, "data"), found)

        mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
        specs = PartitionSpec(), PartitionSpec("data")
        return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())

    weights, x = layers()
    planned = cj.remat(loss, budget="70%", costs="estimated", time_limit_s=2)
    assert difference(jax.jit(program(loss))(weights, x), jax.jit(program(planned))(weights, x)) < 1e-5
    assert fixed_bytes(planned.graph) + planned.temp_bytes <= planned.budget_bytes


def test_a_planned_step_plans_its_loops():
    """The loops of a whole step, whose derivative the step itself takes, and a second call of the same plan."""
    weights, x = layers()

    def step(weights, x):
        value, gradients = jax.value_and_grad(stacked)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    planned = cj.plan(step, weights, x, budget="50%", costs="estimated", donate_argnums=0, time_limit_s=2)
    program = jax.jit(planned, donate_argnums=0).lower(weights, x).compile()
    assert fixed_bytes(planned.graph) + program.memory_analysis().temp_size_in_bytes <= planned.budget_bytes
    assert difference(jax.jit(step)(weights, x), jax.jit(planned)(weights, x)) < 1e-5


def test_a_plan_with_loops_is_read_again_and_its_bound_holds_for_all_loops(tmp_path):
    """The file of the plan says what the loops save. Keeping everything costs the bound: no choice of loops is cheaper."""
    weights, x = layers()
    planned, whole = (cj.remat(stacked, budget=share, costs="estimated", time_limit_s=2) for share in ("50%", "100%"))
    path = tmp_path / "step.plan.json"
    programs = [jax.make_jaxpr(jax.grad(loss))(weights, x) for loss in (planned, whole)]
    checkmate.write(planned.plan, path)
    again = cj.remat(stacked, plan=path, budget="50%", costs="estimated")
    programs.append(jax.make_jaxpr(jax.grad(again))(weights, x))
    assert [e.primitive for e in programs[0].eqns] == [e.primitive for e in programs[2].eqns]
    assert (again.plan, again.temp_bytes, again.result.overhead) == (planned.plan, planned.temp_bytes, planned.result.overhead)
    assert whole.result.gap == 0
    assert planned.result.bound == whole.result.cost < planned.result.cost
    with pytest.raises(checkmate.WrongGraphError, match="another graph"):
        jax.grad(cj.remat(recurrent, plan=path, costs="estimated"))(weights, x)


def test_a_loop_within_other_transformations():
    """Examples of `jax.vmap`, and another call of the same function, whose trace is a new one."""
    weights, x = layers()
    planned = cj.remat(stacked, budget="50%", costs="estimated", time_limit_s=2)
    batch = x.reshape(4, 128, -1)
    expected = jax.vmap(jax.grad(stacked), (None, 0))(weights, batch)
    for _ in range(2):
        assert difference(expected, jax.vmap(jax.grad(planned), (None, 0))(weights, batch)) < 1e-5


def test_a_loop_needs_no_more_than_a_checkpoint_around_its_body():
    """A mask that is broadcast to the shape of the scores is made in each iteration, not held through the loop."""
    weights, x = jnp.ones((LAYERS, 32, 32)) / 32, jnp.ones((8, 64, 32))

    def loss(wrap, weights, x):
        def attention(x, w):
            scores = jnp.einsum("bqd,bkd->bqk", x @ w, x)
            return x + jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((64, 64), bool)), scores, -1e9)) @ x, None

        return (jax.lax.scan(wrap(attention), x, weights)[0] ** 2).mean()

    theirs = jax.jit(jax.value_and_grad(functools.partial(loss, jax.checkpoint))).lower(weights, x)
    needed = theirs.compile().memory_analysis()
    total = needed.argument_size_in_bytes + needed.output_size_in_bytes + needed.temp_size_in_bytes
    planned = cj.remat(functools.partial(loss, lambda body: body), budget=total, costs="estimated")
    jax.eval_shape(jax.grad(planned), weights, x)
    assert planned.temp_bytes <= needed.temp_size_in_bytes
