"""XLA for CPUs merges what `jax.checkpoint` computes again: a reproduction.

Text of the issue, for openxla/xla:

On CPUs the pass `cse_barrier_expander` removes the barriers that `jax.checkpoint`
puts around what it computes again, and a later CSE merges that with the first
computation. The program then keeps every activation: a checkpoint around each of 12
layers changes neither the bytes of temporaries nor the number of products. With
`xla_disable_hlo_passes=cse_barrier_expander` barriers stay to the end, and both change.
Expected: the last CSE runs before barriers are removed, as on GPUs.

Run: `python xla_cpu_barriers.py`. Needs JAX.
"""

import jax
import jax.numpy as jnp

OPTIONS = {"xla_disable_hlo_passes": "cse_barrier_expander"}


def layer(x, w):
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return x


def loss(apply, ws, x):
    for w in ws:
        x = apply(x, w)
    return jnp.sum(x**2)


if __name__ == "__main__":
    ws = [jnp.ones((256, 256)) / 256] * 12
    x = jnp.ones((1024, 256))
    print(f"jax {jax.__version__}")
    print(f"{'':<42}{'temporaries':>12}{'products':>10}")
    for name, apply, options in (
        ("plain", layer, {}),
        ("jax.checkpoint", jax.checkpoint(layer), {}),
        ("jax.checkpoint, barriers to the end", jax.checkpoint(layer), OPTIONS),
    ):
        step = jax.jit(jax.grad(loss, argnums=1), static_argnums=0)
        compiled = step.lower(apply, ws, x).compile(compiler_options=options)
        mib = compiled.memory_analysis().temp_size_in_bytes / 2**20
        lines = compiled.as_text().splitlines()
        products = sum(" dot(" in line or "custom-call(" in line for line in lines)
        print(f"{name:<42}{mib:>8.1f} MiB{products:>10}")
