"""Whole steps: the compiled bytes keep the budget, and the results are those of the step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import checkmate
import checkmate.jax as cj
from checkmate.core.plan import Plan
from checkmate.jax._compat import is_of_a_plan
from checkmate.jax.apply_plan import PlannedProgram
from checkmate.jax.calibrate import temp_bytes
from checkmate.jax.graph.trace import as_called
from tests.jax.networks import difference, mlp, mlp_loss

OPTIONS = {"costs": "estimated", "time_limit_s": 2}
optimizer = optax.adamw(1e-2)


def step(weights, state, x):
    loss, gradients = jax.value_and_grad(mlp_loss)(weights, x)
    updates, state = optimizer.update(gradients, state, weights)
    return optax.apply_updates(weights, updates), state, loss


@pytest.fixture(scope="module")
def arguments():
    weights, x = mlp()
    return weights, optimizer.init(weights), x


@pytest.fixture(scope="module")
def planned(arguments):
    specs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments)
    return cj.plan(step, *specs, budget="80%", donate_argnums=(0, 1), **OPTIONS)


def test_compiled_bytes_keep_the_budget(planned, arguments):
    """The promise: arguments, results and temporary values of the program that XLA compiled."""
    jitted = jax.jit(planned, donate_argnums=(0, 1), compiler_options=cj.compiler_options())
    memory = jitted.lower(*arguments).compile().memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes
    assert total <= planned.budget_bytes
    assert planned.peak_bytes <= planned.budget_bytes
    assert planned.result.overhead > 1


def test_steps_train_the_same(planned, arguments):
    """Three updates give the weights of the unplanned step, up to rounding of what XLA fuses otherwise."""
    expected, given = arguments, arguments
    run, plain = jax.jit(planned, compiler_options=cj.compiler_options()), jax.jit(step)
    for _ in range(3):
        expected = (*plain(*expected)[:2], arguments[2])
        given = (*run(*given)[:2], arguments[2])
    assert difference(expected[0], given[0]) < 1e-4


def test_without_fences_nothing_is_saved(planned):
    """Fences and selects are necessary: without, XLA merges recomputations with first computations."""
    capture, plan = planned._planned.capture, planned.plan
    open_program = PlannedProgram(capture, plan)
    open_program._fences.clear()
    open_program._waits.clear()
    assert temp_bytes(*as_called(open_program, capture.trace, None)) > 1.1 * planned.temp_bytes


def barriers(step, order, *arguments):
    """Operands of each fence of a step whose ops run in an order."""
    capture = cj.plan(step, *arguments, verify=False, costs="estimated")._planned.capture
    program = PlannedProgram(capture, Plan.from_order(capture.graph, order))
    assert difference(step(*arguments), program(arguments)[0]) < 1e-6
    jaxpr = jax.make_jaxpr(lambda *a: program(a))(*arguments)
    return [len(e.invars) for e in jaxpr.eqns if is_of_a_plan(e) or e.primitive.name == "optimization_barrier"]


def test_what_is_computed_again_from_arguments_and_constants_is_behind_a_fence():
    """A product of an argument and a constant would be merged with the first if the argument were not behind the fence."""
    constant, w = jnp.full((4, 4), 2.0), jnp.ones((4, 4))
    assert barriers(lambda w: jnp.sin(w @ constant) @ (w @ constant), (0, 0, 1, 2), w) == [1]


def test_a_fence_behind_which_nothing_is():
    """What is computed again from constants alone, at once."""
    constant, w = jnp.full((4, 4), 2.0), jnp.ones((4, 4))
    assert barriers(lambda w: constant @ constant, (0, 0), w) == []


def test_what_several_ops_compute_from_the_same_values_is_in_the_program_once():
    """XLA merges it, but late: of the slices in a recurrence by `associative_scan` seven of eight were repetitions."""

    def loss(x):
        for _ in range(3):
            x = jnp.concatenate([jnp.tanh(x[:8]), jnp.sin(x[8:]), x[:8] * x[8:]])[:16]
        return (x**2).sum()

    planned = cj.remat(loss, budget="100%", costs="estimated", verify=False)
    lines = jax.jit(jax.grad(planned)).lower(jnp.ones((16, 4))).as_text().splitlines()
    computed = [line.partition(" = ")[2] for line in lines if " = stablehlo." in line and "stablehlo.constant" not in line]
    assert len(computed) == len(set(computed))


def test_a_second_plan_compiles_nothing(planned, arguments, caplog):
    """What a process compiled is in the store: the next one only looks it up."""
    with jax.log_compiles():
        again = cj.plan(step, *arguments, budget="80%", donate_argnums=(0, 1), **OPTIONS)
    assert not [record for record in caplog.records if "XLA compilation" in record.message]
    assert again.plan == planned.plan
    assert again.temp_bytes == planned.temp_bytes


def test_a_refusal_names_a_budget_that_holds(arguments):
    """The smallest budget of the error works as a budget, and the op that needs it is named."""
    with pytest.raises(checkmate.InfeasibleBudgetError) as refused:
        cj.plan(step, *arguments, budget="1%", **OPTIONS)
    assert refused.value.binding_op
    found = cj.plan(step, *arguments, budget=refused.value.smallest_bytes, **OPTIONS)
    assert found.peak_bytes <= refused.value.smallest_bytes


def test_a_plan_that_is_given_is_run(planned, arguments):
    """A plan made elsewhere, such as by the command line, runs as it is."""
    again = cj.plan(step, *arguments, plan=planned.plan, donate_argnums=(0, 1), costs="estimated")
    assert again.plan == planned.plan


def test_other_shapes_are_refused(planned, arguments):
    """A plan is for one size."""
    weights, state, x = arguments
    with pytest.raises(checkmate.OptionError, match="another structure, shape or type"):
        planned(weights, state, x[:3])


def scaled(w, x, rate):
    loss, gradient = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
    return w - rate * gradient, loss


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("rate", "other"), [(0.1, 10.0), (0.1, jnp.float32(10.0)), (jnp.float32(0.1), 10.0), (1, 3), (False, True)]
)
def test_numbers_are_arguments_as_they_are_for_jit(rate, other, dtype):
    """Another number gives what `jax.jit` gives, to the type of the results; if the types would differ, an error says so."""
    w, x = jnp.eye(8, dtype=dtype) / 3, jnp.ones((4, 8), dtype)
    planned = cj.plan(scaled, w, x, rate, costs="estimated")
    expected = jax.jit(scaled)(w, x, other)
    if expected[0].dtype != jax.eval_shape(scaled, w, x, rate)[0].dtype:
        with pytest.raises(checkmate.OptionError, match="Python number in place of an array"):
            planned(w, x, other)
        return
    for run in (planned, jax.jit(planned)):
        found = run(w, x, other)
        assert [a.dtype for a in found] == [a.dtype for a in expected]
        assert difference([a.astype(jnp.float32) for a in found], [a.astype(jnp.float32) for a in expected]) < 1e-2


@pytest.mark.parametrize("count", [lambda n: n + 1, lambda n: jnp.int32(n) + 1], ids=["weak", "strong"])
def test_a_counter_that_begins_as_a_python_number_counts(count):
    """The state of a step may begin with a Python number, and be an array ever after."""
    planned = cj.plan(lambda x, n: (2 * x, count(n)), jnp.ones(3), 0, budget="100%", costs="estimated")
    state = (jnp.ones(3), 0)
    for _ in range(5):
        state = planned(*state)
    assert int(state[1]) == 5


def test_other_constants_are_refused():
    """A string or a function is a part of the plan."""
    planned = cj.plan(lambda x, name: jnp.tanh(x) if name == "tanh" else x, jnp.ones(3), "tanh", budget="100%", costs="estimated")
    assert float(planned(jnp.ones(3), "tanh")[0]) < 1
    with pytest.raises(checkmate.OptionError, match="planned for the argument 'tanh', and is called with 'none'"):
        planned(jnp.ones(3), "none")


def test_a_number_that_decides_the_program_is_named():
    """As for `jax.jit`, the number has to be bound."""
    with pytest.raises(checkmate.GraphError, match="needs the value of an argument") as refused:
        cj.plan(lambda x, train: 2 * x if train else x, jnp.ones(3), True, budget="100%", costs="estimated")
    assert "functools.partial" in refused.value.hint


@pytest.mark.parametrize(
    ("options", "message"),
    [({"budget": "8 Gigs"}, "unknown unit"), ({"donate_argnums": 7}, "names an argument that is not there")],
    ids=["budget", "donated"],
)
def test_bad_options_are_refused(arguments, options, message):
    """Before anything is traced."""
    with pytest.raises(checkmate.CheckmateError, match=message):
        cj.plan(step, *arguments, **options)


def test_what_is_no_function_is_refused():
    """A model in place of a step is the likely mistake."""
    with pytest.raises(checkmate.OptionError, match="is not a function"):
        cj.plan(jnp.ones(3), jnp.ones(3), budget="50%")
