"""Random regions of random networks: what runs in pieces against what runs whole, on the same data.

``python -m tests.torch.chunking.random_regions [--database] FIRST LAST`` prints what happened to the networks of these seeds, or
to these ops of PyTorch's own database.
"""

from __future__ import annotations

import itertools
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from checkmate.torch._compat.aot import aot_autograd, default_partition, is_tangent
from checkmate.torch._compat.dispatch import no_dispatch
from checkmate.torch.chunking.bits import keeps_bits
from checkmate.torch.chunking.choose import cuttable
from checkmate.torch.chunking.program import CHUNKED, NotChunkable, chunk_ops_of
from checkmate.torch.chunking.regions import Region, closed, grow
from checkmate.torch.chunking.replace import with_regions
from checkmate.torch.chunking.rules.lookup import rules_of
from checkmate.torch.chunking.rules.placements import Layout, Split
from checkmate.torch.chunking.stages import stages_of, with_private_operands
from checkmate.torch.chunking.unit_tangent import unit_tangent_of
from checkmate.torch.graph.op_properties import makes_views, op_properties
from checkmate.torch.graph.traced import outputs
from checkmate.torch.passes.prepare import prepare
from tests.torch.chunking.random_networks import random_network

aten = torch.ops.aten
DATABASE = [
    op
    for op in op_db
    if op.supports_autograd and torch.float32 in op.supported_dtypes("cpu") and not op.name.startswith("sparse.")
]

MOST_REGIONS = 6
"""Regions that are tried in each network; tracing it takes longer than any of them."""


@dataclass(frozen=True, eq=False)
class Step:
    """A traced step with its inputs.

    Attributes:
        joint: The joint module, after all passes that precede chunking.
        inputs: Values of its placeholders.
    """

    joint: fx.GraphModule
    inputs: list[Any]


def traced(function: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor]) -> Step | None:
    """The joint graph of a loss as Checkmate plans it, with the inputs of one step; None where nothing has a gradient."""
    found: list[tuple[fx.GraphModule, list[Any]]] = []
    called: list[list[Any]] = []

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        found.append((joint, list(inputs)))
        return default_partition(joint, inputs, **options)

    def forward(module: fx.GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            called.append([a.clone() if isinstance(a, torch.Tensor) else a for a in args])
            return module(*args)

        return run

    backend = aot_autograd(fw_compiler=forward, bw_compiler=lambda module, _: module, partition_fn=partition)
    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=False)(*leaves)
    if not found:
        return None
    joint = cuttable(prepare(found[0][0]))
    tangents = [torch.full(n.meta["val"].shape, 1.5, dtype=n.meta["val"].dtype) for n in joint.graph.nodes if is_tangent(n)]
    inputs = [
        _like(value.detach(), n) if isinstance(value, torch.Tensor) else value
        for value, n in zip([*called[0], *tangents], joint.graph.find_nodes(op="placeholder"), strict=True)
    ]
    step = Step(joint, inputs)
    try:
        Run(joint, 0)(inputs)
    except RuntimeError:  # PyTorch traced other strides than its kernels return, and a view fails
        return None
    return step


def step_of(function: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> Step:
    """The traced step of a loss that has a gradient."""
    step = traced(function, leaves)
    assert step is not None
    return step


def region_at(step: Step, op: Any, dims: tuple[int, ...], count: int, **options: Any) -> Region:
    """The region around the first result of an op."""
    seed = next(n for n in step.joint.graph.nodes if n.target is op)
    found = grow(seed, Split(dims), count, **options)
    assert found is not None
    return found


def _like(value: torch.Tensor, node: fx.Node) -> torch.Tensor:
    layout = Layout.of(node.meta["val"])
    assert layout.shape == tuple(value.shape) and layout.dtype is value.dtype
    return layout.empty().copy_(value)


def random_regions(rng: random.Random, graph: fx.Graph) -> list[Region]:
    """One region around a random tensor, or several without common ops; none where nothing grows there."""
    seeds = [
        (value, rule.outputs[place])
        for op in graph.nodes
        if op.op == "call_function" and not makes_views(op)
        for place, value in enumerate(outputs(op))
        if value is not None
        for rule in rules_of(op)
        if isinstance(rule.outputs[place], Split)
    ]
    found: list[Region] = []
    taken: set[fx.Node] = set()
    for _ in range(rng.choice([1, 1, 1, 2, 3]) if seeds else 0):
        seed, split = rng.choice(seeds)
        assert isinstance(split, Split)
        length = split.length(seed.meta["val"].shape)
        count = rng.choice([2, 3, 4, 5, 8, length])
        left_out = {op for op in graph.nodes if rng.random() < 0.05} if rng.random() < 0.2 else set[fx.Node]()
        excluded = taken | left_out
        region = grow(
            seed,
            split,
            count,
            least_share=rng.choice([0.05, 0.25, 0.5, 1.0]),
            allows=lambda op, excluded=excluded: op not in excluded,
            exact=rng.random() > 0.6,
        )
        if region is not None:
            if len(region.rules) % 3:
                region = closed(region, lambda op, e=excluded: op not in e)
            if not region.exact and len(region.rules) % 2:
                region = with_private_operands(region, stages_of(region, graph), graph, lambda op, e=excluded: op not in e)
            found.append(region)
            taken.update(region.rules)
    return found


@dataclass(frozen=True)
class Outcome:
    """What became of some regions.

    Attributes:
        kind: ``"exact"`` where the same bits were promised, ``"ahead"`` where gradients were computed with a tangent of one,
            ``"sums"``, ``"other kernels"`` where bits differ on random data, ``"other strides"`` where bits were promised
            and kernels outside return other strides than PyTorch traced for them, ``"refused"`` where an op does not take
            slices, or ``"none"``.
        wrong: What is not as it should be.
    """

    kind: str
    wrong: tuple[str, ...] = ()


def outcome_of(step: Step, regions: Sequence[Region], state: int) -> Outcome:
    """Run a step whole and with regions in pieces, and compare.

    Args:
        step: The step.
        regions: Regions of its graph.
        state: Seed of the random generator.
    """
    graph = step.joint.graph
    ahead = [unit_tangent_of(region, graph) if state % 2 else None for region in regions]
    try:
        parts = [part for region, tangent in zip(regions, ahead, strict=True) for part in chunk_ops_of(region, graph, tangent)]
        pieces = with_regions(step.joint, parts)
    except NotChunkable:
        return Outcome("refused")
    exact = not any(ahead) and not any(region.sums for region in regions) and all(map(keeps_bits, parts))
    whole = Run(step.joint, state)
    expected = whole(step.inputs)
    run = Run(pieces, state)
    got = run(step.inputs)
    # Kernels whose results have other strides than PyTorch traces for them have so in the whole step too.
    others = run.other_layouts.items() if not whole.other_layouts else ()
    wrong = [f"{name} is {is_} and was traced as {was}" for name, (is_, was) in others]
    if not whole.other_layouts and list(map(_layout, got)) != list(map(_layout, expected)):
        wrong.append("an output has another layout")
    sums = any(region.sums for region in regions)
    if exact and whole.other_layouts:
        # An op before the region returned other strides than were traced, which those after it read in the traced ones.
        kind, exact = "other strides", False
    else:
        kind = "exact" if exact else "ahead" if any(ahead) else "sums" if sums else "other kernels"
    if exact:
        wrong += [f"output {i} has other bits" for i, pair in enumerate(zip(got, expected, strict=True)) if not _same_bits(*pair)]
    else:
        made = [pair for part in parts for pair in zip(part.program.results, part.program.sums, strict=True)]
        added = [layout.dtype for layout, is_sum in made if is_sum and layout.dtype.is_floating_point]
        coarsest = max((torch.finfo(dtype).eps for dtype in added), default=0.0)
        wrong += _errors(step, whole.drawn, expected, got, coarsest)
    return Outcome(kind, tuple(wrong))


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    """Type, shape and strides, as far as these say where an element is."""
    return (
        value.dtype,
        tuple(value.shape),
        tuple(s for s, n in zip(value.stride(), value.shape, strict=True) if n > 1 and value.numel()),
    )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    return torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b)))


FACTOR, RUNS = 4.0, 3
"""How many times the error of the whole step, the largest of some runs, that in pieces may be."""


def _errors(
    step: Step, drawn: dict[str, Any], expected: list[torch.Tensor], got: list[torch.Tensor], coarsest: float
) -> Iterator[str]:
    """Outputs whose error against float64 is larger than rounding explains.

    That is judged by the errors of the whole step on inputs that differ by a rounding: one run alone may be right by luck. All
    of them have the draws of one run, and compute from these: with the *results* of a dropout kept as well, no rounding before
    it would be an error of the whole step, and each would be one of the pieces.

    ``coarsest`` is the precision of the terms that are added up, each of which is rounded to it. A loss of one number in
    bfloat16 that is read as float32 is too few numbers for the errors of some runs to show that: they may all be right by luck.
    """
    exact = Run(step.joint, 0, drawn, torch.float64)([_as(value, torch.float64) for value in step.inputs])
    near = [expected]
    for k in range(RUNS):
        near.append(Run(step.joint, 0, drawn)([_nudged(value, k) for value in step.inputs]))
    for i, (value, right) in enumerate(zip(got, exact, strict=True)):
        if not value.is_floating_point():
            if not torch.equal(value, expected[i]):
                yield f"output {i} differs"
            continue
        if value.shape != right.shape or value.dtype is not expected[i].dtype:
            yield f"output {i} has another shape or type"
            continue
        if not torch.equal(value.isfinite(), expected[i].isfinite()):
            yield f"output {i} is finite at other places"
            continue
        usual = max(_distance(other[i], right) for other in near)
        allowed = FACTOR * usual + max(4 * torch.finfo(value.dtype).eps, coarsest) * _size(right)
        error = _distance(value, right)
        if not error <= allowed:
            yield f"output {i} has an error of {error:.2e}, and the whole step {usual:.2e}, of {_size(right):.2e}"


def _distance(value: torch.Tensor, right: torch.Tensor) -> float:
    return _size(value.double() - right)


def _size(value: torch.Tensor) -> float:
    return value.nan_to_num(0.0, 0.0, 0.0).norm().item()


def _as(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _nudged(value: Any, seed: int) -> Any:
    """A tensor whose elements are rounded up or down, or not."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    steps = torch.randint(-1, 2, value.shape, generator=torch.Generator().manual_seed(seed))
    return _like_strides(value * (1 + torch.finfo(value.dtype).eps * steps), value)


def _like_strides(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(value)


def _dropout(args: Any, then: Any, result: Any) -> Any:
    x, probability, _ = args
    return x * result[1] * (1 / (1 - probability) if probability < 1 else 0.0), result[1]


def _normal(args: Any, then: Any, result: Any) -> Any:
    (mean, deviation), (mean_then, deviation_then) = args, then
    return mean + (result - mean_then) / deviation_then * deviation


_SAME_DRAWS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    aten.native_dropout.default: _dropout,
    aten.normal.Tensor_Tensor: _normal,
    aten.normal.Tensor_float: _normal,
    aten.rrelu_with_noise_functional.default: lambda args, then, result: (args[0] * result[1], result[1]),
}
"""What random ops return for other values of their arguments, given those of a run and what they returned in it."""


class Run(fx.Interpreter):
    """Runs a joint module.

    Args:
        module: The module.
        state: Seed of the random generator.
        drawn: Arguments and results of random ops by name, which then compute with the same draws.
        dtype: Type of all floating-point tensors in place of their own.

    Attributes:
        drawn: Arguments and results of the random ops.
        other_layouts: By name of a node, its layout and that of its traced tensor, where they differ.
    """

    def __init__(
        self, module: fx.GraphModule, state: int, drawn: dict[str, Any] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.state, self.given, self.dtype = state, drawn, dtype
        self.drawn: dict[str, Any] = {}
        self.other_layouts: dict[str, tuple[Any, Any]] = {}

    def __call__(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """The outputs that are tensors, as they are when the step is over."""
        with torch.random.fork_rng(devices=[]), torch.no_grad(), no_dispatch():
            torch.manual_seed(self.state)
            copies = [_like_strides(v, v) if isinstance(v, torch.Tensor) else v for v in inputs]
            result = self.run(*copies, enable_io_processing=False)
        return [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]

    def run_node(self, n: fx.Node) -> Any:
        random_op = n.op == "call_function" and n.target is not CHUNKED and op_properties(n).random
        if random_op and self.given is not None:
            then, result = pytree.tree_map(lambda t: _as(t, self.dtype) if self.dtype else t, self.given[n.name])
            args, _ = self.fetch_args_kwargs_from_env(n)
            return _SAME_DRAWS[n.target](args, then, result) if n.target in _SAME_DRAWS else result
        result = super().run_node(n)
        if random_op:
            args, _ = self.fetch_args_kwargs_from_env(n)
            if n.target not in _SAME_DRAWS and any(isinstance(a, torch.Tensor) and a.is_floating_point() for a in args):
                raise TypeError(f"{n.target}: how its results depend on its inputs is not known")
            self.drawn[n.name] = args, result
        made, traced_as = result, n.meta.get("val")
        if self.dtype is None and isinstance(made, torch.Tensor) and isinstance(traced_as, torch.Tensor):
            layouts = _layout(made), _layout(traced_as)
            if layouts[0] != layouts[1]:
                self.other_layouts[n.name] = layouts
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if self.dtype is not None:
            args, kwargs = pytree.tree_map(self._typed, (args, kwargs))
        return super().call_function(target, args, kwargs)

    def _typed(self, value: Any) -> Any:
        return self.dtype if isinstance(value, torch.dtype) and value.is_floating_point else value


def results(step: Step | None, rng: random.Random) -> Iterator[tuple[Outcome, list[Region]]]:
    """What becomes of random regions of a step."""
    for _ in range(MOST_REGIONS if step is not None else 0):
        assert step is not None
        regions = random_regions(rng, step.joint.graph)
        yield (outcome_of(step, regions, rng.randrange(1 << 16)) if regions else Outcome("none")), regions


def step_of_seed(seed: int) -> tuple[str, Step | None, random.Random]:
    """The step of a random network."""
    rng = random.Random(seed)
    net = random_network(rng)
    return f"{seed} {net.names}", traced(net, net.leaves), rng


def step_of_database(number: int) -> tuple[str, Step | None, random.Random]:
    """The step of one op of PyTorch's own tests, of what is made of its inputs and read by a loss; None if it has none."""
    rng = random.Random(number)
    op = DATABASE[number]
    torch.manual_seed(number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=True), 24))
    sizes = [
        max((t.numel() for t in pytree.tree_leaves(_arguments(sample)) if isinstance(t, torch.Tensor)), default=0)
        for sample in samples
    ]
    sample = _arguments(rng.choice([sample for sample, size in zip(samples, sizes, strict=True) if size >= min(8, max(sizes))]))
    flat, structure = pytree.tree_flatten(sample)
    places = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]

    def loss(*leaves: torch.Tensor) -> torch.Tensor:
        values = list(flat)
        for place, leaf in zip(places, leaves, strict=True):
            values[place] = leaf * 1.5 if leaf.is_floating_point() else leaf
        args, kwargs = pytree.tree_unflatten(values, structure)
        made = [t for t in pytree.tree_leaves(op(*args, **kwargs)) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        return sum(t.tanh().square().sum() for t in made)  # type: ignore[return-value]

    name = f"{number} {op.name}.{op.variant_test_name}"
    # What sets a seed before an op ends Dynamo's graph there: the op itself would not be tested.
    unseeded = patch.object(common_methods_invocations, "wrapper_set_seed", lambda call, *args, **kwargs: call(*args, **kwargs))
    try:
        with unseeded, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return name, traced(loss, [flat[place].detach().requires_grad_(flat[place].requires_grad) for place in places]), rng
    except Exception:  # noqa: BLE001 - what Dynamo does not trace has no graph to test
        return name, None, rng


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (sample.input, *sample.args), sample.kwargs


def main(steps: Iterable[tuple[str, Step | None, random.Random]], report: Callable[[str], object]) -> None:
    """Run random regions of steps, and report what is wrong, and how many regions there were of each kind.

    Args:
        steps: Name, step and random numbers of each.
        report: Called with what is to be printed.
    """
    torch.set_num_threads(1)
    tally: Counter[str] = Counter()
    for name, step, rng in steps:
        tally["steps" if step is not None else "not traced"] += 1
        for outcome, regions in results(step, rng):
            tally[outcome.kind] += len(regions) or 1
            if outcome.wrong:
                tally["wrong"] += 1
                where = [(r.seed.name, r.count, str(r.splits[r.seed]), len(r.rules)) for r in regions]
                report(f"{outcome.kind} {where} {outcome.wrong[:4]} {name}\n")
    report(f"{dict(tally)}\n")


if __name__ == "__main__":
    *options, begin, end = sys.argv[1:]
    found = step_of_database if options == ["--database"] else step_of_seed
    main(map(found, range(int(begin), int(end))), sys.stdout.write)
