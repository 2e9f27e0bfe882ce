"""Compile a graph by Inductor under a plan: plan, compile, run two dry steps, measure, and plan anew with what was learnt.

Inductor fuses what a plan computes, so that the peak of the plan is a prediction. What is promised is what was
measured: the compiled step that is handed back was run on the real batch and kept the budget.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import fx

import checkmate
from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.core.simulate import simulate
from checkmate.core.units import format_at_least, format_bytes
from checkmate.frontend.split_budget import PlanFootprint
from checkmate.frontend.step_memory import StepMemory
from checkmate.torch._compat.aot import BoxedRun, functorch_config
from checkmate.torch._compat.dispatch import FakeTensor
from checkmate.torch._compat.inductor import (
    CustomPartitionerFn,
    compile_fx,
    compile_fx_inner,
    inductor_config,
    prefers_channels_last,
    use_inductor_choices,
)
from checkmate.torch.compilation.compilation import Compilation
from checkmate.torch.graph.copy import copy_graph
from checkmate.torch.inductor.scheduler import PlanChoices
from checkmate.torch.inductor.search import CalibratedSearch
from checkmate.torch.joint.capture import Capture
from checkmate.torch.measure.trial_step import measure_step
from checkmate.torch.options import Options
from checkmate.torch.partition.split import Task, partition
from checkmate.torch.passes.channels_last import with_channels_last

_log = logging.getLogger("checkmate.torch")

INDUCTOR_CONFIG: dict[str, Any] = {
    "reorder_for_peak_memory": False,  # it would undo the order of the plan
    "allow_buffer_reuse": False,  # it keeps dead buffers for later ones of their size: up to 15 % over the prediction
}
"""What Inductor is told to leave to the plan."""


class ReplaceableCallable:
    """A callable whose implementation can be replaced after AOTAutograd holds a reference to it.

    Attributes:
        run: Takes its arguments as one list and empties it.
    """

    def __init__(self, run: BoxedRun) -> None:
        self.run = run
        self._boxed_call = True  # of the instance: who wraps it copies what an instance has

    def __call__(self, args: list[Any]) -> Any:
        """Call the implementation."""
        return self.run(args)


@dataclasses.dataclass(eq=False, slots=True)
class Compiled:
    """One compilation of a graph.

    Attributes:
        run: The compiled graph.
        forward: Its forward.
        backward: Its backward; the forward again without gradients.
        planned: What was captured and its plan; None without gradients, where there is nothing to plan.
        measured: The graph that was planned, its plan with its measured memory, and the budget in bytes; None without a budget.
    """

    run: Callable[..., Any]
    forward: ReplaceableCallable
    backward: ReplaceableCallable
    planned: tuple[Capture, Result] | None
    measured: tuple[Graph, PlanFootprint, int] | None = None


class PlanPartitioner(CustomPartitionerFn):
    """Splits a joint graph as a task says.

    Args:
        task: How.
        options: What decides on the outcome besides the plan.
    """

    def __init__(self, task: Task, options: Options) -> None:
        self._task = dataclasses.replace(task, on_planned=self._note)
        self._facts = f"{sources_digest()} {options!r}"
        self.planned: tuple[Capture, Result] | None = None

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward modules that run the plan."""
        kwargs.pop("compiler", None)
        task = dataclasses.replace(self._task, layout_pass=with_channels_last) if prefers_channels_last(gm) else self._task
        return partition(gm, joint_inputs, task=task, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlanPartitioner:
        """Itself: Inductor copies its settings for the key of its cache, and a captured graph is not for copying."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """What it is identified by: its part of the cache's key."""
        return str, (str(self.uuid()),)

    def uuid(self) -> Any | None:
        """What identifies the outcome: sources, options, the graph and the plan that was made of it.

        None until there is a plan, which keeps caches out that are asked before: a hit would skip the partitioner.
        """
        if self.planned is None:
            return None
        capture, result = self.planned
        text = f"{self._facts} {capture.graph.digest} {result.plan.order}"
        return hashlib.sha256(text.encode()).hexdigest()

    def _note(self, capture: Capture, result: Result) -> None:
        self.planned = (capture, result)


def compile_by_inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], compilation: Compilation) -> Compiled | None:
    """Compile a graph of Dynamo so that its measured peak keeps the budget.

    Args:
        gm: The graph; it is not changed.
        example_inputs: Its real inputs.
        compilation: What is asked for; its plan comes from here.

    Returns:
        The cheapest compilation that was measured to keep the budget; None if none of those tried does.

    Raises:
        OptionError: A size may change, or a plan that was given takes more than the budget.
        CheckmateError: No plan.
    """
    _refuse_symbols(example_inputs)
    task, options = compilation.task, compilation.options
    search = CalibratedSearch(compilation, _compiler_fingerprint(example_inputs, options))
    best: Compiled | None = None
    while True:
        fitted = dataclasses.replace(task, plan=functools.partial(_planned, search))
        compiled = _compiled_once(gm, example_inputs, fitted, options)
        if compiled.planned is None or not search.measures:
            return compiled
        step = measure_step(compiled.run, example_inputs, hold_outputs=task.hold_outputs)
        step = search.record(step)
        chosen = search.best()
        if chosen == len(search.trials) - 1:
            best = _measured(compiled, search, step)
        del compiled
        if not search.next_candidate():
            break
    peaks = [t.outcome.memory.peak_bytes for t in search.trials]
    if best is None and options.plan is not None:
        raise OptionError(
            f"the plan that was given was measured to take {format_bytes(peaks[0])} above what is resident, and the budget "
            f"leaves {format_bytes(search.limit_bytes)}",
            hint=f"raise the budget by at least {format_at_least(peaks[0] - search.limit_bytes)}, or leave out `plan`",
        )
    if best is None:
        compilation.least_fused_bytes = search.chains.contracted.resident_bytes + min(peaks)
        _log.warning(
            "none of %d plans that Inductor compiled kept the %s that the budget leaves above what is resident (the least "
            "that was measured is %s): compiled by 'eager' instead, whose peak is the planned one",
            len(peaks),
            format_bytes(search.limit_bytes),
            format_bytes(min(peaks)),
        )
    return best


def _planned(search: CalibratedSearch, capture: Capture) -> tuple[Graph, Result]:
    """The plan that is to be compiled; what it counts as stored is marked to be stored.

    Otherwise Inductor computes a pointwise op where it is first read, and as often as it is read unless it thinks better of it:
    other memory than planned, and sums that are taken over other loops, and so in another order, in every plan.
    """
    graph, result = search.plan(capture.graph)
    for o in search.chains.stored:
        node = capture.members[o].node
        assert node is not None
        if node.all_input_nodes:  # what is made of nothing is cheaper made where it is read
            node.meta["inductor_realize_to_strides"] = True
    for member in capture.members:  # some ops of several outputs, such as pooling, are loops to Inductor too
        for getitem in member.getitems:
            getitem.meta["inductor_realize_to_strides"] = True
    return graph, result


def _compiled_once(gm: fx.GraphModule, example_inputs: Sequence[Any], task: Task, options: Options) -> Compiled:
    callables: dict[str, ReplaceableCallable] = {}

    def inner(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> ReplaceableCallable:
        which = "backward" if kwargs.get("is_backward") else "forward"
        free = inductor_config.layout_optimization and bool(kwargs.get("is_inference"))  # what was planned has its layouts
        with inductor_config.patch(layout_optimization=free):
            callables[which] = ReplaceableCallable(compile_fx_inner(module, inputs, **kwargs))
        return callables[which]

    partitioner = PlanPartitioner(task, options)
    copy = fx.GraphModule(gm, copy_graph(gm.graph))  # Inductor changes what it is given
    copy.meta = dict(gm.meta)
    patches = {**INDUCTOR_CONFIG, "custom_partitioner_fn": partitioner}
    # The backward is compiled now and not at its first run: Dynamo is still at work, and its books of a compilation
    # are kept once.
    with functorch_config.patch(force_non_lazy_backward_lowering=True), use_inductor_choices(PlanChoices()):
        run: Any = compile_fx(copy, list(example_inputs), inner_compile=inner, config_patches=patches)  # type: ignore[arg-type]
    return Compiled(run, callables["forward"], callables.get("backward", callables["forward"]), partitioner.planned)


def _measured(compiled: Compiled, search: CalibratedSearch, step: StepMemory) -> Compiled:
    assert compiled.planned is not None
    capture, result = compiled.planned
    took = format_bytes(step.peak_bytes)
    said = f"compiled by Inductor (compilation {len(search.trials)}): {took} measured above what is resident"
    compiled.planned = (capture, msgspec.structs.replace(result, remarks=(*result.remarks, said)))
    graph, plan = search.current(capture.graph, result)
    footprint = PlanFootprint(plan=plan, cost=simulate(graph, plan).cost, memory=step)
    compiled.measured = (graph, footprint, graph.resident_bytes + search.limit_bytes)
    return compiled


def _refuse_symbols(inputs: Sequence[Any]) -> None:
    for value in inputs:
        sizes = [value] if isinstance(value, torch.SymInt) else list(value.shape) if isinstance(value, torch.Tensor) else []
        if any(isinstance(size, torch.SymInt) for size in sizes):
            raise OptionError(
                "compiler='inductor' plans for sizes that do not change: what Inductor makes of a plan is measured, at one size",
                hint="compile with dynamic=False, which plans every shape for itself, or with compiler='eager'",
            )
        if isinstance(value, FakeTensor):
            raise OptionError(
                "compiler='inductor' measures the compiled step, and this one was traced without real tensors",
                hint="under DistributedDataParallel set torch._dynamo.config.optimize_ddp = False; otherwise leave out the fake "
                "mode, or use compiler='eager'",
            )


def _compiler_fingerprint(inputs: Sequence[Any], options: Options) -> str:
    """All besides a graph that decides what a compiled step takes, as text."""
    devices = {t.device for t in inputs if isinstance(t, torch.Tensor)}
    facts = {
        "torch": torch.__version__,
        "checkmate": checkmate.__version__,
        "devices": sorted(torch.cuda.get_device_name(d) if d.type == "cuda" else d.type for d in devices),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "outputs": options.outputs,
        "inductor": {k: v if isinstance(v, (int, float, str, type(None))) else repr(type(v)) for k, v in _settings().items()},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _settings() -> dict[str, Any]:
    return inductor_config.save_config_portable()


@functools.cache
def sources_digest() -> str:
    """Hash of this package's sources: another planner makes other plans."""
    digest = hashlib.sha256()
    for path in sorted(Path(checkmate.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
