"""A transformer in JAX by the policies of `jax.checkpoint` on every block, and by plans within the bytes that each of them needs.

Bytes are those of temporary values as XLA compiles loss and gradients, FLOPs those of the compiled program, time is the least
processor time of several runs. Nothing is written: the table goes to stdout.

    python benchmarks/jax_policies.py [--layers 6] [--width 64] [--length 128] [--batch 8]
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import jax

import checkmate
import checkmate.jax as cj
from tests.jax.networks import block, transformer, transformer_loss

REPEATS = 7
POLICIES = {
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
}


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 6), ("width", 64), ("length", 128), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = transformer(**vars(parser.parse_args()))
    print("| loss | temporary MB | GFLOP | time, ms | overhead of the plan |")
    print("|---|---|---|---|---|")
    rows = {"as it is": measured("as it is", transformer_loss, arguments)}
    rows.update((name, measured(name, with_policy(policy), arguments)) for name, policy in POLICIES.items())
    fixed = 2 * sum(a.nbytes for a in jax.tree.leaves(arguments[0])) + arguments[1].nbytes + 4
    for name in POLICIES:
        loss = cj.remat(transformer_loss, budget=fixed + rows[name])
        try:
            measured(f"plan within that of {name}", loss, arguments, lambda loss=loss: f"{loss.result.overhead:.3f}")
        except checkmate.InfeasibleBudgetError as error:
            print(f"| plan within that of {name} | refused: {error.message} | | | |")
    return 0


def with_policy(policy: Any) -> Callable[..., jax.Array]:
    """The loss with every block under `jax.checkpoint`."""
    return functools.partial(transformer_loss, block=jax.checkpoint(block, policy=policy))


def measured(name: str, loss: Callable[..., Any], arguments: Any, note: Callable[[], str] = lambda: "") -> int:
    """Print a row; bytes of temporary values."""
    program = jax.jit(jax.value_and_grad(loss), compiler_options=cj.compiler_options()).lower(*arguments).compile()
    temp = int(program.memory_analysis().temp_size_in_bytes)
    flop = program.cost_analysis()["flops"]
    times: list[float] = []
    for _ in range(REPEATS):
        began = time.process_time()
        jax.block_until_ready(program(*arguments))
        times.append(time.process_time() - began)
    print(f"| {name} | {temp / 1e6:.2f} | {flop / 1e9:.3f} | {1e3 * min(times):.0f} | {note()} |", flush=True)
    return temp


if __name__ == "__main__":
    sys.exit(main())
