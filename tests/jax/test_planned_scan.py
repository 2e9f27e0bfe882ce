"""Loops whose layers save different values: within the budget, cheaper than any one choice for all layers."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec

import checkmate
import checkmate.jax as cj
from checkmate.jax.arguments import Arguments, FlatFunction
from checkmate.jax.profiler import cost_source
from checkmate.jax.scan.choices import Choices, Layers
from checkmate.jax.scan.groups import LayerGroup, Naming, run_groups
from checkmate.jax.scan.planned_scan import Loop
from tests.jax.networks import difference

WIDTH, LENGTH = 16, 8
SHAPES = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
BUDGET = 1_000_000
X = jax.ShapeDtypeStruct((256, WIDTH), jnp.float32)
P = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}


def layer(x, p):
    """Values of several sizes and costs to choose among."""
    return x + jnp.sin(jax.nn.gelu(x @ p["up"]) @ p["down"]), x.mean()


@pytest.fixture(scope="module")
def arrays():
    draw = np.random.default_rng(0)
    stacked = {name: jnp.asarray(draw.normal(size=(LENGTH, *s.shape)) / 4, s.dtype) for name, s in P.items()}
    return jnp.asarray(draw.normal(size=X.shape), jnp.float32), stacked


@pytest.fixture(scope="module")
def layers():
    arguments = Arguments.of((X, P), {})
    choices = Choices(
        arguments.arrays, FlatFunction(Naming(layer, own=False).with_names(None), arguments), cost_source("estimated")
    )
    return Layers(choices=choices, length=LENGTH, carry_bytes=4 * X.size)


def derivative(loop):
    def total(x, stacked):
        y, ys = loop(x, stacked)
        return (y**2).sum() + (ys**2).sum()

    return jax.value_and_grad(total, argnums=(0, 1))


def groups_of(names):
    return {
        "one": (LayerGroup(layers=8, names=names),),
        "three": (
            LayerGroup(layers=2, names=()),
            LayerGroup(layers=3, names=names),
            LayerGroup(layers=3, names=(), everything=True),
        ),
        "nested": (LayerGroup(layers=8, names=names, nested=4),),
    }


@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("one", "three")), "nested"])
def test_groups_compute_what_the_loop_does(arrays, layers, kind):
    """Carry, results of all layers and gradients, whatever the groups are."""
    groups = groups_of(layers.choices.front[-1].names)[kind]

    def loop(x, stacked):
        return run_groups(Naming(layer, own=False), groups, x, stacked)

    expected = jax.jit(derivative(lambda x, stacked: jax.lax.scan(layer, x, stacked)))(*arrays)
    assert difference(expected, jax.jit(derivative(loop))(*arrays)) < 1e-5


def test_saved_values_are_not_computed_again(layers):
    """The more the second group saves, the fewer products of matrices the program has."""

    def products(names):
        loop = jax.jit(derivative(lambda x, p: run_groups(Naming(layer, own=False), groups_of(names)["three"], x, p)))
        stacked = {name: jax.ShapeDtypeStruct((LENGTH, *s.shape), s.dtype) for name, s in P.items()}
        text = loop.lower(X, stacked).compile(compiler_options=cj.compiler_options()).as_text()
        return sum(" dot(" in line or "custom-call(" in line for line in text.splitlines())

    assert products(layers.choices.front[-1].names) < products(())


def scaled_loop(run):
    """A loss whose loop closes over a value that is differentiated, and has integers in its carry."""

    def loss(scale, w, x):
        def scaled(carry, w):
            x, count = carry
            return (jnp.tanh(scale * x @ w), count + 1), x.sum()

        (x, count), sums = run(scaled, (x, jnp.int32(0)), w)
        return (x**2).sum() * count + sums.sum()

    return loss


def in_three_groups(body, carry, xs, *, exact=False):
    names = tuple(f"scaled.{number}" for number in (5, 6))  # after a constant and three arguments: two of the first equations
    return run_groups(Naming(body, own=False), groups_of(names)["three"], carry, xs, exact=exact)


def exactly(body, carry, xs):
    return in_three_groups(body, carry, xs, exact=True)


@pytest.mark.slow
def test_groups_compose():
    """With `vmap`, closed-over values that are traced, integers in the carry, and a second derivative."""
    draw = np.random.default_rng(0)
    w = jnp.asarray(draw.normal(size=(LENGTH, 8, 8)) / 3, jnp.float32)
    x = jnp.asarray(draw.normal(size=(2, 16, 8)), jnp.float32)
    for transform in (
        lambda f: jax.vmap(jax.grad(f, argnums=(0, 1)), (None, None, 0)),
        lambda f: jax.grad(lambda s, w, x: (jax.grad(f, argnums=1)(s, w, x[0]) ** 2).sum()),
    ):
        runs = (jax.lax.scan, in_three_groups, exactly)
        plain, *given = (jax.jit(transform(scaled_loop(run)))(jnp.float32(0.9), w, x) for run in runs)
        assert all(difference(plain, other) < 1e-5 for other in given)


@pytest.mark.parametrize("checked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_groups_in_shard_map(checked):
    """Parameters are the same on all devices, the batch is not."""
    draw = np.random.default_rng(0)
    w = jnp.asarray(draw.normal(size=(LENGTH, 8, 8)) / 3, jnp.float32)
    x = jnp.asarray(draw.normal(size=(16, 8)), jnp.float32)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def on_device(run):
        loss = scaled_loop(run)
        gradient = jax.grad(lambda w, x: loss(jnp.float32(0.9), w, x))
        specs = {"in_specs": (PartitionSpec(), PartitionSpec("data")), "out_specs": PartitionSpec()}
        return jax.jit(jax.shard_map(lambda w, x: jax.lax.pmean(gradient(w, x), "data"), mesh=mesh, check_vma=checked, **specs))

    expected = on_device(jax.lax.scan)(w, x)
    assert all(difference(expected, on_device(run)(w, x)) < 1e-5 for run in (in_three_groups, exactly))


def test_exact_loops_have_the_same_bits_at_every_budget(arrays):
    """Results and gradients, with everything saved and with layers that differ."""
    budgets = ("1GiB", 2_000_000, 1_200_000)
    found = [cj.scan(layer, X, P, length=LENGTH, budget=budget, costs="estimated", exact=True) for budget in budgets]
    assert [len(plan.groups) for plan in found] == [1, 2, 2]
    assert found[0].groups[0].everything
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in found)
    expected, *others = (jax.jit(derivative(plan))(*arrays) for plan in found)
    for other in others:
        assert all(map(np.array_equal, jax.tree.leaves(expected), jax.tree.leaves(other)))


@pytest.fixture(scope="module")
def planned():
    return cj.scan(layer, X, P, length=LENGTH, budget=BUDGET, costs="estimated")


def test_compiled_bytes_keep_the_budget(planned, arrays):
    """The loop and its derivative as XLA compiles them for the user, and layers that differ fill the budget."""
    program = jax.jit(derivative(planned)).lower(*arrays).compile()
    memory: Any = program.memory_analysis()
    assert len(planned.groups) == 2
    assert 0.85 * planned.budget_bytes <= planned.peak_bytes <= planned.budget_bytes
    assert planned.temp_bytes == pytest.approx(memory.temp_size_in_bytes, rel=0.1)
    assert planned.length == LENGTH
    assert difference(jax.jit(derivative(lambda x, p: jax.lax.scan(layer, x, p)))(*arrays), program(*arrays)) < 1e-5


@pytest.mark.slow
def test_nested_loops_need_fewer_bytes_than_any_policy():
    """Where the carries of all layers do not fit, those of inner loops are computed again."""
    with pytest.raises(checkmate.InfeasibleBudgetError) as of_policy:
        cj.policy(layer, X, P, length=32, budget=1, costs="estimated")
    with pytest.raises(checkmate.InfeasibleBudgetError) as of_scan:
        cj.scan(layer, X, P, length=32, budget=1, costs="estimated")
    assert of_scan.value.smallest_bytes < of_policy.value.smallest_bytes
    nested = cj.scan(layer, X, P, length=32, budget=of_scan.value.smallest_bytes, costs="estimated")
    assert nested.groups[0].nested > 1


class Slack(Loop):
    """A loop of which XLA needs the more above the planned bytes, the more is saved."""

    def __init__(self, layers):
        self.layers, self.fixed_bytes = layers, 0

    def temp_bytes(self, arrangement):
        return arrangement.held_bytes + 310_000 + arrangement.saved_bytes // 50


def test_saving_nothing_is_tried_before_nested_loops(layers):
    """Where it is foreseen to miss the budget by next to nothing: a nested loop computes every layer once more."""
    least = layers.cheapest(LENGTH * layers.carry_bytes)
    assert least is not None
    assert least.groups[0].nested == 1
    found, _ = Slack(layers).cheapest_within(Slack(layers).temp_bytes(least))
    assert found == least


def test_layers_that_differ_cost_less(planned):
    """Of no more than the same bytes, one choice for all layers costs more; the bound is below both."""
    uniform = cj.policy(layer, X, P, length=LENGTH, budget=planned.budget_bytes, costs="estimated")
    assert 1 <= planned.bound <= planned.overhead < uniform.overhead


def test_arrangements_are_as_cheap_as_trying_every_pair(layers):
    """For every limit the cheapest pair of choices and number of layers, found without trying all."""
    front = layers.choices.front
    for most in range(LENGTH * layers.carry_bytes, 10**6, 10**5):
        found = layers.cheapest(most)
        tried = [
            count * few.cost + (LENGTH - count) * many.cost
            for few, many in itertools.product(front, front)
            for count in range(LENGTH + 1)
            if LENGTH * layers.carry_bytes + count * few.saved_bytes + (LENGTH - count) * many.saved_bytes <= most
        ]
        assert found is not None
        assert found.held_bytes <= most
        assert found.cost <= 1.006 * min(tried)
        assert layers.choices.bound(LENGTH, layers.carry_bytes, found.saved_bytes) <= found.cost + 1e-6


def test_the_bound_is_below_every_mixture(layers):
    """Any two choices in any numbers of layers, flat or nested."""
    front, carry = layers.choices.front, layers.carry_bytes
    for few, many, count in itertools.product(front[::3], front[::3], (0, 3, 8)):
        saved = LENGTH * carry + count * few.saved_bytes + (LENGTH - count) * many.saved_bytes
        cost = count * few.cost + (LENGTH - count) * many.cost
        assert layers.choices.bound(LENGTH, carry, saved) <= cost + 1e-6
    nested = [found for found in layers.smallest() if found.groups[0].nested > 1]
    assert len(nested) == 2
    assert all(layers.choices.bound(LENGTH, carry, found.saved_bytes) <= found.cost + 1e-6 for found in nested)


def test_with_enough_room_nothing_is_computed_again(arrays):
    """All values by their names do not suffice for that: derivatives read results before they are named."""
    found = cj.scan(layer, X, P, length=LENGTH, budget=10 * BUDGET, costs="estimated")
    assert (found.overhead, found.bound) == (1, 1)
    expected, given = (
        jax.jit(derivative(loop)).lower(*arrays).compile().cost_analysis()["flops"]
        for loop in (lambda x, p: jax.lax.scan(layer, x, p), found)
    )
    assert given == expected


def test_plans_are_data(planned):
    """Groups are numbers and names, and their policies are JAX's own for these names."""
    for group in planned.groups:
        assert dataclasses.asdict(group)["names"] == group.names
        assert callable(group.policy)
    assert any(group.names for group in planned.groups)


def test_another_number_of_layers_is_refused(planned, arrays):
    """A plan is for one length."""
    x, stacked = arrays
    with pytest.raises(checkmate.OptionError, match="planned for 8 layers and is given 4"):
        planned(x, {name: value[:4] for name, value in stacked.items()})


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
    [
        (lambda x, p: x, "must be a pair"),
        (lambda x, p: (x[0], None), "equal types"),
    ],
    ids=["no pair", "other carry"],
)
def test_what_is_no_body_is_refused(body, message):
    """With the error of `jax.lax.scan`, before anything is compiled."""
    with pytest.raises(TypeError, match=message):
        cj.scan(body, X, P, length=LENGTH, budget="1GiB", costs="estimated")


def test_a_body_inside_a_transformation_is_refused(arrays):
    """Its arguments are tracers there."""
    with pytest.raises(checkmate.GraphError, match="inside a transformation"):
        jax.jit(lambda x: cj.scan(layer, x, P, length=LENGTH, budget="1GiB", costs="estimated")(x, arrays[1]))(arrays[0])
