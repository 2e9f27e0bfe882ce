"""Shows that the JAX front end works where nothing but the `jax` extra is installed; run as `python -I .ci/smoke_jax.py`."""

from __future__ import annotations

from importlib.util import find_spec

import jax
import jax.numpy as jnp

import checkmate
import checkmate.jax as cj


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(6):
        x = jnp.tanh(x @ w)
    return (x**2).sum()


def main() -> None:
    """A planned loss has the value and the gradients of the one that keeps everything, to the bit, in fewer bytes."""
    assert [module for module in ("torch", "tensorflow", "flax", "equinox", "optax") if find_spec(module)] == []
    arguments = jnp.full((16, 16), 0.1), jnp.ones((512, 16))
    found = []
    for budget in (None, "65%"):
        step = jax.jit(
            jax.value_and_grad(cj.remat(loss, budget=budget, exact=True, costs="estimated", time_limit_s=10)),
            compiler_options=cj.compiler_options(),
        )
        program = step.lower(*arguments).compile()
        found.append((program.memory_analysis().temp_size_in_bytes, program(*arguments)))
    (whole, expected), (less, given) = found
    assert less < whole, found
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(given), strict=True))
    graph = cj.capture(jax.value_and_grad(loss), *arguments)
    assert checkmate.evaluate(graph, checkmate.Plan.from_order(graph, range(len(graph.ops)))).overhead == 1
    print(f"checkmate.jax works with JAX {jax.__version__} alone: {whole} bytes, planned {less}")


if __name__ == "__main__":
    main()
