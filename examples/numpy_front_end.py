"""A front end for a toy framework: a numpy tape whose steps run within a budget, bit for bit as without one."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from checkmate import Budget, Compute, Graph, Op, Result, Value
from checkmate.core.graph import BOUNDARY
from checkmate.core.units import Amount
from checkmate.frontend.calibration import Calibration, Offset, Trial, calibrate
from checkmate.frontend.options import PlanningOptions, PlanSource
from checkmate.frontend.planner import Planner, Replanner, keep_everything, planner_for
from checkmate.solvers.session import Solver

# framework: memory


class Memory:
    """An allocator that counts the bytes of the arrays that are alive, each rounded up to a multiple of ``round_to``."""

    def __init__(self, round_to: int = 1) -> None:
        self.round_to = round_to
        self.live_bytes = self.peak_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        array = np.empty(shape, dtype)
        size = -(-array.nbytes // self.round_to) * self.round_to
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(array, self._release, size)  # a view keeps the array that owns its storage alive
        return array

    def copy(self, array: np.ndarray) -> np.ndarray:
        copied = self.empty(array.shape)
        copied[...] = array
        return copied

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def _release(self, size: int) -> None:
        self.live_bytes -= size


class Random:
    """A Mersenne Twister, which is the same again once its 2,500 bytes of state are loaded."""

    STATE_BYTES = 2500

    def __init__(self, seed: int = 0) -> None:
        self.bits = np.random.MT19937(seed)
        self.fill = np.random.Generator(self.bits).random

    def save(self, memory: Memory) -> np.ndarray:
        saved, state = memory.empty((625,), np.uint32), self.bits.state["state"]
        saved[:-1], saved[-1] = state["key"], state["pos"]
        return saved

    def load(self, saved: np.ndarray) -> None:
        self.bits.state = {"bit_generator": "MT19937", "state": {"key": saved[:-1], "pos": int(saved[-1])}}


# framework: kernels


def matmul(memory: Memory, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.matmul(a, b, out=memory.empty((a.shape[0], b.shape[1])))


def tanh_gradient(memory: Memory, g: np.ndarray, y: np.ndarray) -> np.ndarray:
    out = np.multiply(y, y, out=memory.empty(y.shape))
    return np.multiply(np.subtract(1, out, out=out), g, out=out)


def dropout(memory: Memory, x: np.ndarray, *, random: Random) -> tuple[np.ndarray, np.ndarray]:
    mask = random.fill(dtype=np.float32, out=memory.empty(x.shape))
    np.multiply(np.greater(mask, 0.5, out=mask), 2, out=mask)
    return np.multiply(x, mask, out=memory.empty(x.shape)), mask


def squared_error(memory: Memory, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    work = np.subtract(x, y, out=memory.empty(x.shape))
    return np.sum(np.square(work, out=work), out=memory.empty(()))


def squared_error_gradient(memory: Memory, g: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    out = np.subtract(x, y, out=memory.empty(x.shape))
    return np.multiply(out, 2 * g, out=out)


def ones(memory: Memory, like: np.ndarray) -> np.ndarray:
    return memory.copy(np.ones(like.shape))


KERNELS: dict[str, Callable[..., Any]] = {
    "matmul": matmul,
    "matmul_tn": lambda memory, a, b: matmul(memory, a.T, b),
    "matmul_nt": lambda memory, a, b: matmul(memory, a, b.T),
    "add": lambda memory, a, b: np.add(a, b, out=memory.empty(a.shape)),
    "multiply": lambda memory, a, b: np.multiply(a, b, out=memory.empty(a.shape)),
    "tanh": lambda memory, x: np.tanh(x, out=memory.empty(x.shape)),
    "tanh_gradient": tanh_gradient,
    "dropout": dropout,
    "squared_error": squared_error,
    "squared_error_gradient": squared_error_gradient,
    "reshape": lambda memory, x, *, shape: x.reshape(shape),
    "start_backward": ones,
}

GRADIENTS: dict[str, tuple[Callable[..., Var], ...]] = {  # one rule for each input: its gradient from that of the first output
    "matmul": (lambda g, call: g.matmul(call.inputs[1], "nt"), lambda g, call: call.inputs[0].matmul(g, "tn")),
    "add": (lambda g, call: g, lambda g, call: g),
    "tanh": (lambda g, call: g.apply("tanh_gradient", call.outputs[0]),),
    "dropout": (lambda g, call: g.apply("multiply", call.outputs[1]),),
    "squared_error": (lambda g, call: g.tape.record("squared_error_gradient", (g, *call.inputs), call.inputs[0].shape),),
    "reshape": (lambda g, call: g.reshape(*call.inputs[0].shape),),
}

# framework: tape


@dataclass(frozen=True, eq=False)
class Var:
    """An array of the step, known by its shape."""

    tape: Tape
    shape: tuple[int, ...]
    trained: bool  # whether it depends on a parameter

    @property
    def size_bytes(self) -> int:
        return 4 * math.prod(self.shape)

    def apply(self, kernel: str, *others: Var) -> Var:
        return self.tape.record(kernel, (self, *others), self.shape)

    def matmul(self, other: Var, transposed: str = "") -> Var:
        rows, columns = {"": (0, 1), "tn": (1, 1), "nt": (0, 0)}[transposed]
        return self.tape.record(f"matmul_{transposed}".rstrip("_"), (self, other), (self.shape[rows], other.shape[columns]))

    def reshape(self, *shape: int) -> Var:
        return self.tape.record("reshape", (self,), shape, shape=shape)

    def dropout(self) -> Var:
        return self.tape.record("dropout", (self,), self.shape, self.shape)

    def squared_error(self, target: Var) -> Var:
        return self.tape.record("squared_error", (self, target), ())


@dataclass(frozen=True)
class Call:
    """One call of a kernel."""

    kernel: str
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    options: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Tape:
    """The calls of one step, forward and backward, with nothing computed yet."""

    parameters: list[Var] = field(default_factory=list)
    batch: list[Var] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    results: list[Var] = field(default_factory=list)  # the loss, and the gradient of each parameter

    def record(self, kernel: str, inputs: tuple[Var, ...], *shapes: tuple[int, ...], **options: Any) -> Var:
        outputs = tuple(Var(self, shape, any(x.trained for x in inputs)) for shape in shapes)
        self.calls.append(Call(kernel, inputs, outputs, options))
        return outputs[0]

    def values(self) -> list[Var]:
        return [var for call in self.calls for var in call.outputs]

    def backward(self, loss: Var) -> None:
        forward = list(self.calls)
        gradients = {loss: self.record("start_backward", (loss,), ())}
        for call in reversed(forward):
            for rule, x in zip(GRADIENTS[call.kernel], call.inputs, strict=False):
                if x.trained and call.outputs[0] in gradients:
                    part = rule(gradients[call.outputs[0]], call)
                    gradients[x] = gradients[x].apply("add", part) if x in gradients else part
        self.results.extend([loss, *(gradients[p] for p in self.parameters)])


Shapes = Sequence[tuple[int, ...]]
Model = Callable[[list[Var], list[Var]], Var]


def trace(model: Model, parameters: Shapes, batch: Shapes) -> Tape:
    """The tape of a model that computes its loss from parameters and a batch."""
    tape = Tape()
    tape.parameters.extend(Var(tape, shape, trained=True) for shape in parameters)
    tape.batch.extend(Var(tape, shape, trained=False) for shape in batch)
    tape.backward(model(tape.parameters, tape.batch))
    return tape


# front end: capture


def capture(tape: Tape) -> Graph:
    """The tape as a graph: one op a call, one value an output, in the order of the tape."""
    number = {var: v for v, var in enumerate(tape.values())}  # parameters and batch are resident, and no values
    start = next(o for o, call in enumerate(tape.calls) if call.kernel == "start_backward")
    return Graph(
        tuple(op(call, number, "backward" if o >= start else "forward") for o, call in enumerate(tape.calls)),
        tuple(value(call, var, number, tape) for call in tape.calls for var in call.outputs),
        order=tuple(pairwise(o for o, call in enumerate(tape.calls) if call.kernel == "dropout")),  # for equal masks
        resident_bytes=sum(x.size_bytes for x in tape.parameters + tape.batch),
        cost_unit="flop",
    )


def value(call: Call, var: Var, number: dict[Var, int], tape: Tape) -> Value:
    if call.kernel == "reshape":  # a view; a view of what is resident has no base in the graph
        return Value("reshape", 0, base=number.get(call.inputs[0]), kept=var in tape.results)
    return Value(call.kernel, var.size_bytes, kept=var in tape.results)


def op(call: Call, number: dict[Var, int], phase: Any) -> Op:
    return Op(
        call.kernel,
        inputs=tuple(number[x] for x in call.inputs if x in number),
        outputs=tuple(number[x] for x in call.outputs),
        cost=flops(call),
        workspace_bytes=call.inputs[0].size_bytes if call.kernel == "squared_error" else 0,
        replay_bytes=Random.STATE_BYTES if call.kernel == "dropout" else 0,
        recomputable=call.kernel != "start_backward",
        phase=phase,
        kind=BOUNDARY if call.kernel == "start_backward" else call.kernel,
    )


def flops(call: Call) -> int:
    if call.kernel.startswith("matmul"):
        return 2 * math.prod(call.inputs[0].shape) * call.outputs[0].shape[1]
    return 0 if call.kernel == "reshape" else sum(math.prod(var.shape) for var in call.outputs)


# front end: run


class Replays:
    """States of the generator for ops that are computed again, each held from the first to the last computation."""

    def __init__(self, step: Step, random: Random, memory: Memory) -> None:
        self.left = Counter(o for o in step.result.plan.order if step.graph.ops[o].replay_bytes)
        self.random, self.replayed, self.memory = random, Random(), memory
        self.saved: dict[int, np.ndarray] = {}

    def before(self, o: int) -> Random:
        self.left[o] -= 1
        if o in self.saved:
            self.replayed.load(self.saved[o])
            return self.replayed
        if self.left[o]:
            self.saved[o] = self.random.save(self.memory)
        return self.random

    def after(self, o: int) -> None:
        if not self.left[o]:
            self.saved.pop(o, None)


@dataclass(frozen=True)
class Step:
    """A training step that does what its plan says, computation by computation and free by free."""

    tape: Tape
    graph: Graph
    result: Result

    def __call__(self, arrays: Sequence[np.ndarray], random: Random, memory: Memory) -> list[np.ndarray]:
        """The loss and the gradients, from the parameters and the batch."""
        live = dict(zip(self.tape.parameters + self.tape.batch, arrays, strict=True))
        values, replays = self.tape.values(), Replays(self, random, memory)
        for step in self.result.plan.steps:
            if isinstance(step, Compute):
                self._compute(step.op, live, replays, memory)
            else:
                del live[values[step.value]]
        return [live[var] for var in self.tape.results]

    def _compute(self, o: int, live: dict[Var, np.ndarray], replays: Replays, memory: Memory) -> None:
        # A function, so that no local variable keeps an array alive when the next step runs.
        call, options = self.tape.calls[o], dict(self.tape.calls[o].options)
        if self.graph.ops[o].replay_bytes:
            options["random"] = replays.before(o)
        made = KERNELS[call.kernel](memory, *(live[x] for x in call.inputs), **options)
        live.update(zip(call.outputs, made if isinstance(made, tuple) else (made,), strict=True))
        replays.after(o)


# front end: plan


def plan_step(tape: Tape, planner: Planner) -> Step:
    """A step whose measured peak is its planned peak, where the allocator gives exactly the bytes it is asked for."""
    graph = capture(tape)
    return Step(tape, graph, planner(graph))


def compile(  # noqa: A001 - what a user of the framework expects
    tape: Tape,
    *,
    budget: Amount | Budget | None = None,
    solver: Solver | str | None = None,
    time_limit_s: float | None = 10,
    plan: PlanSource | None = None,
    round_to: int = 1,
) -> Step:
    """A step within a budget, for memory that rounds the size of every array up to a multiple of ``round_to``."""
    options = PlanningOptions.of(budget=budget, solver=solver, time_limit_s=time_limit_s, plan=plan)
    if round_to == 1 or options.plan is not None or options.budget is None:
        return plan_step(tape, planner_for(options))
    return fit(tape, options.budget, options, round_to)


# front end: calibrate


def measure(step: Step, memory: Memory) -> int:
    """Measured peak of a step on made-up arrays, resident bytes included."""
    arrays = [memory.copy(np.zeros(var.shape)) for var in step.tape.parameters + step.tape.batch]
    step(arrays, Random(), memory)
    return memory.peak_bytes


def fit(tape: Tape, budget: Budget, options: PlanningOptions, round_to: int) -> Step:
    """The cheapest step found whose measured peak keeps the budget."""
    graph = capture(tape)
    replanner = Replanner(graph, options)
    calibration = Calibration[Step | None](budget.resolve(graph), Offset(resident_bytes=graph.resident_bytes, headroom=0))

    def trial(target: int, result: Result) -> Trial[Step | None]:
        step = Step(tape, graph, result)
        return Trial.of(target, result, measure(step, Memory(round_to)), step)

    refused = calibrate(calibration, replanner, trial)
    best = calibration.best()
    if best is None or best.outcome is None:
        raise calibration.refusal(refused)
    return best.outcome


# example


def residual_network(parameters: list[Var], batch: list[Var]) -> Var:
    """A residual network with dropout."""
    first, *blocks, last = parameters
    x, target = batch
    h = x.reshape(x.shape[0], math.prod(x.shape[1:])).matmul(first)
    for w in blocks:
        h = h.apply("add", h.matmul(w).apply("tanh").dropout())
    return h.matmul(last).reshape(*target.shape).squared_error(target)


def example(width: int = 95, blocks: int = 5, rows: int = 249) -> Tape:
    parameters = [(6 * 8, width), *[(width, width)] * blocks, (width, 12)]
    return trace(residual_network, parameters, [(rows, 6, 8), (rows, 3, 4)])


def run(step: Step, memory: Memory, seed: int = 0) -> tuple[list[np.ndarray], int]:
    """The loss and the gradients of a step on random arrays, and the peak of the memory that was alive."""
    fill = Random(seed).fill
    arrays = [memory.copy(fill(var.shape, np.float32) - 0.5) for var in step.tape.parameters + step.tape.batch]
    memory.reset_peak()
    return step(arrays, Random(seed), memory), memory.peak_bytes


if __name__ == "__main__":
    kept, most = run(plan_step(example(), keep_everything), Memory())
    for budget in ("100%", "60%", "40%"):
        step = compile(example(), budget=budget)
        results, peak = run(step, Memory())
        same = all(a.tobytes() == b.tobytes() for a, b in zip(kept, results, strict=True))
        print(f"{budget:>4}: peak {peak:,} of {most:,} bytes, overhead {step.result.overhead:.3f}, same bits: {same}")
        assert same, "the loss and every gradient are the same"
        assert peak == step.result.peak_bytes, "and the peak is the planned one"
