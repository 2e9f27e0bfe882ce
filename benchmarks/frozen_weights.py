"""Frozen weights on the host, planned with recomputation, against swapping blocks by hand, on GPUs that are not there.

Steps of LoRA on frozen weights are built from configurations, matrix by matrix: the forward pass, and the backward pass with
respect to activations and LoRA's matrices. Op costs are roofline estimates for the device, and copies take the rates of its
profile. Nothing was measured: the fronts compare plans under one model.

By hand: N of n blocks are swapped and every block is checkpointed. When a block is done, the weights of the block that is n - N
blocks ahead are copied into its place, while the blocks between them run (the H2D-only swap of musubi-tuner). N = n - 1 is a ring
of one block, N = n - 2 of two. Each peak of this front, of three models, is a budget for the planner. On cards of 8 to 80 GB the
budget is what `checkmate fits` leaves for a step; these rows are printed as one table at the end. Sizes of the models:

- Flux: black-forest-labs/FLUX.1-dev, transformer/config.json: 19 double and 38 single blocks, 24 heads of 128; bfloat16.
  One image of 1024 x 1024: 4096 tokens, with 512 of text.
- Qwen-Image: Qwen/Qwen-Image, transformer/config.json: 60 double blocks, 24 heads of 128; float8 weights. The same tokens.
- Wan-14B: Wan-AI/Wan2.1-T2V-14B, config.json: 40 blocks, width 5120, MLP of 13824, attention to 512 tokens of text; float8
  weights. One video of 512 x 512 with 81 frames: 21504 tokens. Keys and values of the text have no LoRA.
- Llama-8B: meta-llama/Llama-3.1-8B, config.json: 32 layers, width 4096, 8 key-value heads, MLP of 14336, 128256 words; bfloat16.
  Two sequences of 2048 tokens; the loss takes the logits in eight pieces.
- Llama-70B: meta-llama/Llama-3.1-70B, config.json: 80 layers, width 8192, MLP of 28672; blocks in 4 bits, 64 weights with a byte
  of scale (QLoRA), and each matrix unpacked to bfloat16 for its product. One sequence of 2048 tokens.

    python benchmarks/frozen_weights.py [--cases flux llama-70b ...] [--devices H100 ...] [--seconds 20]

Rows of cases and devices that are not named stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from fresh import add_rows, of_cases

import checkmate
from checkmate import Compute, Fetch, Graph, Op, Plan, Value
from checkmate.core.plan import Step, with_frees
from checkmate.cost import load_device, roofline_ns
from checkmate.solvers.reductions.unread import needed_steps

FRONTS = ("RTX 4090", "RTX 3090", "A100 40 GB", "H100")
BY_HAND = ("flux", "qwen-image", "llama-8b")
CARDS = {"RTX 4060": 8, "RTX 4070": 12, "RTX 4080": 16, "RTX 4090": 24, "RTX 5090": 32, "L40S": 48, "H100": 80}
HOST = "64GiB"
RANK = 16


@dataclass
class Draft:
    """A graph under construction. Weights are numbered from -1 down until all are known: their ops come first."""

    device: Any
    tokens: int
    weight_bytes: float
    ops: list[Op] = field(default_factory=list)
    sizes: list[tuple[str, int, bool]] = field(default_factory=list)
    weights: list[tuple[str, int]] = field(default_factory=list)
    lora: int = 0
    phase: Any = "forward"

    def weight(self, name: str, elements: int, least_bytes: int = 0) -> int:
        """A frozen weight."""
        self.weights.append((name, int(elements * max(least_bytes, self.weight_bytes))))
        return -len(self.weights)

    def size(self, v: int) -> int:
        """Bytes of a value."""
        return self.weights[-1 - v][1] if v < 0 else self.sizes[v][1]

    def op(self, name: str, reads: tuple[int, ...], size: int, *, workspace: int = 0, unpacked: int = 0, **facts: Any) -> int:
        """An op with one output. It moves what it reads and writes, an unpacked matrix both ways."""
        moved = sum(self.size(v) for v in reads) + size + 2 * unpacked
        cost = roofline_ns(self.device, flop=facts.get("flop", 0), dtype="bfloat16", moved_bytes=moved)
        self.sizes.append((name, size, facts.get("kept", False)))
        self.ops.append(Op(name, reads, (len(self.sizes) - 1,), cost, workspace + unpacked, phase=self.phase))
        return len(self.sizes) - 1

    def act(self, name: str, reads: tuple[int, ...], width: int, flop: int = 0, unpacked: int = 0) -> int:
        """An op with an activation of some width for each token, in bfloat16."""
        return self.op(name, reads, 2 * self.tokens * width, flop=flop, unpacked=unpacked)

    def linear(self, name: str, x: int, w: int, wide: int, out: int) -> int:
        """A frozen matrix and LoRA's two beside it. Transposed in the backward pass, where it costs the same."""
        self.lora += RANK * (wide + out) if self.phase == "forward" else 0
        unpacked = 2 * wide * out if self.weight_bytes < 1 else 0
        return self.act(name, (x, w), out, 2 * self.tokens * (wide * out + RANK * (wide + out)), unpacked)

    def gradient(self, name: str, x: int, dy: int, wide: int, out: int) -> None:
        """Gradients of LoRA's two matrices."""
        self.op(name, (x, dy), 2 * RANK * (wide + out), flop=8 * self.tokens * RANK * (wide + out), kept=True)

    def graph(self, name: str) -> Graph:
        """The graph. Parameters of LoRA are bfloat16, with two moments of AdamW in float32: 10 bytes each."""
        first = len(self.weights)

        def new(values: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(-1 - v if v < 0 else v + first for v in values)

        ops = [Op(w, (), (k,), 0, recomputable=False) for k, (w, _) in enumerate(self.weights)]
        for op in self.ops:
            ops.append(Op(op.name, new(op.inputs), new(op.outputs), op.cost, op.workspace_bytes, phase=op.phase))
        values = [Value(w, size, on_host=True) for w, size in self.weights]
        values += [Value(label, size, kept=kept) for label, size, kept in self.sizes]
        return Graph(tuple(ops), tuple(values), resident_bytes=10 * self.lora, name=name)


@dataclass(frozen=True)
class Shape:
    """Widths of a block: model, queries with keys and values, what the MLP's first matrix makes and what its second reads."""

    width: int
    qkv: int
    up: int
    mid: int
    streams: int = 1  # copies of each matrix: one for tokens of the image, one for those of the text
    modulation: int = 0
    length: int = 0  # tokens that attend to each other
    text: int = 0  # tokens of a text that all others attend to besides


class Block:
    """A transformer block: attention, then an MLP, or both side by side (a single block of Flux)."""

    def __init__(self, step: Draft, k: int, shape: Shape, *, single: bool = False) -> None:
        self.step, self.shape, self.single, self.name = step, shape, single, f"b{k}"
        s, copies = shape, shape.streams
        parts = {"one": (s.width, s.qkv + s.up), "two": (s.width + s.mid, s.width)} if single else {
            "qkv": (s.width, s.qkv), "proj": (s.width, s.width), "up": (s.width, s.up), "down": (s.mid, s.width)
        }  # fmt: skip
        parts |= {"text.q": (s.width, s.width), "text.kv": (s.width, 2 * s.width), "text.o": (s.width, s.width)} if s.text else {}
        self.shapes = parts
        self.mod_w = step.weight(f"{self.name}.mod", s.modulation * copies) if s.modulation else None
        self.w = {part: step.weight(f"{self.name}.{part}", a * b * copies) for part, (a, b) in parts.items()}

    def _linear(self, part: str, x: int, *, back: bool = False) -> int:
        a, b = self.shapes[part]
        return self.step.linear(f"{self.name}.{part}{'.back' * back}", x, self.w[part], *((b, a) if back else (a, b)))

    def _read_text(self, x: int) -> int:
        """The ops by which the tokens attend to the text."""
        t, s, n = self.step, self.shape, self.name
        self.before_text, self.n3 = x, t.act(f"{n}.text.norm", (x,), s.width)
        text = t.op(f"{n}.text.kv", (self.w["text.kv"],), 4 * s.text * s.width, flop=4 * s.text * s.width**2)
        self.t = (self._linear("text.q", self.n3), text)
        self.to = t.act(f"{n}.text.attention", self.t, s.width, 4 * t.tokens * s.text * s.width)
        return t.act(f"{n}.text.add", (x, self._linear("text.o", self.to)), s.width)

    def _read_text_back(self, dx: int) -> int:
        t, s, n = self.step, self.shape, self.name
        self._lora("text.o", self.to, dx)
        reads = (*self.t, self.to, self._linear("text.o", dx, back=True))
        dq = t.act(f"{n}.text.attention.back", reads, s.width, 10 * t.tokens * s.text * s.width)
        self._lora("text.q", self.n3, dq)
        return t.act(f"{n}.text.norm.back", (self._linear("text.q", dq, back=True), self.before_text, dx), s.width)

    def _lora(self, part: str, x: int, dy: int) -> None:
        self.step.gradient(f"{self.name}.{part}.lora", x, dy, *self.shapes[part])

    def forward(self, x: int) -> int:
        """The ops of the forward pass; the output."""
        t, s, n = self.step, self.shape, self.name
        self.x = x
        self.mod = (t.op(f"{n}.mod", (self.mod_w,), 4 * s.modulation // s.width),) if self.mod_w is not None else ()
        attention = 4 * t.tokens * s.length * s.width
        self.n1 = t.act(f"{n}.norm1", (x, *self.mod), s.width)
        if self.single:
            self.h = t_h = self._linear("one", self.n1)
            self.r = t.act(f"{n}.rope", (t_h,), s.qkv)
            self.o = t.act(f"{n}.attention", (self.r,), s.width, attention)
            self.g = t.act(f"{n}.join", (t_h, self.o), s.width + s.mid)
            return t.act(f"{n}.add", (x, self._linear("two", self.g), *self.mod), s.width)
        self.q = self._linear("qkv", self.n1)
        self.r = t.act(f"{n}.rope", (self.q,), s.qkv)
        self.o = t.act(f"{n}.attention", (self.r,), s.width, attention)
        self.x1 = t.act(f"{n}.add1", (x, self._linear("proj", self.o), *self.mod), s.width)
        self.x1 = self._read_text(self.x1) if s.text else self.x1
        self.n2 = t.act(f"{n}.norm2", (self.x1, *self.mod), s.width)
        self.h = self._linear("up", self.n2)
        self.g = t.act(f"{n}.act", (self.h,), s.mid)
        return t.act(f"{n}.add2", (self.x1, self._linear("down", self.g), *self.mod), s.width)

    def backward(self, dx: int, *, first: bool) -> int:
        """The ops of the backward pass; the gradient of the input, which the first block does not need."""
        t, s, n = self.step, self.shape, self.name
        attention = 10 * t.tokens * s.length * s.width
        out = t.act(f"{n}.gate2.back", (dx, *self.mod), s.width)
        if self.single:
            self._lora("two", self.g, out)
            dg = self._linear("two", out, back=True)
            dr = t.act(f"{n}.attention.back", (self.r, self.o, dg), s.qkv, attention)
            dh = t.act(f"{n}.join.back", (self.h, dg, dr), s.qkv + s.up)
            self._lora("one", self.n1, dh)
            dn, at = (dh, "one")
        else:
            self._lora("down", self.g, out)
            dh = t.act(f"{n}.act.back", (self.h, self._linear("down", out, back=True)), s.up)
            self._lora("up", self.n2, dh)
            dx = t.act(f"{n}.norm2.back", (self._linear("up", dh, back=True), self.x1, dx, *self.mod), s.width)
            dx = self._read_text_back(dx) if s.text else dx
            dp = t.act(f"{n}.gate1.back", (dx, *self.mod), s.width)
            self._lora("proj", self.o, dp)
            dr = t.act(f"{n}.attention.back", (self.r, self.o, self._linear("proj", dp, back=True)), s.qkv, attention)
            dq = t.act(f"{n}.rope.back", (self.q, dr), s.qkv)
            self._lora("qkv", self.n1, dq)
            dn, at = (dq, "qkv")
        if first:
            return dx
        return t.act(f"{n}.norm1.back", (self._linear(at, dn, back=True), self.x, dx, *self.mod), s.width)


def built(name: str, device: Any, tokens: int, weight_bytes: float, shapes: list[tuple[Shape, bool]], words: int = 0) -> Graph:
    """The step of a stack of blocks, with an embedding and a loss over words if there are any."""
    step = Draft(device, tokens, weight_bytes)
    width = shapes[0][0].width
    table = (step.weight("embedding", words * width, 2),) if words else ()
    blocks = [Block(step, k, shape, single=single) for k, (shape, single) in enumerate(shapes)]
    head = (step.weight("head", words * width, 2),) if words else ()
    x = step.op("embed", table, 2 * tokens * width) if words else step.act("embed", (), width)
    for block in blocks:
        x = block.forward(x)
    step.phase = "loss"
    dx = step.op("loss", (x, *head), 2 * tokens * width, flop=6 * tokens * width * words, workspace=tokens // 8 * words * 4)
    step.phase = "backward"
    for block in reversed(blocks):
        dx = block.backward(dx, first=block is blocks[0])
    return step.graph(name)


def flux(device: Any) -> Graph:
    """Flux with 4096 tokens of an image and 512 of text."""
    tokens = 4096 + 512
    double = Shape(3072, 3 * 3072, 4 * 3072, 4 * 3072, 2, 6 * 3072 * 3072, tokens)
    single = Shape(3072, 3 * 3072, 4 * 3072, 4 * 3072, 1, 3 * 3072 * 3072, tokens)
    return built("flux", device, tokens, 2, [(double, False)] * 19 + [(single, True)] * 38)


def qwen_image(device: Any) -> Graph:
    """Qwen-Image with float8 weights, 4096 tokens of an image and 512 of text."""
    tokens = 4096 + 512
    return built(
        "qwen-image", device, tokens, 1, [(Shape(3072, 3 * 3072, 4 * 3072, 4 * 3072, 2, 6 * 3072 * 3072, tokens), False)] * 60
    )


def llama_8b(device: Any) -> Graph:
    """Llama 8B in bfloat16 with two sequences of 2048 tokens."""
    return built("llama-8b", device, 4096, 2, [(Shape(4096, 6144, 2 * 14336, 14336, length=2048), False)] * 32, 128256)


def wan(device: Any) -> Graph:
    """Wan 14B with float8 weights and a video of 21 x 32 x 32 tokens."""
    tokens = 21 * 32 * 32
    return built("wan-14b", device, tokens, 1, [(Shape(5120, 3 * 5120, 13824, 13824, length=tokens, text=512), False)] * 40)


def llama_70b(device: Any) -> Graph:
    """Llama 70B with blocks in 4 bits and one sequence of 2048 tokens."""
    shape = Shape(8192, 10240, 2 * 28672, 28672, length=2048)
    return built("llama-70b", device, 2048, 33 / 64, [(shape, False)] * 80, 128256)


CASES = {"flux": flux, "qwen-image": qwen_image, "wan-14b": wan, "llama-8b": llama_8b, "llama-70b": llama_70b}


def by_hand(graph: Graph, swapped: int, host: checkmate.HostMemory) -> Plan:
    """The plan that swaps some blocks and checkpoints each."""
    names = [op.name.split(".")[0] for op in graph.ops]
    blocks = sorted({name for name in names if name[1:].isdigit()}, key=lambda name: int(name[1:]))
    count, first = len(blocks), sum(v.on_host for v in graph.values)
    ring = count - swapped
    forward = {b: [o for o in range(first, len(names)) if names[o] == b and graph.ops[o].phase == "forward"] for b in blocks}
    backward = {b: [o for o in range(first, len(names)) if names[o] == b and graph.ops[o].phase == "backward"] for b in blocks}
    weights = {b: [graph.ops[o].outputs[0] for o in range(first) if names[o] == b] for b in blocks}
    steps: list[Step] = [Compute(o) for o in range(first) if names[o] not in blocks[ring:]]
    steps += [Compute(o) for o in range(first, len(names)) if names[o] == "embed"]
    for k, b in enumerate(blocks):
        steps += [Compute(o) for o in forward[b]]
        if k < swapped:
            steps += [Fetch(v) for v in weights[blocks[k + ring]]]
    steps += [Compute(o) for o in range(first, len(names)) if names[o] == "loss"]
    for k in reversed(range(count)):
        steps += [Compute(o) for o in (*forward[blocks[k]], *backward[blocks[k]])]
        if k - ring >= 0:
            steps += [Fetch(v) for v in weights[blocks[k - ring]]]
    return with_frees(graph, needed_steps(checkmate.Problem(graph, 0), steps), host)


def front(graph: Graph, host: checkmate.HostMemory) -> list[tuple[int, checkmate.Timeline]]:
    """Swapped blocks and timelines by hand, from the smallest peak up, each faster than those before it."""
    count = len({name for op in graph.ops if (name := op.name.split(".")[0])[1:].isdigit()})
    tried = sorted({count - 1, count - 2, *(count * share // 8 for share in (7, 6, 5, 4, 2, 0))}, reverse=True)
    points: list[tuple[int, checkmate.Timeline]] = []
    for swapped in tried:
        timeline = checkmate.simulate(graph, by_hand(graph, swapped, host))
        assert checkmate.validate(graph, timeline.plan, timeline.peak_bytes, cost=timeline.cost) == ()
        if not points or timeline.cost < points[-1][1].cost:
            points.append((swapped, timeline))
    return points


def rows(name: str, device: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Rows of a case on a device: at the peaks of the front by hand, and within the memory of the card."""
    profile = load_device(device)
    graph, host = CASES[name](profile), profile.host_memory(HOST)
    left = profile.memory_bytes - profile.context_bytes
    step = planned(graph, host, seconds)
    facts = {"case": name, "device": device}
    for swapped, hand in front(graph, host) if device in FRONTS and name in BY_HAND else ():
        by_hand = {"by_hand_ns": hand.cost, "by_hand_fetched_bytes": hand.copied_bytes("in")}
        at = {"peak_gib": round(hand.peak_bytes / 2**30, 2), "fits_the_device": hand.peak_bytes <= left}
        found = step(hand.peak_bytes)
        share = {"share": round(found["ours_ns"] / hand.cost, 4)} if "ours_ns" in found else {}
        yield {**facts, "swapped": swapped, **at, **by_hand, **found, **share}
    if device in CARDS:
        budget = left - profile.blas_workspace_bytes - round(0.03 * profile.memory_bytes)
        yield {**facts, "swapped": None, "peak_gib": round(budget / 2**30, 2), "gb": CARDS[device], **step(budget)}


def planned(graph: Graph, host: checkmate.HostMemory, seconds: float) -> Callable[[int], dict[str, Any]]:
    """A function from budgets to figures of the planner's answer."""
    facts = {
        "weights_bytes": sum(v.size_bytes for v in graph.values if v.on_host),
        "ops": len(graph.ops),
        "once_ns": graph.cost,
        "bus_bytes_per_s": host.in_bytes_per_s,
        "seconds": seconds,
    }

    def within(budget: int) -> dict[str, Any]:
        problem, limits = checkmate.Problem(graph, budget, host=host), checkmate.Limits(time_s=seconds)
        result = checkmate.solve(problem, limits=limits, raise_on_failure=False)
        if result.plan is None:
            smallest = checkmate.min_budget(graph, limits=limits, host=host)
            if smallest.peak_bytes > budget:
                return {**facts, "smallest_bytes": smallest.peak_bytes, "floor_bytes": smallest.floor_bytes}
            result = checkmate.solve(problem, limits=limits, initial=smallest.plan)
        ours = checkmate.simulate(graph, result.plan)
        computed = set(result.plan.order)
        there = [v for v, value in enumerate(graph.values) if value.on_host and graph.producer[v] in computed]
        return {
            **facts,
            "bound_ns": round(result.bound),
            "elapsed_s": round(result.elapsed_s, 1),
            "ours_ns": ours.cost,
            "gap": round(result.gap, 4),
            "waits_ns": ours.waited,
            "recomputations": len(result.plan.order) - len(computed),
            "there_bytes": sum(graph.values[v].size_bytes for v in there),
            "fetched_bytes": ours.copied_bytes("in"),
            "offloaded_bytes": ours.copied_bytes("out"),
        }

    return within


def table(found: list[dict[str, Any]]) -> str:
    """Which card for which model: time over that of keeping everything, and the gap in percent; or the smallest peak."""
    cells: dict[str, dict[str, str]] = {name: {} for name in CASES}
    for row in found:
        if row["swapped"] is None:
            smallest, once = row.get("smallest_bytes", 0), row["once_ns"]
            cell = f"from {smallest / 2**30:.1f} GiB" if smallest else f"{row['ours_ns'] / once:.2f} ({100 * row['gap']:.0f})"
            cells[row["case"]][row["device"]] = cell
    lines = ["| step | " + " | ".join(f"{name}, {gb} GB" for name, gb in CARDS.items()) + " |", "|---|" + "---:|" * len(CARDS)]
    lines += [f"| {name} | " + " | ".join(of.get(card, "") for card in CARDS) + " |" for name, of in cells.items()]
    return "\n".join(lines)


def main() -> None:
    """Run the named cases, keep the rows of the others, write the JSON and print the table."""
    options = of_cases(__doc__, CASES, [*dict.fromkeys([*FRONTS, *CARDS])], 20.0)
    found = (row for device in options.devices for case in options.cases for row in rows(case, device, options.seconds))
    print(table(add_rows(__file__, found, ("case", "device", "swapped"))))


if __name__ == "__main__":
    main()
