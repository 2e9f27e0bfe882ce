"""Compile a graph by Inductor under a plan: plan, generate code, count what it takes, and plan again with a corrected target.

Inductor fuses ops and decides itself which values it stores, so that the planned peak is a prediction. What the generated code
takes is counted before its kernels are built, and only those of the chosen plan are. The budget is kept by measuring: the
compiled step that is returned was run on the real batch, and its measured peak was within the budget.
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
from checkmate.core.result import Result
from checkmate.core.units import format_at_least, format_bytes
from checkmate.frontend.step_memory import StepMemory
from checkmate.torch._compat.aot import BoxedRun, functorch_config
from checkmate.torch._compat.cpp_kernels import PendingKernels
from checkmate.torch._compat.dispatch import FakeTensor
from checkmate.torch._compat.inductor import (
    CustomPartitionerFn,
    compile_fx,
    compile_fx_inner,
    inductor_config,
    prefers_channels_last,
    unfused_addmm,
    use_inductor_choices,
)
from checkmate.torch.compilation.compilation import Compilation
from checkmate.torch.graph.copy import copy_graph
from checkmate.torch.inductor.account import Account
from checkmate.torch.inductor.scheduler import PlanChoices
from checkmate.torch.inductor.search import CalibratedSearch
from checkmate.torch.inductor.whole_step import WHOLE_STEP_CONFIG, WholeStep
from checkmate.torch.joint.capture import Capture
from checkmate.torch.measure.trial_step import measure_step, measure_whole_step
from checkmate.torch.options import Options
from checkmate.torch.partition.split import CapturedJoint, Recapture, Task, partition
from checkmate.torch.passes.channels_last import with_channels_last

_log = logging.getLogger("checkmate.torch")

INDUCTOR_CONFIG: dict[str, Any] = {
    "reorder_for_peak_memory": False,  # it would undo the order of the plan
    "allow_buffer_reuse": False,  # it keeps dead buffers for later ones of equal size: up to 15 % above the planned peak
}
"""Decisions of Inductor that are left to the plan."""


class ReplaceableCallable:
    """A callable whose implementation can be replaced after AOTAutograd holds a reference to it.

    Attributes:
        run: The implementation; it takes its arguments as one list, which it clears.
    """

    def __init__(self, run: BoxedRun) -> None:
        self.run = run
        # AOTAutograd looks for this attribute. Its wrappers copy attributes of instances (functools.wraps), not of classes.
        self._boxed_call = True

    def __call__(self, args: list[Any]) -> Any:
        """Call the implementation."""
        return self.run(args)


@dataclasses.dataclass(eq=False, slots=True)
class Compiled:
    """One compilation of a graph.

    Attributes:
        run: The compiled graph.
        forward: Its forward.
        backward: Its backward; the same object as ``forward`` for a graph without gradients.
        kernels: Its C++ kernels; they have to be built before it runs.
        whole: The same as a whole step, if it is one.
        planned: The capture and its plan; None for a graph without gradients, which is not planned.
        counted: The memory of its step as counted in its code; None if that is not known.
        joint: The captured joint graph; None for a graph without gradients.
        measured: The captured joint graph, its plan and the measured memory; None without a budget.
    """

    run: Callable[..., Any]
    forward: ReplaceableCallable
    backward: ReplaceableCallable
    kernels: PendingKernels
    planned: tuple[Capture, Result] | None
    counted: StepMemory | None = None
    joint: CapturedJoint | None = None
    whole: WholeStep | None = None
    measured: tuple[CapturedJoint, Result, StepMemory] | None = None


class PlanPartitioner(CustomPartitionerFn):
    """Plans a joint graph and splits it into forward and backward; Inductor's `custom_partitioner_fn`.

    Args:
        task: How the graph is planned and split.
        options: The user's options; they are part of the cache key.

    Attributes:
        planned: The capture and its plan, once the partitioner has run.
        joint: The captured joint graph, once the partitioner has run.
    """

    def __init__(self, task: Task, options: Options) -> None:
        self._task = dataclasses.replace(task, on_planned=self._record_plan)
        self._settings = f"{sources_digest()} {options!r}"
        self.planned: tuple[Capture, Result] | None = None
        self.joint: CapturedJoint | None = None

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and backward modules of the plan."""
        kwargs.pop("compiler", None)
        return partition(gm, joint_inputs, task=self.task_for(gm), **kwargs)

    def task_for(self, gm: fx.GraphModule) -> Task:
        """How a graph is planned and split.

        Args:
            gm: The graph.
        """
        return dataclasses.replace(self._task, layout_pass=with_channels_last) if prefers_channels_last(gm) else self._task

    def __deepcopy__(self, memo: dict[int, Any]) -> PlanPartitioner:
        """The same object: Inductor copies its configuration to make a cache key, and a captured graph cannot be copied."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as its `uuid`: Inductor's cache key is a hash of the pickled configuration."""
        return str, (str(self.uuid()),)

    def uuid(self) -> Any | None:
        """A hash of everything that decides on the modules: the package's sources, the options, the graph and its plan.

        None until there is a plan. Inductor then bypasses caches that it would look into before it partitions, where a hit would
        skip the plan.
        """
        if self.planned is None:
            return None
        capture, result = self.planned
        text = f"{self._settings} {capture.graph.digest} {result.plan.order}"
        return hashlib.sha256(text.encode()).hexdigest()

    def _record_plan(self, joint: CapturedJoint, result: Result) -> None:
        self.joint, self.planned = joint, (joint.capture, result)


def compile_by_inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], compilation: Compilation) -> Compiled | None:
    """Compile a graph of Dynamo so that its measured peak keeps the budget.

    Args:
        gm: The graph; it is not changed.
        example_inputs: Its real inputs; the trial steps run on them.
        compilation: Options, resident memory and planner of the graph.

    Returns:
        The cheapest compilation whose measured peak keeps the budget; None if no compilation that was tried keeps it.

    Raises:
        OptionError: The graph has symbolic sizes, or the given plan needs more than the budget.
        CheckmateError: No plan was found.
    """
    _refuse_unmeasurable(example_inputs)
    task, options = compilation.task, compilation.options
    search = CalibratedSearch(compilation, _compiler_fingerprint(example_inputs, options))
    compilations: list[Compiled] = []
    best: Compiled | None = None
    while True:
        whole = WholeStep() if compilation.hooks.whole else None
        planning = dataclasses.replace(task, plan=functools.partial(_plan, search))
        compiled = _generate(gm, example_inputs, planning, options, whole)
        if compiled.planned is None or not search.measures:
            compiled.kernels.build()
            return compiled
        compilations.append(compiled)
        search.record(compiled.counted or _measure(compiled, example_inputs, task), measured=compiled.counted is None)
        if search.next_candidate():
            continue
        chosen = search.best()
        while chosen is not None and not search.trials[chosen].measured:
            search.correct(chosen, _measure(compilations[chosen], example_inputs, task))
            chosen = search.best()
        if chosen is not None:
            best = _with_measurement(compilations[chosen], search, chosen)
        if chosen is not None or not search.next_candidate():
            break
    peaks = [t.outcome.memory.peak_bytes for t in search.trials]
    if best is None and options.plan is not None:
        raise OptionError(
            f"the given plan has a measured peak of {format_bytes(peaks[0])} above the resident bytes, and the budget leaves "
            f"{format_bytes(search.limit_bytes)}",
            hint=f"raise the budget by at least {format_at_least(peaks[0] - search.limit_bytes)}, or leave out `plan` to have "
            "one made and measured",
        )
    if best is None:
        compilation.least_fused_bytes = search.chains.contracted.resident_bytes + min(peaks)
        _log.warning(
            "none of %d plans that Inductor compiled kept the %s that the budget leaves above the resident bytes (the smallest "
            "measured peak is %s): compiled by 'eager' instead, whose peak is the planned one",
            len(peaks),
            format_bytes(search.limit_bytes),
            format_bytes(min(peaks)),
        )
    return best


def _plan(search: CalibratedSearch, capture: Capture, recapture: Recapture) -> tuple[Capture, Result]:
    """The next plan to compile. Values that it counts as stored are marked, so that Inductor stores them.

    Without the marks Inductor inlines a pointwise op into its readers and may compute it once for each. The memory would not be
    the planned one; and reductions would run over other loops from plan to plan, which changes the order of sums and the bits.
    """
    graph, result = search.plan(capture.graph)
    for o in search.chains.stored:
        node = capture.members[o].node
        assert node is not None
        if node.all_input_nodes:  # an op without inputs, such as a constant, is cheaper inlined than read from memory
            node.meta["inductor_realize_to_strides"] = True
    for member in capture.members:  # Inductor may inline ops of several outputs too, such as pooling with indices
        for getitem in member.getitems:
            getitem.meta["inductor_realize_to_strides"] = True
    return dataclasses.replace(capture, graph=graph), result


def _generate(
    gm: fx.GraphModule, example_inputs: Sequence[Any], task: Task, options: Options, whole: WholeStep | None = None
) -> Compiled:
    """Generate the code of the graph under the plan of a task, whatever its peak; its C++ kernels are not built."""
    callables: dict[str, ReplaceableCallable] = {}

    def inner(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> ReplaceableCallable:
        which = "backward" if kwargs.get("is_backward") else "forward"
        # A planned graph has its layouts already (`with_channels_last`); other layouts would be other bytes.
        choose_layouts = inductor_config.layout_optimization and bool(kwargs.get("is_inference")) and whole is None
        if whole is not None:
            module, more = whole.plan(module, partitioner.task_for(module))
            inputs = [*inputs, *more]
        with inductor_config.patch(layout_optimization=choose_layouts):
            run: Any = compile_fx_inner(module, inputs, **kwargs)
        if whole is not None:
            whole.run, run = run, whole
        callables[which] = ReplaceableCallable(run)
        return callables[which]

    partitioner = PlanPartitioner(task, options)
    copy = fx.GraphModule(gm, copy_graph(gm.graph))  # Inductor changes its graph in place, and the next trial needs it unchanged
    copy.meta = dict(gm.meta)
    patches = {**INDUCTOR_CONFIG, **({} if whole is None else WHOLE_STEP_CONFIG), "custom_partitioner_fn": partitioner}
    # The backward is compiled now, not at its first run: a trial step runs it while Dynamo is still compiling, and Dynamo's
    # metrics of a compilation can be recorded only once.
    early = functorch_config.patch(force_non_lazy_backward_lowering=True)
    kernels, account = PendingKernels(), Account(lambda node: task.costs([node])[0].workspace_bytes)
    with early, use_inductor_choices(PlanChoices()), unfused_addmm(), kernels.collecting(), account.counting():
        run: Any = compile_fx(copy, list(example_inputs), inner_compile=inner, config_patches=patches)  # type: ignore[arg-type]
    forward, joint = callables["forward"], partitioner.joint
    counted = None
    if whole is not None:
        counted = account.memory_of_whole_step()
    elif joint is not None:
        counted = account.memory(num_outputs=joint.capture.num_fwd_outputs, hold_outputs=task.hold_outputs)
    backward = callables.get("backward", forward)
    return Compiled(run, forward, backward, kernels, partitioner.planned, counted, joint, whole)


def _measure(compiled: Compiled, example_inputs: Sequence[Any], task: Task) -> StepMemory:
    """The measured memory of a compilation; its kernels are built for that."""
    compiled.kernels.build()
    if compiled.whole is None:
        step = measure_step(compiled.run, example_inputs, hold_outputs=task.hold_outputs)
    else:
        with compiled.whole.on_trial():
            step = measure_whole_step(compiled.run, example_inputs)
    if compiled.counted is not None and step != compiled.counted:
        _log.debug("counted in the generated code: %s; measured: %s", compiled.counted, step)
    return step


def _with_measurement(compiled: Compiled, search: CalibratedSearch, chosen: int) -> Compiled:
    """The compilation with its measured memory, as a remark of its result and for the checks of its runs."""
    assert compiled.planned is not None
    capture, result = compiled.planned
    step = search.trials[chosen].outcome.memory
    peak = format_bytes(step.peak_bytes)
    remark = f"compiled by Inductor (plan {len(search.trials)}): measured peak {peak} above the resident bytes"
    compiled.planned = (capture, msgspec.structs.replace(result, remarks=(*result.remarks, remark)))
    assert compiled.joint is not None
    compiled.measured = (compiled.joint, compiled.planned[1], step)
    return compiled


def _refuse_unmeasurable(inputs: Sequence[Any]) -> None:
    """Refuse inputs on which no trial step can run.

    Raises:
        OptionError: An input has a symbolic size, or is a fake tensor.
    """
    for value in inputs:
        sizes = [value] if isinstance(value, torch.SymInt) else list(value.shape) if isinstance(value, torch.Tensor) else []
        if any(isinstance(size, torch.SymInt) for size in sizes):
            raise OptionError(
                "compiler='inductor' plans for sizes that do not change: the peak of a compiled plan is measured, for one size",
                hint="compile with dynamic=False, which compiles and plans every shape separately, or with compiler='eager'",
            )
        if isinstance(value, FakeTensor):
            raise OptionError(
                "compiler='inductor' measures the compiled step, and this one was traced without real tensors",
                hint="under DistributedDataParallel set torch._dynamo.config.optimize_ddp = False; otherwise compile outside "
                "FakeTensorMode, or use compiler='eager'",
            )


def _compiler_fingerprint(inputs: Sequence[Any], options: Options) -> str:
    """Hash of everything except the graph that decides on the measured memory of a compiled plan."""
    devices = {t.device for t in inputs if isinstance(t, torch.Tensor)}
    settings = {
        "torch": torch.__version__,
        "checkmate": checkmate.__version__,
        "devices": sorted(torch.cuda.get_device_name(d) if d.type == "cuda" else d.type for d in devices),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "outputs": options.outputs,
        "inductor": {
            k: v if isinstance(v, (int, float, str, type(None))) else repr(type(v))
            for k, v in inductor_config.save_config_portable().items()
        },
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


@functools.cache
def sources_digest() -> str:
    """Hash of this package's sources: with other sources the same options may give another plan."""
    digest = hashlib.sha256()
    for path in sorted(Path(checkmate.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
