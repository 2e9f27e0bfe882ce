"""Training chains: the graphs on which checkpointing was first studied."""

from __future__ import annotations

import random

from checkmate import Graph, Op, Value


def unit_chain(layers: int) -> Graph:
    """Forward ops, a loss, and gradients that each read their op's output and the gradient before; all of one unit."""
    count = 2 * layers + 1
    edges = {(i, i + 1) for i in range(count - 1)} | {(i, count - 1 - i) for i in range(layers)}
    return Graph.from_dag(
        cost=[1] * count, size_bytes=[1] * count, edges=sorted(edges), backward=[i > layers for i in range(count)]
    )


def uneven_chain(rng: random.Random, layers: int) -> Graph:
    """A chain whose costs, sizes and workspaces differ and whose gradients read the input, the output or both."""
    ops: list[Op] = []
    values: list[Value] = []

    def add(name: str, reads: list[int], phase: str, *, kept: bool = False) -> int:
        values.append(Value(name, rng.randint(0, 6), kept=kept))
        op = Op(name, tuple(reads), (len(values) - 1,), rng.randint(0, 9), workspace_bytes=rng.choice([0, 0, 3]), phase=phase)
        ops.append(op)
        return len(values) - 1

    state = [add("f1", [], "forward")]
    for i in range(1, layers):
        state.append(add(f"f{i + 1}", [state[-1]], "forward"))
    gradient = add("loss", [state[-1]], "loss", kept=rng.random() < 0.5)
    for i in reversed(range(layers)):
        reads = {gradient} | rng.choice([{state[i]}, {state[i]}, {state[i], state[max(0, i - 1)]}, {state[max(0, i - 1)]}])
        gradient = add(f"b{i + 1}", sorted(reads), "backward", kept=rng.random() < 0.2)
    return Graph(tuple(ops), tuple(values))
