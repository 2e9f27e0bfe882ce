"""What the graph of a JAX function says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import checkmate
import checkmate.jax as cj
from checkmate.jax.graph.trace import trace_flat
from checkmate.jax.profiler import environment
from tests.jax.networks import mlp, mlp_loss, transformer, transformer_loss

CHANNELS_LAST = ("NHWC", "HWIO", "NHWC")


def test_capture_needs_no_arrays():
    """Shapes are enough, so that a step is planned where it would not fit."""
    big = jax.ShapeDtypeStruct((1 << 16, 1 << 16), jnp.float32)
    graph = cj.capture(lambda x: x @ x @ x, big, costs="H100")
    assert graph.resident_bytes == 2 * 4 * 2**32
    assert [value.size_bytes for value in graph.values] == [4 * 2**32, 0]


def test_chains_that_XLA_fuses_are_one_op():
    """A value between two pointwise equations of one loop is never stored, and must not be planned for."""
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    graph = cj.capture(lambda x: jnp.tanh(2 * x + 1) @ x @ x, x, costs="estimated")
    assert [op.kind for op in graph.ops] == ["tanh", "dot_general", "dot_general"]


def test_a_product_and_what_is_written_over_it_are_one_op():
    """XLA writes a ReLU over the product that it alone reads: the two never exist side by side."""
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def both_read(x):
        product = x @ x
        return jax.nn.relu(product) @ product

    graph = cj.capture(lambda x: jax.nn.relu(x @ x) @ x, x, costs="measured")
    assert [(op.kind, op.workspace_bytes) for op in graph.ops] == [("dot_general", 0)] * 2
    assert len(cj.capture(both_read, x, costs="estimated").ops) == 3


def test_calls_are_inlined():
    """What a nested `jax.jit` computes can be recomputed in parts."""
    inner = jax.jit(lambda x: jnp.sin(x @ x))
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    graph = cj.capture(lambda x: inner(inner(x)).sum(), x, costs="estimated")
    assert [op.kind for op in graph.ops].count("dot_general") == 2


def kinds(function, *arguments):
    """Primitives that a function runs."""
    return [equation.kind for equation in trace_flat(function, *arguments).equations]


def test_what_is_computed_twice_is_one_op():
    """XLA makes one of the two; a plan must not count the bytes of both."""
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)

    def deviation(x):
        centred = x - jnp.mean(x @ x, 1, keepdims=True)
        return centred @ jnp.var(x @ x, 1)

    assert kinds(deviation, x).count("dot_general") == 2
    assert kinds(lambda x: jnp.sin(x @ x).sum() + jnp.cos(jax.jit(lambda y: y @ y)(x)).sum(), x).count("dot_general") == 1


def test_what_only_looks_alike_stays_apart():
    """Other constants, types and settings; what may have effects; what the program itself keeps apart."""
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)

    def kept_apart(x):
        return jnp.sin(x @ x) @ (jax.lax.optimization_barrier(x) @ jax.lax.optimization_barrier(x))

    assert kinds(kept_apart, x).count("dot_general") == 3
    assert kinds(lambda x: jnp.cumsum(x, 0) @ jnp.cumsum(x, 1), x).count("cumsum") == 2
    assert kinds(lambda x: jnp.cumsum(x * 2.0) @ jnp.cumsum(x * 2.0), x).count("cumsum") == 1
    assert kinds(lambda x: jnp.cumsum(x * 0.0) @ jnp.cumsum(x * -0.0), x).count("cumsum") == 2
    assert kinds(lambda x: (x @ x, x @ x), x).count("dot_general") == 2  # each result has a buffer


def test_loops_and_branches_are_one_op_with_workspace():
    """What they allocate inside is counted, and not planned."""
    x = jax.ShapeDtypeStruct((32, 32), jnp.float32)

    def loop(x):
        return jax.lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ c) @ c, x)

    def branch(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x @ x) @ x, lambda x: x, x)

    for function in (loop, branch):
        graph = cj.capture(function, x, costs="estimated")
        assert max(op.workspace_bytes for op in graph.ops) >= 4 * 32 * 32


def test_measured_ops_have_the_workspace_that_XLA_allocates():
    """The gradient of a convolution's kernel reads transposed copies; without them plans at a budget compile to more."""
    x, w = jax.ShapeDtypeStruct((2, 8, 8, 4), jnp.float32), jax.ShapeDtypeStruct((3, 3, 4, 4), jnp.float32)

    def gradient(w, x):
        return jax.grad(lambda w: (jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", None, None, CHANNELS_LAST) ** 2).sum())(w)

    measured, estimated = (cj.capture(gradient, w, x, costs=costs) for costs in ("measured", "estimated"))
    of_kernel = [op for op in measured.ops if op.kind == "conv_general_dilated"][-1]
    program = jax.jit(gradient).lower(w, x).compile().memory_analysis()
    assert 4 * 2 * 8 * 8 * 4 <= of_kernel.workspace_bytes <= program.temp_size_in_bytes
    assert max(op.workspace_bytes for op in estimated.ops) == 0


def test_estimates_for_a_processor_have_no_calls():
    """An op of a compiled program is not dispatched: small ops would seem to cost as much as products of matrices."""
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    assert max(op.cost for op in cj.capture(lambda x: jnp.tanh(x @ x) @ x, x, costs="estimated").ops) < 100
    assert min(op.cost for op in cj.capture(lambda x: jnp.tanh(x @ x) @ x, x, costs="H100").ops) > 1000


def test_phases_of_a_whole_step():
    """Reports tell forward, backward and optimizer apart, in that order of their first ops."""
    weights, x = mlp(layers=2)
    optimizer = optax.adam(1e-3)

    def step(weights, state, x):
        loss, gradients = jax.value_and_grad(mlp_loss)(weights, x)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(weights, updates), state, loss

    graph = cj.capture(step, weights, optimizer.init(weights), x, costs="estimated")
    assert list(dict.fromkeys(op.phase for op in graph.ops)) == ["forward", "backward", "optimizer"]
    assert all("mlp_loss" in op.source for op in graph.ops if op.kind == "dot_general")


def test_donated_buffers_are_counted_once():
    """A result that takes over the buffer of an argument needs none itself."""
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    plain = cj.capture(lambda x: x + 1, x, costs="estimated")
    donated = cj.capture(lambda x: x + 1, x, costs="estimated", donate_argnums=0)
    assert plain.resident_bytes == 2 * donated.resident_bytes == 2 * 4 * 64 * 64


def test_effects_run_once():
    """Debug prints and callbacks must not be repeated."""

    def noisy(x):
        jax.debug.print("{}", x.sum())
        return jnp.sin(x).sum()

    graph = cj.capture(noisy, jnp.ones(4), costs="estimated")
    assert sum(not op.recomputable for op in graph.ops) == 1


def test_graphs_are_written_and_read(tmp_path):
    """A graph can be planned where there is no JAX."""
    params, tokens = transformer()
    graph = cj.capture(jax.value_and_grad(transformer_loss), params, tokens, costs="estimated")
    checkmate.write(graph, tmp_path / "step.graph.json")
    assert checkmate.read(tmp_path / "step.graph.json") == graph


def test_costs_are_measured_once():
    """The second capture finds the costs of the first, in the store that all processes share."""
    weights, x = mlp(layers=1)
    first = cj.capture(jax.value_and_grad(mlp_loss), weights, x)
    second = cj.capture(jax.value_and_grad(mlp_loss), weights, x)
    assert first == second
    assert all(op.cost > 0 for op in first.ops)


def test_unknown_costs_are_refused():
    """The error names what can be given."""
    with pytest.raises(checkmate.OptionError, match="neither 'measured' nor 'estimated'"):
        cj.capture(jnp.sin, jnp.ones(3), costs="H1000")


def test_open_dimensions_are_refused():
    """A plan for bytes needs the size of every dimension."""
    from jax import export

    (size,) = export.symbolic_shape("b")
    with pytest.raises(checkmate.GraphError, match="size of every dimension"):
        cj.capture(jnp.sin, jax.ShapeDtypeStruct((size, 4), jnp.float32))


def test_a_step_inside_a_transformation_is_refused():
    """Its arguments are tracers there."""
    with pytest.raises(checkmate.GraphError, match="inside a transformation"):
        jax.jit(lambda x: cj.capture(jnp.sin, x).cost)(jnp.ones(3))


def test_costs_are_kept_for_the_kernels_that_were_measured(environ: dict[str, str]) -> None:
    """A cache is shared by programs with other settings."""
    before = environment()
    environ["ONEDNN_MAX_CPU_ISA"] = "SSE41"
    assert environment() != before
