"""A planned loss has the value and the gradients of the loss, under every transformation, and its derivative keeps the budget."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import checkmate
import checkmate.jax as cj
from checkmate.core.budget import fixed_bytes
from checkmate.core.errors import GraphError
from checkmate.cost.store import OpCost
from checkmate.jax import planned_function
from checkmate.jax._compat import is_of_a_plan
from checkmate.jax.profiler import estimate
from tests.jax.networks import difference, identical, mlp, mlp_loss, transformer, transformer_loss, value_and_grad

remat = functools.partial(cj.remat, costs="estimated", time_limit_s=2)
unverified = functools.partial(remat, verify=False)
ROUNDING = 1e-5


@functools.cache
def network():
    return mlp()


@pytest.mark.parametrize("budget", ["80%", *(pytest.param(f"{share}%", marks=pytest.mark.slow) for share in (95, 90, 85))])
@pytest.mark.parametrize("options", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "options"])
def test_compiled_bytes_keep_the_budget(budget, options):
    """The whole program that a user compiles, loss and gradients; its temporary values are nearly those of the plan."""
    params, tokens = transformer()
    loss = remat(transformer_loss, budget=budget)
    jitted = value_and_grad(loss) if options else jax.jit(jax.value_and_grad(loss))
    program = jitted.lower(params, tokens).compile()
    memory = program.memory_analysis()
    fixed = memory.argument_size_in_bytes + memory.output_size_in_bytes
    assert fixed == fixed_bytes(loss.graph)  # XLA's table of pointers to the results included
    assert fixed + memory.temp_size_in_bytes <= loss.budget_bytes
    assert fixed_bytes(loss.graph) + loss.temp_bytes <= loss.budget_bytes
    assert loss.result.peak_bytes - fixed_bytes(loss.graph) == pytest.approx(loss.temp_bytes, rel=0.25)
    assert loss.result.overhead < 1.3  # not the plan of the smallest peak
    assert difference(jax.jit(jax.value_and_grad(transformer_loss))(params, tokens), program(params, tokens)) < ROUNDING


def group_norm_loss(weights, x):
    """Each product of matrices is read in two shapes, as that before a group norm is."""
    for w in weights:
        y = x @ w + 1.0
        groups = y.reshape(len(y), 4, -1)
        x = jnp.sin((groups - groups.mean(-1, keepdims=True)).reshape(y.shape)) * y
    return x.sum()


@pytest.mark.parametrize("exact", [False, True])
def test_a_value_and_its_view_are_stored_once(exact):
    """A reshape shares the bytes of what it reads, also in the compiled program: a fence over both would store both."""
    weights, x = mlp(layers=8, width=64, batch=1024)
    planned = unverified(group_norm_loss, budget="50%", exact=exact, costs="estimated")
    compiled = jax.jit(jax.value_and_grad(planned)).lower(weights, x).compile()
    # In exact programs two gradients that XLA would fuse are stored.
    most = (1.1 if exact else 1.05) * (planned.result.peak_bytes - planned.graph.resident_bytes)
    assert compiled.memory_analysis().temp_size_in_bytes <= most


def test_what_passes_many_fences_is_behind_few():
    """Fences over all that is alive have 23 to 65 operands here; XLA takes twice the time for those of a deep network."""
    weights, x = mlp(layers=20)
    planned = unverified(group_norm_loss, budget="40%", costs="estimated")
    program = jax.make_jaxpr(jax.value_and_grad(planned))(weights, x)
    widths = [len(e.invars) for e in program.eqns if is_of_a_plan(e) or e.primitive.name == "optimization_barrier"]
    assert len(widths) > 10
    assert sorted(widths)[-2] < 23 / 2  # the first fence has all that the forward saved


def inner_updates(weights, x):
    """A derivative through a derivative, for each of some tasks."""

    def error(weights, x):
        for w in weights:
            x = jax.nn.relu(x @ w)
        return (x**2).mean()

    def task(x):
        changed = [w - 0.1 * g for w, g in zip(weights, jax.grad(error)(weights, x), strict=True)]
        return error(changed, x)

    return jax.vmap(task)(x).mean()


def products_over_two_axes(weights, x):
    """The gradient of each weight contracts two axes."""
    for w in weights:
        x = jax.nn.relu(x @ w)
    return (x**2).mean()


@pytest.mark.parametrize(
    ("loss", "budget"), [(inner_updates, "60%"), (products_over_two_axes, "100%"), (products_over_two_axes, "60%")]
)
def test_xla_takes_hardly_more_than_is_planned(loss, budget):
    """Without options too: XLA runs the order of the plan, and copies no operand of a product."""
    weights, x = [0.1 * jnp.ones((64, 64)) for _ in range(6)], jnp.ones((8, 128, 64))
    planned = unverified(loss, budget=budget, costs="estimated")
    compiled = jax.jit(jax.value_and_grad(planned)).lower(weights, x).compile().memory_analysis().temp_size_in_bytes
    assert compiled <= 1.15 * (planned.result.peak_bytes - fixed_bytes(planned.graph))


def test_op_by_op_every_bit_is_the_same():
    """Without `jax.jit` every op is computed alone, so that a recomputation has the bits of the first computation."""
    weights, x = network()
    loss = unverified(mlp_loss, budget="60%")
    assert identical(jax.value_and_grad(mlp_loss)(weights, x), jax.value_and_grad(loss)(weights, x))
    assert loss.result.overhead > 1


def test_without_a_budget_nothing_changes():
    """The function itself."""
    assert cj.remat(mlp_loss) is mlp_loss


def test_decorator():
    """As `jax.checkpoint` and `jax.jit` are used."""

    @cj.remat(budget="60%", costs="estimated", verify=False)
    def loss(weights, x):
        return mlp_loss(weights, x)

    assert loss.__name__ == "loss"
    assert difference(value_and_grad(mlp_loss)(*network()), value_and_grad(loss)(*network())) < ROUNDING


def test_vmap_of_grad_and_grad_of_vmap():
    """A plan is for one example: `vmap` maps the planned computation."""
    weights, x = network()
    batches = x.reshape(2, -1, x.shape[1])
    loss = unverified(mlp_loss, budget="70%")

    def total(f):
        return lambda weights: jax.vmap(f, (None, 0))(weights, batches).sum()

    for transform in (lambda f: jax.vmap(jax.grad(f), (None, 0))(weights, batches), lambda f: jax.grad(total(f))(weights)):
        assert difference(jax.jit(lambda t=transform: t(mlp_loss))(), jax.jit(lambda t=transform: t(loss))()) < ROUNDING


def test_inside_a_scan():
    """Accumulated gradients: the loss is differentiated in the body of a loop."""
    weights, x = network()

    def accumulated(f):
        def body(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(f)(weights, part)), None

        return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, weights), x.reshape(2, -1, x.shape[1]))[0]

    loss = unverified(mlp_loss, budget="70%")
    assert difference(jax.jit(lambda: accumulated(mlp_loss))(), jax.jit(lambda: accumulated(loss))()) < ROUNDING


@pytest.mark.parametrize("exact", [False, True])
def test_grad_of_grad(exact):
    """Second derivatives pass through the fences. Their sums have another order, so that bits differ."""
    weights, x = network()
    loss = unverified(mlp_loss, budget="60%", exact=exact)

    def second(f):
        return jax.jit(jax.grad(lambda weights: sum((g**2).sum() for g in jax.grad(f)(weights, x))))(weights)

    assert difference(second(mlp_loss), second(loss)) < ROUNDING
    assert loss.result.overhead > 1


def test_forward_mode_is_refused():
    """By JAX itself: the derivative is a `jax.custom_vjp`."""
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(unverified(jnp.sum, budget="100%"), (jnp.ones(3),), (jnp.ones(3),))


@pytest.mark.slow
@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_dropout_draws_the_same_masks(make_key):
    """Keys are values: a mask that is drawn again is the same mask."""
    weights, x = network()

    def dropout(weights, x, key):
        for i, w in enumerate(weights[:3]):
            mask = jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, x.shape)
            x = jnp.where(mask, jnp.tanh(x @ w), 0)
        return (x**2).sum()

    loss = unverified(dropout, budget="60%")
    key = make_key(1)
    assert difference(value_and_grad(dropout)(weights, x, key), value_and_grad(loss)(weights, x, key)) < ROUNDING


@pytest.mark.slow
def test_custom_derivatives_are_honoured():
    """A rule that is no derivative at all shows whether it is used."""

    @jax.custom_vjp
    def sevenfold(x):
        return jnp.sin(x)

    sevenfold.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (7 * g * jnp.cos(x),))

    def function(x):
        return jax.nn.relu(sevenfold(jnp.tanh(x))).sum()

    x = jnp.linspace(0.1, 1, 64)
    assert identical(jax.grad(function)(x), jax.grad(unverified(function, budget="100%"))(x))


@pytest.mark.slow
def test_mixed_precision():
    """Parameters in float32, computation in bfloat16."""
    weights, x = network()

    def mixed(weights, x):
        return mlp_loss([w.astype(jnp.bfloat16) for w in weights], x.astype(jnp.bfloat16)).astype(jnp.float32)

    loss = unverified(mixed, budget="60%")
    assert difference(value_and_grad(mixed)(weights, x), value_and_grad(loss)(weights, x)) < 2e-2


def test_auxiliary_results_and_arguments_that_are_no_arrays():
    """Strings, numbers of Python, functions and None go in and come out as they are."""

    def function(weights, x, activation, scale, nothing):
        y = activation(x @ weights[0])
        return scale * (y**2).sum(), {"y": y, "name": "loss", "count": 3, "step": jnp.arange(3), "nothing": nothing}

    weights, x = network()
    loss = unverified(function, budget="100%")
    arguments = (weights, x, jnp.tanh, 2, None)
    (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(*arguments)
    expected = jax.value_and_grad(function, has_aux=True)(*arguments)
    assert aux["name"] == "loss"
    assert aux["count"] == 3
    assert identical((value, aux["y"], aux["step"], gradients), (expected[0][0], expected[0][1]["y"], jnp.arange(3), expected[1]))


def test_closed_over_values_are_those_of_the_call():
    """Also where a transformation outside traces them, and where they change between calls."""
    weights, x = network()
    gradient = jax.jit(jax.grad(lambda w: unverified(lambda x: mlp_loss(w, x), budget="80%")(x)))(weights)
    assert difference(jax.jit(jax.grad(mlp_loss))(weights, x), gradient) < ROUNDING
    scale = [jnp.float32(1)]
    loss = unverified(lambda x: jnp.sin(scale[0] * x).sum(), budget="100%")
    assert float(jax.grad(loss)(jnp.float32(0.0))) == 1
    scale[0] = jnp.float32(3)
    assert float(jax.grad(loss)(jnp.float32(0.0))) == 3


def test_no_tracer_leaks():
    """JAX checks that no tracer outlives its trace."""
    weights, x = network()
    with jax.checking_leaks():
        value_and_grad(unverified(mlp_loss, budget="70%"))(weights, x)


def test_a_second_call_does_not_plan_again():
    """A plan is found again by the graph, however often the function is traced."""
    weights, x = network()
    loss = unverified(mlp_loss, budget="70%")
    jax.eval_shape(jax.grad(loss), weights, x)
    first = loss.result
    jax.eval_shape(jax.grad(loss), weights, x + 1)
    assert loss.result is first


@pytest.mark.parametrize("scalar", [True, False])
def test_everything_is_kept_at_100_percent(scalar):
    """To the byte: the function runs as it is. Cotangents that the caller gives count as arguments."""

    def layer(w, v, x):
        y = x + jax.nn.gelu(x @ w) @ v
        return y.sum() if scalar else y

    def step(f):
        def run(w, v, x, cotangent):
            y, pull = jax.vjp(f, w, v, x)
            return y, pull(jnp.ones(()) if scalar else cotangent)

        return run

    arguments = jnp.ones((64, 256)), jnp.ones((256, 64)), jnp.ones((32, 64)), jnp.ones(() if scalar else (32, 64))
    planned = remat(layer, budget="100%", costs="estimated")
    found = [jax.jit(step(f), keep_unused=not scalar).lower(*arguments).compile() for f in (planned, layer)]
    ours, plain = (program.memory_analysis() for program in found)
    needed = ours.argument_size_in_bytes + ours.output_size_in_bytes + ours.temp_size_in_bytes
    assert ours.temp_size_in_bytes == plain.temp_size_in_bytes
    assert planned.result.overhead == 1
    assert needed <= planned.budget_bytes


def test_a_plan_around_a_plan():
    """It would undo the inner plan, and is refused, but in a loop; figures are those of the outer function."""
    weights, x = mlp(layers=8, width=64, batch=1024)
    inner = remat(mlp_loss, budget="60%")
    jax.eval_shape(jax.grad(inner), weights, x)
    outer = remat(inner, budget="1GiB")
    assert outer.__wrapped__ is inner
    with pytest.raises(GraphError, match="has a plan") as caught:
        jax.eval_shape(jax.grad(outer), weights, x)
    assert "__wrapped__" in (caught.value.hint or "")
    again = remat(outer.__wrapped__.__wrapped__, budget=inner.budget_bytes)
    jax.eval_shape(jax.grad(again), weights, x)
    assert again.budget_bytes == inner.budget_bytes

    def accumulated(weights, batches):
        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(inner)(weights, x)), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), batches)[0]

    step = cj.plan(accumulated, weights, jnp.stack([x, x]), budget="1GiB", costs="estimated")
    whole = remat(mlp_loss, budget="100%", costs="estimated")
    jax.eval_shape(jax.grad(whole), weights, x)
    assert step.temp_bytes < whole.temp_bytes


def test_a_method_without_jit():
    """A planned function binds as a function does; `jax.disable_jit` changes neither the plan nor the answer."""

    class Model:
        scale = 2.0

        @remat(budget="60%", costs="estimated")
        def loss(self, weights, x):
            return self.scale * mlp_loss(weights, x)

    weights, x = network()
    expected = jax.value_and_grad(lambda weights: 2.0 * mlp_loss(weights, x))(weights)
    model, temp_bytes = Model(), []
    for disabled in (True, False):
        with jax.disable_jit(disabled):
            assert difference(jax.value_and_grad(model.loss)(weights, x), expected) < ROUNDING
        temp_bytes.append(Model.loss.temp_bytes)
    assert temp_bytes[0] == temp_bytes[1]


def test_ordered_effects_are_refused():
    """A plan changes the order of computations."""

    def function(x):
        io_callback(lambda a: None, None, x, ordered=True)
        return jnp.sin(x).sum()

    with pytest.raises(checkmate.GraphError, match="effects whose order counts"):
        jax.grad(unverified(function, budget="100%"))(jnp.ones(3))


def test_integer_arguments_are_no_variables():
    """JAX refuses to differentiate by them; beside others they are constants."""
    weights, x = network()

    def function(weights, rows):
        return mlp_loss(weights, x[rows])

    loss = unverified(function, budget="70%")
    rows = np.arange(128)
    assert difference(value_and_grad(function)(weights, rows), value_and_grad(loss)(weights, rows)) < ROUNDING
    with pytest.raises(TypeError, match="real- or complex-valued"):
        jax.grad(loss, argnums=1)(weights, rows)


def test_figures_before_the_first_derivative_are_refused():
    """There are none yet."""
    with pytest.raises(checkmate.PlanError, match="nothing is planned yet"):
        _ = unverified(mlp_loss, budget="70%").result


def test_costs_are_measured_inside_a_trace(caplog):
    """The function is planned while JAX traces it, and the ops that are measured must not be."""
    weights, x = mlp(layers=1)
    loss = cj.remat(mlp_loss, budget="100%", verify=False)
    with caplog.at_level(logging.INFO, logger="checkmate.jax"):
        jax.eval_shape(jax.grad(loss), weights, x)
    assert not [record for record in caplog.records if "could not be measured" in record.message]
    assert all(op.cost > 0 for op in loss.graph.ops if op.kind == "dot_general")


@pytest.mark.parametrize(("inner", "way"), [(None, "put checkmate.jax.remat around"), ("60%", "lower the budget of")])
def test_a_refusal_names_the_loop_that_sums_gradients(inner, way):
    """It has no layers: the loss in its body can be planned, or have a lower budget."""
    loss = cj.remat(mlp_loss, budget=inner, costs="estimated", time_limit_s=1)

    def accumulated(weights, batches):
        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, x)), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), batches)[0]

    weights, x = mlp(layers=8, width=64, batch=1024)
    with pytest.raises(checkmate.InfeasibleBudgetError, match="budget") as refused:
        cj.plan(accumulated, weights, jnp.stack([x, x]), budget="5%", costs="estimated", time_limit_s=1)
    assert way in refused.value.hint


@pytest.mark.parametrize("how", ["step", "second derivative"])
def test_what_runs_without_a_plan_is_said(caplog, how):
    """A whole step, which is not differentiated again, and a planned loss that is differentiated twice; once each."""
    weights, x = mlp(layers=8, batch=512)

    def step(weights, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(mlp_loss)(weights, x))

    planned = cj.remat(step if how == "step" else mlp_loss, budget="70%", costs="estimated", time_limit_s=1)
    run = planned if how == "step" else jax.grad(lambda weights, x: jax.grad(planned)(weights, x)[0].sum())
    for _ in range(2):
        jax.eval_shape(run, weights, x)
    said = [record.message for record in caplog.records if "without a plan" in record.message]
    assert len(said) == 1
    assert ("checkmate.jax.plan" if how == "step" else "the first derivative") in said[0]


def autoencoder_loss(weights, x, key):
    """A variational autoencoder: many plans have its smallest peak, and XLA packs them differently."""
    mean, scale = jnp.split(jax.nn.relu(x @ weights["e1"]) @ weights["e2"], 2, -1)
    z = mean + jnp.exp(0.5 * scale) * jax.random.normal(key, mean.shape)
    logits = jax.nn.relu(z @ weights["d1"]) @ weights["d2"]
    divergence = -0.5 * (1 + scale - mean**2 - jnp.exp(scale)).sum(-1)
    likeness = x * jax.nn.log_sigmoid(logits) + (1.0 - x) * jax.nn.log_sigmoid(-logits)
    return (divergence - likeness.sum(-1)).mean()


def test_a_refusal_does_not_depend_on_measured_costs(monkeypatch, environ, tmp_path):
    """Times of ops differ by a fifth from process to process; the budget that is named stays."""
    widths = {"e1": (784, 500), "e2": (500, 40), "d1": (20, 500), "d2": (500, 784)}
    weights, x = {name: jnp.ones(shape) for name, shape in widths.items()}, jnp.ones((512, 784))
    named = set()
    for seed in (3, 4):
        environ["CHECKMATE_CACHE"] = str(tmp_path / str(seed))
        noise = np.random.default_rng(seed)

        def costs(chains, noise=noise):
            return [OpCost(int(c.cost_ns * noise.uniform(0.8, 1.25)), c.workspace_bytes) for c in map(estimate, chains)]

        monkeypatch.setattr(planned_function, "cost_source", lambda _, costs=costs: costs)
        with pytest.raises(checkmate.InfeasibleBudgetError) as refused:
            jax.grad(cj.remat(autoencoder_loss, budget="40%", time_limit_s=6))(weights, x, jax.random.key(0))
        named.add(refused.value.smallest_bytes)
    assert len(named) == 1
