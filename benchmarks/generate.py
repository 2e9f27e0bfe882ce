"""Graphs made by rule: unit chains, random layered graphs, GPT-like training steps of any size.

The same arguments give the same graph, on every machine. Nothing here is needed to plan; benchmarks and tests use it.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from itertools import pairwise

from checkmate import Graph, Op, Value


def chain(layers: int) -> Graph:
    """The paper's unit chain `linear<layers>`: every op costs 1 and makes 1 byte.

    Forward ops 0 to ``layers - 1``, the loss, then the gradient of each forward op: it reads the gradient
    after it and the input of the op that it is the gradient of, as in Jain et al. (2020). 2 * layers + 1 ops.
    """
    last = 2 * layers
    edges = [(i, i + 1) for i in range(last)] + [(i, last - i) for i in range(layers)]
    forward = [f"v{i}" for i in range(layers)]
    return Graph.from_dag(
        cost=[1] * (last + 1),
        size_bytes=[1] * (last + 1),
        edges=edges,
        backward=[i > layers for i in range(last + 1)],
        names=[*forward, "Loss", *(f"Grad<{name}>" for name in reversed(forward))],
        name=f"linear{layers}",
    )


def skipping(ops: int, *, seed: int = 0, share: float = 0.15, reach: int = 40) -> Graph:
    """A training step of a long chain with skip connections, of random sizes and costs.

    Each forward op reads the one before it, and a share of them also one within reach further back. The gradient of an op reads
    the gradients of what reads it, and its own inputs.
    """
    rng = random.Random(seed)
    layers = max(1, (ops - 1) // 2)
    last = 2 * layers
    inputs = [[i - 1] if i else [] for i in range(layers)]
    for i in range(3, layers):
        if rng.random() < share:
            inputs[i].append(i - rng.randint(2, min(i, reach)))
    edges = [(u, v) for v, above in enumerate(inputs) for u in above] + [(layers - 1, layers), (layers, layers + 1)]
    for v, above in enumerate(inputs):
        edges += [(u, last - v) for u in above]
        edges += [(last - v, last - u) for u in above]
    forward = [rng.randint(1, 999) for _ in range(layers)]
    return Graph.from_dag(
        cost=[*forward, 1, *(2 * cost for cost in reversed(forward))],
        size_bytes=[*(size := [_mixed_size(rng) for _ in range(layers)]), 10, *reversed(size)],
        edges=sorted(set(edges)),
        backward=[i > layers for i in range(last + 1)],
        name=f"skipping{ops}-{seed}",
    )


def layered(
    nodes: int,
    *,
    seed: int = 0,
    aspect: float = 0.36,  # mean width of a layer over the number of layers
    variability: float = 0.75,  # a layer's width is uniform within this share of the mean
    density: float = 0.2,  # chance of each edge between neighbouring layers, beside the one that every node has
    skips: float = 0.14,  # share of the edges that skip at least one layer
) -> Graph:
    """A random layered graph as Moccasin solves (Bartan et al. 2023), introduced by Gagrani et al. (2022).

    One source, layers of random width, one sink. Every node reads some of the layer before and is read by some of the
    layer after; further edges skip layers. The generator of those papers is not public: the parameters have its names,
    and node, edge and layer counts, sizes and costs are distributed as in the four published instances, which have 100,
    250, 500, 1000 nodes and 236, 944, 2461, 5875 edges. The given order is a random topological order, as theirs is.
    """
    rng = random.Random(seed)
    layers = _layers(nodes, rng, math.sqrt((nodes - 2) * aspect), variability)
    edges: set[tuple[int, int]] = set()
    for above, below in pairwise(layers):
        edges |= {(rng.choice(above), v) for v in below}
        read = {u for u, _ in edges}
        edges |= {(u, rng.choice(below)) for u in above if u not in read}
        edges |= {(u, v) for u in above for v in below if rng.random() < density}
    level = {v: i for i, layer in enumerate(layers) for v in layer}
    wanted = round(len(edges) * skips / (1 - skips)) if len(layers) > 3 else 0
    for _ in range(20 * wanted):
        if wanted <= 0:
            break
        u, v = sorted(rng.sample(range(nodes), 2))
        if level[v] - level[u] > 1 and (u, v) not in edges:
            edges.add((u, v))
            wanted -= 1
    place = {v: i for i, v in enumerate(_random_order(nodes, edges, rng))}
    return Graph.from_dag(
        cost=[rng.randint(1, 999) for _ in range(nodes)],
        size_bytes=[_mixed_size(rng) for _ in range(nodes)],
        edges=sorted((place[u], place[v]) for u, v in edges),
        kept=[nodes - 1],
        name=f"layered{nodes}-{seed}",
    )


def _layers(nodes: int, rng: random.Random, width: float, variability: float) -> list[list[int]]:
    layers, made = [[0]], 1
    while made < nodes - 1:
        count = max(1, round(rng.uniform(width * (1 - variability), width * (1 + variability))))
        layers.append(list(range(made, min(nodes - 1, made + count))))
        made += len(layers[-1])
    return [*layers, [nodes - 1]]


def _random_order(nodes: int, edges: set[tuple[int, int]], rng: random.Random) -> list[int]:
    waiting = [0] * nodes
    below: list[list[int]] = [[] for _ in range(nodes)]
    for u, v in sorted(edges):
        waiting[v] += 1
        below[u].append(v)
    ready, order = [v for v in range(nodes) if not waiting[v]], []
    while ready:
        u = ready.pop(rng.randrange(len(ready)))
        order.append(u)
        for v in below[u]:
            waiting[v] -= 1
            if not waiting[v]:
                ready.append(v)
    return order


def _mixed_size(rng: random.Random) -> int:
    """Multiples of ten from three bells, in the proportions of the published instances."""
    mean, spread = rng.choice([(600, 400), (1500, 900), (4000, 1400)])
    return 10 * max(1, round(abs(rng.gauss(mean, spread)) / 10))


FLOPS_PER_NS, BYTES_PER_NS, LAUNCH_NS = 200_000, 1_500, 3_000
"""The device that `gpt` is timed on: 200 TFLOP/s, 1.5 TB/s, 3 us a launch."""


@dataclass(frozen=True, slots=True)
class _Gradient:
    """One gradient of a forward op: of an input, or of a parameter, which is kept."""

    of: int | None
    needs: tuple[int, ...]
    flops: int
    size_bytes: int
    is_view: bool = False


@dataclass(slots=True)
class _Step:
    """A training step under way: forward ops with the rules for their gradients."""

    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    tape: list[tuple[str, int, tuple[_Gradient, ...]]] = field(default_factory=list)

    def op(self, name: str, reads: tuple[int, ...], *sizes: int, flops: int = 0, view: bool = False, **facts: object) -> int:
        """Add an op; returns its first output. A view shares the storage of what it reads."""
        first, base = len(self.values), self._owner(reads[0]) if view else None
        kept = bool(facts.pop("kept", False))
        self.values += [Value(f"{name}.{k}" if k else name, size, base, kept) for k, size in enumerate(sizes)]
        moved = 0 if view else sum(self.values[v].size_bytes for v in reads) + sum(sizes)
        cost = max(flops // FLOPS_PER_NS, moved // BYTES_PER_NS) + (0 if view else LAUNCH_NS)
        self.ops.append(Op(name, tuple(dict.fromkeys(reads)), tuple(range(first, len(self.values))), cost, **facts))  # type: ignore[arg-type]
        return first

    def size(self, v: int) -> int:
        return self.values[self._owner(v)].size_bytes

    def record(self, name: str, out: int, *gradients: _Gradient) -> int:
        self.tape.append((name, out, gradients))
        return out

    def view(self, name: str, x: int) -> int:
        return self.record(name, self.op(name, (x,), 0, view=True), _Gradient(x, (), 0, 0, is_view=True))

    def pointwise(self, name: str, x: int, *, saves: tuple[int, ...] = ()) -> int:
        """One input, one output of its size; the gradient needs ``saves``."""
        return self.record(name, self.op(name, (x,), self.size(x)), _Gradient(x, saves, 0, self.size(x)))

    def add(self, name: str, x: int, y: int) -> int:
        """The gradient of a sum is the gradient of each part: no op."""
        return self.record(name, self.op(name, (x, y), self.size(x)), _Gradient(x, (), 0, 0), _Gradient(y, (), 0, 0))

    def linear(self, name: str, x: int, size_bytes: int, flops: int, weight_bytes: int) -> int:
        out = self.op(name, (x,), size_bytes, flops=flops)
        return self.record(name, out, _Gradient(None, (x,), flops, weight_bytes), _Gradient(x, (), flops, self.size(x)))

    def matmul(self, name: str, x: int, y: int, size_bytes: int, flops: int) -> int:
        out = self.op(name, (x, y), size_bytes, flops=flops)
        return self.record(name, out, _Gradient(x, (y,), flops, self.size(x)), _Gradient(y, (x,), flops, self.size(y)))

    def norm(self, name: str, x: int, tokens: int, weight_bytes: int) -> int:
        out = self.op(name, (x,), self.size(x), 4 * tokens, 4 * tokens)
        saved = (x, out + 1, out + 2)
        return self.record(name, out, _Gradient(None, saved, 0, weight_bytes), _Gradient(x, saved, 0, self.size(x)))

    def dropout(self, name: str, x: int) -> int:
        out = self.op(name, (x,), self.size(x), self.size(x) // 2, replay_bytes=16)
        return self.record(name, out, _Gradient(x, (out + 1,), 0, self.size(x)))

    def backward(self, loss: int) -> None:
        """The boundary, then the gradients of all that was recorded, last first; sums where values have several readers."""
        gradient = {loss: self.op("boundary", (loss,), 4, recomputable=False, phase="loss")}
        for name, out, rules in reversed(self.tape):
            given = gradient.pop(out)
            for rule in rules:
                made = given
                facts = {"flops": rule.flops, "phase": "backward"}
                if rule.of is None:
                    self.op(f"{name}.weight.grad", (given, *rule.needs), rule.size_bytes, kept=True, **facts)
                    continue
                if rule.is_view:
                    made = self.op(f"{name}.grad", (given,), 0, view=True, phase="backward")
                elif rule.size_bytes:
                    made = self.op(f"{name}.grad", (given, *rule.needs), rule.size_bytes, **facts)
                if rule.of in gradient:
                    made = self.op(f"{name}.sum", (gradient[rule.of], made), self.size(made), phase="backward")
                gradient[rule.of] = made

    def _owner(self, v: int) -> int:
        base = self.values[v].base
        return v if base is None else base


def gpt(
    layers: int, *, batch: int = 8, tokens: int = 1024, width: int = 1024, heads: int = 16, vocabulary: int = 50_257
) -> Graph:
    """Forward and backward of a GPT in two-byte floats, attention written out, as captured without fused kernels.

    Views and transposes, norms with three outputs, random dropout (replayed when it is made again), kept gradients of
    weights, and a boundary that runs once. 66 ops a layer; costs are the larger of arithmetic and traffic on the device
    above, plus a launch.
    """
    step, rows = _Step(), batch * tokens
    unit, scores, square = 2 * rows * width, 2 * batch * heads * tokens * tokens, 2 * width * width
    product, attention = 2 * rows * width * width, 2 * batch * tokens * tokens * width
    x = step.record("embed", step.op("embed", (), unit), _Gradient(None, (), 0, 2 * vocabulary * width))
    for layer in range(layers):
        name = f"h{layer}"
        normed = step.norm(f"{name}.norm1", x, rows, 4 * width)
        q, k, v = (step.linear(f"{name}.{part}", normed, unit, product, square) for part in "qkv")
        q, k, v = (step.view(f"{name}.{part}.heads", y) for part, y in zip("qkv", (q, k, v), strict=True))
        q, k, v = (step.view(f"{name}.{part}.transpose", y) for part, y in zip("qkv", (q, k, v), strict=True))
        score = step.pointwise(f"{name}.scale", step.matmul(f"{name}.qk", q, k, scores, attention))
        score = step.pointwise(f"{name}.mask", score)
        share = step.op(f"{name}.softmax", (score,), scores)
        share = step.record(f"{name}.softmax", share, _Gradient(score, (share,), 0, scores))
        mixed = step.matmul(f"{name}.av", step.dropout(f"{name}.drop1", share), v, unit, attention)
        mixed = step.view(f"{name}.merge", step.view(f"{name}.untranspose", mixed))
        out = step.dropout(f"{name}.drop2", step.linear(f"{name}.proj", mixed, unit, product, square))
        x = step.add(f"{name}.add1", x, out)
        normed = step.norm(f"{name}.norm2", x, rows, 4 * width)
        up = step.linear(f"{name}.up", normed, 4 * unit, 4 * product, 4 * square)
        active = step.pointwise(f"{name}.gelu", up, saves=(up,))
        out = step.dropout(f"{name}.drop3", step.linear(f"{name}.down", active, unit, 4 * product, 4 * square))
        x = step.add(f"{name}.add2", x, out)
    x = step.norm("norm", x, rows, 4 * width)
    logits = step.linear("head", x, 2 * rows * vocabulary, 2 * rows * width * vocabulary, 2 * vocabulary * width)
    loss = step.op("loss", (logits,), 4, kept=True)
    step.record("loss", loss, _Gradient(logits, (logits,), 0, step.size(logits)))
    step.backward(loss)
    weights = layers * (12 * square + 8 * width) + 4 * vocabulary * width
    return Graph(tuple(step.ops), tuple(step.values), resident_bytes=weights, name=f"gpt{layers}")


def gpt_of(ops: int) -> Graph:
    """`gpt` with as many layers as come closest to a number of ops."""
    one, two = len(gpt(1).ops), len(gpt(2).ops)
    return gpt(max(1, round((ops - 2 * one + two) / (two - one))))
