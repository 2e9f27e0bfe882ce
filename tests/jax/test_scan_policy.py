"""What the body of a loop over layers saves: within the budget, at the least cost."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import checkmate
import checkmate.jax as cj
from checkmate.jax.arguments import Arguments, FlatFunction
from checkmate.jax.names import Choices, Naming
from checkmate.jax.profiler import cost_source
from tests.jax.networks import block, difference

LENGTH = 8


def layer(x, p):
    return block(p, x), None


@pytest.fixture(scope="module")
def specs():
    width = 16
    shapes = {"qkv": (width, 3 * width), "up": (width, 4 * width), "down": (4 * width, width)}
    x = jax.ShapeDtypeStruct((4, 32, width), jnp.float32)
    return x, {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def arrays(specs):
    draw = np.random.default_rng(0)
    stacked = {name: jnp.asarray(draw.normal(size=(LENGTH, *s.shape)) / 4, s.dtype) for name, s in specs[1].items()}
    return jnp.asarray(draw.normal(size=specs[0].shape), jnp.float32), stacked


def derivative(body):
    def total(x, stacked):
        return (jax.lax.scan(body, x, stacked)[0] ** 2).sum()

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1)), compiler_options=cj.compiler_options())


@pytest.fixture(scope="module")
def found(specs):
    with pytest.raises(checkmate.InfeasibleBudgetError) as smallest:
        cj.policy(layer, *specs, length=LENGTH, budget=1, costs="estimated")
    at_least = smallest.value.smallest_bytes
    return cj.policy(layer, *specs, length=LENGTH, budget=at_least + 600_000, costs="estimated")


def test_compiled_bytes_keep_the_budget(found):
    """The loop and its derivative as XLA compiled them, and a good part of the budget is used."""
    assert found.peak_bytes <= found.budget_bytes
    assert found.peak_bytes > found.budget_bytes - 300_000
    assert 0 < found.saved_bytes <= 700_000


def test_results_are_those_of_the_loop(found, arrays):
    """Whatever is saved."""
    named, policy = found
    planned = derivative(jax.checkpoint(named, policy=policy))(*arrays)
    assert difference(derivative(layer)(*arrays), planned) < 1e-5


def test_saving_costs_less_than_saving_nothing(found):
    """A bound that is proven is never above the cost, and a part of the budget is put to use."""
    nothing = 1 + 0.5  # an iteration without its derivative is about a third of both
    assert 1 <= found.bound <= found.overhead < nothing


def test_names_are_those_that_are_saved(found, arrays):
    """A policy with a name that the body does not attach would save nothing, without a word."""
    text = str(jax.make_jaxpr(found.block)(arrays[0], {name: value[0] for name, value in arrays[1].items()}))
    assert found.names
    assert all(f"name={name}" in text for name in found.names)
    assert text.count("name[") == len(found.names)
    assert all("networks.py" in source for source in found.sources)


def test_more_memory_is_never_more_expensive(specs):
    """The choices for larger budgets cost no more, and with enough of it next to nothing is computed again."""
    arguments = Arguments.of(specs, {})
    choices = Choices(
        arguments.arrays, FlatFunction(Naming(layer, own=False).with_names(None), arguments), cost_source("estimated")
    )
    found = [choices.cheapest(size) for size in (0, 10_000, 40_000, 100_000, 10**7)]
    costs = [choice.cost for choice in found]
    assert costs == sorted(costs, reverse=True)
    assert all(choice.bound <= choice.cost + 1e-9 for choice in found)
    assert found[0].names == ()


def test_derivatives_of_the_users_are_honoured():
    """Naming values must not look into functions that have a derivative of their own."""

    @jax.custom_jvp
    def doubled(x):
        return jnp.sin(x)

    doubled.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), 2 * jnp.cos(primals[0]) * tangents[0]))

    def body(x, w):
        return doubled(jnp.tanh(x @ w)), None

    x, w = jax.ShapeDtypeStruct((32, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    named, policy = cj.policy(body, x, w, length=3, budget="1MiB", costs="estimated")
    arrays = jnp.ones((32, 8)), jnp.full((3, 8, 8), 0.1)
    assert difference(derivative(body)(*arrays), derivative(jax.checkpoint(named, policy=policy))(*arrays)) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "50%", "length": 4}, "is not an amount of memory"),
        ({"budget": "1GiB", "length": 0}, "is not a number of iterations"),
    ],
    ids=["share", "length"],
)
def test_bad_options_are_refused(specs, options, message):
    """Before anything is traced."""
    with pytest.raises(checkmate.OptionError, match=message):
        cj.policy(layer, *specs, **options)


def own_names(x, w):
    hidden = checkpoint_name(x @ w["up"], "mlpwi")
    return checkpoint_name(jnp.tanh(hidden) @ w["down"], "mlpwo"), None


OWN = (
    jax.ShapeDtypeStruct((64, 8), jnp.float32),
    {
        "up": jax.ShapeDtypeStruct((8, 32), jnp.float32),
        "down": jax.ShapeDtypeStruct((32, 8), jnp.float32),
    },
)


def test_names_of_the_body_are_chosen_among():
    """Where a model names its values, as MaxText's do, the body is used as it is."""
    found = cj.policy(own_names, *OWN, length=4, budget="1MiB", costs="estimated", names="own")
    assert found.block is own_names
    assert found.offered == ("mlpwi", "mlpwo")
    assert found.names == ("mlpwi",)
    named = cj.policy(own_names, *OWN, length=4, budget="1MiB", costs="estimated")
    assert not set(named.names).intersection(found.offered)


def test_a_name_that_is_never_attached_is_refused():
    """A policy with it would save nothing, without a word."""
    with pytest.raises(checkmate.OptionError, match="gives no value the name query_proj"):
        cj.policy(own_names, *OWN, length=4, budget="1MiB", costs="estimated", names=["mlpwi", "query_proj"])


def test_lines_for_maxtext():
    """The keys and values of ``configs/base.yml``: names of MaxText, each on the device or computed again."""
    found = cj.policy(own_names, *OWN, length=4, budget="1MiB", costs="estimated", names="own")
    lines = dict(line.split(": ") for line in cj.maxtext_config(found).splitlines())
    assert lines == {"remat_policy": "'custom'", "decoder_layer_input": "'device'", "mlpwi": "'device'", "mlpwo": "'remat'"}


def test_values_that_maxtext_does_not_name_are_refused():
    """Names that are given here mean nothing to MaxText."""
    found = cj.policy(own_names, *OWN, length=4, budget="1MiB", costs="estimated")
    with pytest.raises(checkmate.OptionError, match="has no value own_names"):
        cj.maxtext_config(found)


@pytest.mark.parametrize(
    ("body", "message"),
    [(lambda x, p: x, "must be a pair"), (lambda x, p: (x[0], None), "equal types")],
    ids=["no pair", "other carry"],
)
def test_what_is_no_body_is_refused(specs, body, message):
    """With the error of `jax.lax.scan`, before anything is compiled."""
    with pytest.raises(TypeError, match=message):
        cj.policy(body, *specs, length=LENGTH, budget="1GiB", costs="estimated")


def test_a_body_inside_a_transformation_is_refused(specs, arrays):
    """Its arguments are tracers there."""
    with pytest.raises(checkmate.GraphError, match="inside a transformation"):
        jax.jit(lambda x: cj.policy(layer, x, specs[1], length=LENGTH, budget="1GiB", costs="estimated").saved_bytes)(arrays[0])
