"""Training graphs made by rule: what captured steps look like, without a framework."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from checkmate import Graph, Op, Value


class _Tape:
    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.values: list[Value] = []

    def add(
        self, name: str, reads: list[int], sizes: list[int], cost: int, *, base: int | None = None, **facts: object
    ) -> list[int]:
        first = len(self.values)
        kept = bool(facts.pop("kept", False))
        for k, size in enumerate(sizes):
            self.values.append(Value(f"{name}.{k}", size, base, kept))
        made = list(range(first, len(self.values)))
        self.ops.append(Op(name, tuple(dict.fromkeys(reads)), tuple(made), cost, **facts))
        return made


def transformer(layers: int, *, width: int = 64, tokens: int = 512) -> Graph:
    """Forward and backward of a decoder: views, multi-output norms, random dropout, kept weight gradients."""
    tape = _Tape()
    unit = width * tokens * 4
    stored: list[dict[str, int]] = []
    randoms: list[int] = []
    x = tape.add("embed", [], [unit], 20)[0]
    for layer in range(layers):
        name = f"block{layer}"
        normed, mean, rstd = tape.add(f"{name}.norm", [x], [unit, tokens * 4, tokens * 4], 30)
        qkv = tape.add(f"{name}.qkv", [normed], [3 * unit], 300)[0]
        split = [tape.add(f"{name}.split{k}", [qkv], [0], 1, base=qkv)[0] for k in range(3)]
        attended, logsum = tape.add(f"{name}.attention", split, [unit, tokens * 4], 200, workspace_bytes=unit // 2)
        dropped, mask = tape.add(f"{name}.dropout", [attended], [unit, unit // 4], 15, replay_bytes=5056)
        randoms.append(len(tape.ops) - 1)
        hidden = tape.add(f"{name}.up", [dropped], [4 * unit], 400)[0]
        active = tape.add(f"{name}.gelu", [hidden], [4 * unit], 60)[0]
        out = tape.add(f"{name}.down", [active, x], [unit], 400)[0]
        stored.append(
            {
                "x": x, "normed": normed, "mean": mean, "rstd": rstd, "qkv": qkv, "attended": attended, "logsum": logsum,
                "mask": mask, "dropped": dropped, "hidden": hidden, "active": active,
            }
        )  # fmt: skip
        x = out
    loss = tape.add("loss", [x], [4], 50, kept=True)[0]
    gradient = tape.add("boundary", [loss], [4], 0, recomputable=False, phase="loss")[0]
    gradient = tape.add("loss.grad", [gradient, x], [unit], 50, phase="backward")[0]
    for layer in reversed(range(layers)):
        name, s = f"block{layer}", stored[layer]
        tape.add(f"{name}.down.wgrad", [gradient, s["active"]], [width * width * 16], 400, phase="backward", kept=True)
        active = tape.add(f"{name}.down.grad", [gradient], [4 * unit], 400, phase="backward")[0]
        hidden = tape.add(f"{name}.gelu.grad", [active, s["hidden"]], [4 * unit], 80, phase="backward")[0]
        tape.add(f"{name}.up.wgrad", [hidden, s["dropped"]], [width * width * 16], 400, phase="backward", kept=True)
        dropped = tape.add(f"{name}.up.grad", [hidden], [unit], 400, phase="backward")[0]
        attended = tape.add(f"{name}.dropout.grad", [dropped, s["mask"]], [unit], 15, phase="backward")[0]
        reads = [attended, s["qkv"], s["attended"], s["logsum"]]
        qkv = tape.add(f"{name}.attention.grad", reads, [3 * unit], 400, workspace_bytes=unit, phase="backward")[0]
        tape.add(f"{name}.qkv.wgrad", [qkv, s["normed"]], [width * width * 12], 300, phase="backward", kept=True)
        normed = tape.add(f"{name}.qkv.grad", [qkv], [unit], 300, phase="backward")[0]
        reads = [normed, s["x"], s["mean"], s["rstd"], gradient]
        gradient = tape.add(f"{name}.norm.grad", reads, [unit, width * 4], 40, phase="backward")[0]
    tape.add("embed.grad", [gradient], [unit], 20, phase="backward", kept=True)
    order = tuple(pairwise(randoms))
    return Graph(
        tuple(tape.ops), tuple(tape.values), order, resident_bytes=layers * width * width * 48, name=f"transformer{layers}"
    )


def layers(count: int, *, masks: bool = False) -> Graph:
    """A chain of forward ops and its backward, each of which reads one of the forward; the masks cannot be made again."""
    ops, values = [], []
    for k in range(count):
        ops.append(Op(f"f{k}", (k - 1,) if k else (), (k,), 100, recomputable=not masks))
        values.append(Value(f"a{k}", 100))
    for k in range(count):
        reads = (count + k - 1, count - 1 - k) if k else (count - 1,)
        ops.append(Op(f"b{k}", reads, (count + k,), 100, phase="backward"))
        values.append(Value(f"g{k}", 100, kept=k == count - 1))
    return Graph(tuple(ops), tuple(values), name="layers")


def weighted(count: int, *, weight: int = 300, views: bool = False) -> Graph:
    """`layers` whose forward and backward ops of a layer read a weight of it that is on the host, the forward through a view."""
    graph = layers(count)
    ops = [Op(f"w{k}", (), (k,), 0, recomputable=False) for k in range(count)]
    values = [Value(f"w{k}", weight, on_host=True) for k in range(count)]
    if views:
        ops += [Op(f"w{k}.T", (k,), (count + k,), 0) for k in range(count)]
        values += [Value(f"w{k}.T", 0, base=k) for k in range(count)]
    first = len(values)
    for k, op in enumerate(graph.ops):
        read = k + count * views if k < count else 2 * count - 1 - k
        inputs, outputs = (tuple(v + first for v in indices) for indices in (op.inputs, op.outputs))
        ops.append(msgspec.structs.replace(op, inputs=(read, *inputs), outputs=outputs))
    return Graph(tuple(ops), (*values, *graph.values), name="weighted")
