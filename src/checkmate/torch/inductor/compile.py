"""Compile a graph by Inductor under a plan: plan, generate code, count what it takes, and plan again with a corrected target.

Inductor fuses ops and decides itself which values it stores, so that the planned peak is a prediction. What the generated code
takes is counted before its kernels are built, and only those of the chosen plan are. The budget is kept by measuring: the
compiled step that is returned was run on the real batch, and its measured peak was within the budget.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import fx

from checkmate.core.errors import OptionError
from checkmate.core.result import Result
from checkmate.core.units import format_at_least, format_bytes
from checkmate.frontend.plan_store import sources_digest
from checkmate.frontend.step_memory import StepMemory
from checkmate.torch._compat.aot import BoxedRun, functorch_config, regions_as_hints, saved_symbols
from checkmate.torch._compat.aot_cache import CachedCompilation, CacheEntry, aot_cache_disabled, cached_attributes
from checkmate.torch._compat.codegen.cpp_kernels import PendingKernels
from checkmate.torch._compat.dispatch import FakeTensor
from checkmate.torch._compat.inductor import (
    CustomPartitionerFn,
    compile_fx,
    compile_fx_inner,
    donated_inputs,
    donated_to_subgraphs,
    freed_between_loops,
    inductor_config,
    one_function_for_vectors_and_scalars,
    prefers_channels_last,
    reads_after_writes,
    sums_for_every_size,
    unfused_addmm,
    use_inductor_choices,
    writes_over_what_dies,
)
from checkmate.torch._compat.symbolic import guards_against_upper_bounds
from checkmate.torch.compilation.compilation import Compilation
from checkmate.torch.graph.copy import copy_graph
from checkmate.torch.inductor.account import Account
from checkmate.torch.inductor.fusion import trailing_reductions
from checkmate.torch.inductor.largest_inputs import bound_sizes, dynamic_dimensions, largest_inputs, traced_values
from checkmate.torch.inductor.pieces import with_fused_pieces, with_pieces, write_out_pieces
from checkmate.torch.inductor.repeats import outline_repeats, takes_subgraphs
from checkmate.torch.inductor.scheduler import PlanChoices
from checkmate.torch.inductor.search import CalibratedSearch
from checkmate.torch.inductor.settings import compiler_fingerprint, config_patches
from checkmate.torch.inductor.stored_step import StoredStep
from checkmate.torch.inductor.whole.whole_step import WHOLE_STEP_CONFIG, WholeStep
from checkmate.torch.joint.capture import Capture
from checkmate.torch.measure.trial_step import measure_step, measure_whole_step
from checkmate.torch.options import Options
from checkmate.torch.partition.split import CapturedJoint, Recapture, Task, partition
from checkmate.torch.passes.channels_last import with_channels_last
from checkmate.torch.steps.program import GraphInterface

_log = logging.getLogger("checkmate.torch")


class ReplaceableCallable:
    """A callable whose implementation can be replaced after AOTAutograd holds a reference to it.

    Attributes:
        run: The implementation; it takes its arguments as one list, which it clears.
    """

    def __init__(self, run: BoxedRun) -> None:
        self.run = run
        # AOTAutograd looks for these attributes. Its wrappers copy attributes of instances (functools.wraps), not of classes.
        self._boxed_call = True
        self.__dict__.update(cached_attributes(run))

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
        planned: The graph and its plan; None for a graph without gradients, which is not planned.
        counted: The memory of its step as counted in its code; None if that is not known.
        joint: The captured joint graph; None for a graph without gradients, and for code from AOTAutograd's cache.
        whole: The same as a whole step, if it is one.
        memory: Its measured memory; None without a budget.
        num_symbols: How many symbolic sizes the forward saves for the backward.
        entry: The entry for AOTAutograd's cache; None for code from there, and where it cannot be stored.
    """

    run: Callable[..., Any]
    forward: ReplaceableCallable
    backward: ReplaceableCallable
    kernels: PendingKernels
    planned: tuple[GraphInterface, Result] | None
    counted: StepMemory | None = None
    joint: CapturedJoint | None = None
    whole: WholeStep | None = None
    memory: StepMemory | None = None
    num_symbols: int = 0
    entry: CacheEntry | None = None

    @property
    def cached(self) -> bool:
        """Whether the code came from AOTAutograd's cache."""
        return self.planned is not None and self.joint is None

    def store(self) -> None:
        """Store the code with its plan in AOTAutograd's cache, where it can be stored."""
        if self.entry is not None and self.planned is not None:
            self.entry.save(StoredStep.of(*self.planned, self.memory).encode())


class PlanPartitioner(CustomPartitionerFn):
    """Plans a joint graph and splits it into forward and backward; Inductor's `custom_partitioner_fn`.

    Args:
        task: How the graph is planned and split.
        options: The user's options; they are part of the cache key.
        problem: Text of everything besides the graph that decides which plan is chosen; None where code from AOTAutograd's cache
            cannot be used.

    Attributes:
        planned: The graph and its plan, once the partitioner has run.
        joint: The captured joint graph, once the partitioner has run.
    """

    def __init__(self, task: Task, options: Options, problem: str | None = None) -> None:
        self._task = dataclasses.replace(task, on_planned=self._record_plan)
        self._settings = f"{sources_digest()} {options!r}"
        self._problem = problem
        self.planned: tuple[GraphInterface, Result] | None = None
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

        Until there is a plan, a hash of what it will be chosen by, for AOTAutograd's cache, which has the graph in its key. None
        bypasses that cache.
        """
        if self.planned is not None:
            interface, result = self.planned
            text = f"{self._settings} {interface.graph.digest} {result.plan.order}"
        elif self._problem is not None:
            text = f"{self._settings} {self._problem}"
        else:
            return None
        return hashlib.sha256(text.encode()).hexdigest()

    def _record_plan(self, joint: CapturedJoint, result: Result) -> None:
        self.joint, self.planned = joint, (GraphInterface.of(joint), result)


def compile_by_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    compilation: Compilation,
) -> Compiled | None:
    """Compile a graph of Dynamo so that its measured peak keeps the budget.

    Args:
        gm: The graph; it is not changed.
        example_inputs: Its real inputs; the trial steps run on them.
        compilation: Options, resident memory and planner of the graph.

    Returns:
        The cheapest compilation whose measured peak keeps the budget; None if no compilation that was tried keeps it.

    Raises:
        OptionError: The graph was traced without real tensors, does not run at its largest sizes, or the given plan needs more
            than the budget.
        CheckmateError: No plan was found.
    """
    _refuse_unmeasurable(example_inputs)
    traced = traced_values(gm)
    bound_sizes(traced)
    options = compilation.options
    task = dataclasses.replace(compilation.task, costs=with_fused_pieces(compilation.task.costs))
    dynamic = dynamic_dimensions(traced)
    if dynamic and compilation.hooks.whole:
        raise OptionError(
            "compiler='inductor' compiles a whole step for sizes that do not change",
            hint="compile with dynamic=False, which compiles and plans every shape separately, or with compiler='eager'",
        )
    patches = config_patches(options, {t.device.type for t in example_inputs if isinstance(t, torch.Tensor)})
    fingerprint = compiler_fingerprint(example_inputs, options, patches, dynamic)
    problem = None if dynamic or not compilation.may_be_cached() else f"{compilation.resident} {fingerprint}"
    search = CalibratedSearch(compilation, fingerprint)
    compilations: list[Compiled] = []
    best: Compiled | None = None
    while True:
        whole = WholeStep() if compilation.hooks.whole else None
        planning = dataclasses.replace(task, plan=functools.partial(_plan, search, compilation.request.in_pieces))
        compiled = _generate(gm, example_inputs, planning, options, patches, whole, problem)
        if compiled.planned is None or compiled.cached or not search.measures:
            compiled.kernels.build()
            compiled.store()
            return compiled
        _refuse_other_sizes(traced)
        compilations.append(compiled)
        # Inductor generates no code for what it has in its cache: then an earlier run has measured it. Several ranks measure
        # always: one that has the code in its cache, and measures alone, would wait in its collectives for the others.
        counted = compiled.counted if compilation.ranks is None else None
        memory = counted or search.measured_before() or _measure(compiled, example_inputs, traced, task)
        search.record(memory, measured=counted is None)
        if search.next_candidate():
            continue
        chosen = search.best()
        while chosen is not None and not search.trials[chosen].measured:
            search.correct(chosen, _measure(compilations[chosen], example_inputs, traced, task))
            chosen = search.best()
        if chosen is not None:
            compilations[chosen].kernels.build()
            best = _with_measurement(compilations[chosen], search, chosen)
            if best.planned is not None and compilation.planner.is_alone(best.planned[0].graph):
                best.store()
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
            "of them takes %s): compiled by 'eager' instead, whose peak is the planned one",
            len(peaks),
            format_bytes(search.limit_bytes),
            format_bytes(min(peaks)),
        )
    return best


def _plan(
    search: CalibratedSearch,
    allows: Callable[[fx.Node], bool] | None,
    capture: Capture,
    recapture: Recapture,
) -> tuple[Capture, Result]:
    """The next plan to compile. Values that it counts as stored are marked, so that Inductor stores them.

    Without the marks Inductor inlines a pointwise op into its readers and may compute it once for each. The memory would not be
    the planned one; and reductions would run over other loops from plan to plan, which changes the order of sums and the bits.
    """
    capture, kinds = (capture, []) if allows is None else with_pieces(capture, recapture, allows)
    graph, result = search.plan(capture.graph, trailing_reductions(m.node for m in capture.members))
    if kinds:
        result = msgspec.structs.replace(result, remarks=(*result.remarks, *(f"in pieces: {kind.description}" for kind in kinds)))
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
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    task: Task,
    options: Options,
    settings: Mapping[str, Any],
    whole: WholeStep | None = None,
    problem: str | None = None,
) -> Compiled:
    """Generate the code of the graph under the plan of a task, whatever its peak; its C++ kernels are not built.

    Where AOTAutograd's cache has the code that was chosen for this problem before, it is taken from there.
    """
    callables: dict[str, ReplaceableCallable] = {}
    symbols: list[int] = []

    def inner(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> ReplaceableCallable:
        which = "backward" if kwargs.get("is_backward") else "forward"
        if which == "forward" and partitioner.joint is not None:
            symbols.append(saved_symbols(module, partitioner.joint.capture.num_fwd_outputs))
        # A planned graph has its layouts already (`with_channels_last`); other layouts would be other bytes.
        choose_layouts = inductor_config.layout_optimization and bool(kwargs.get("is_inference")) and whole is None
        if whole is not None:
            module, more = whole.plan(module, partitioner.task_for(module))
            inputs = [*inputs, *more]
        module = write_out_pieces(module)
        if takes_subgraphs():
            module = outline_repeats(module, donated_inputs() if which == "backward" else frozenset())
        with inductor_config.patch(layout_optimization=choose_layouts):
            run: Any = compile_fx_inner(module, inputs, **kwargs)
        if whole is not None:
            whole.run, run = run, whole
        callables[which] = ReplaceableCallable(run)
        return callables[which]

    def loaded(which: str, run: Callable[..., Any]) -> ReplaceableCallable:
        callables[which] = ReplaceableCallable(run)
        return callables[which]

    partitioner = PlanPartitioner(task, options, problem)
    copy = fx.GraphModule(gm, copy_graph(gm.graph))  # Inductor changes its graph in place, and the next trial needs it unchanged
    copy.meta = dict(gm.meta)
    patches = {**settings, **({} if whole is None else WHOLE_STEP_CONFIG), "custom_partitioner_fn": partitioner}
    # The backward is compiled now, not at its first run: a trial step runs it while Dynamo is still compiling, and Dynamo's
    # metrics of a compilation can be recorded only once.
    early = functorch_config.patch(force_non_lazy_backward_lowering=True)
    kernels, account = PendingKernels(), Account(lambda node: task.costs([node])[0].workspace_bytes)
    choices, subgraphs, cache = use_inductor_choices(PlanChoices()), donated_to_subgraphs(), CachedCompilation()
    looking_up = aot_cache_disabled() if problem is None else cache.looking_up(loaded)
    with (
        early,
        regions_as_hints(),
        choices,
        freed_between_loops(),
        one_function_for_vectors_and_scalars(),
        unfused_addmm(),
        writes_over_what_dies(),
        reads_after_writes(),
        sums_for_every_size(),
        kernels.collecting(),
        account.counting(),
        looking_up,
        subgraphs,
    ):
        run: Any = compile_fx(copy, list(example_inputs), inner_compile=inner, config_patches=patches)  # type: ignore[arg-type]
    forward, joint = callables["forward"], partitioner.joint
    if partitioner.planned is None and cache.note is not None:
        stored = StoredStep.decode(cache.note)
        planned = (stored.interface, stored.result)
        return Compiled(run, forward, callables["backward"], kernels, planned, memory=stored.memory)
    counted = None
    if whole is not None:
        counted = account.memory_of_whole_step()
    elif joint is not None:
        counted = account.memory(num_outputs=joint.capture.num_fwd_outputs, hold_outputs=task.hold_outputs)
    backward = callables.get("backward", forward)
    return Compiled(
        run,
        forward,
        backward,
        kernels,
        partitioner.planned,
        counted,
        joint,
        whole,
        num_symbols=sum(symbols),
        entry=cache.entries[-1] if cache.entries else None,
    )


def _measure(compiled: Compiled, example_inputs: Sequence[Any], traced: Sequence[Any], task: Task) -> StepMemory:
    """The measured memory of a compilation; its kernels are built for that.

    With dynamic sizes it is that of a step of the largest sizes, and at least what was counted: some sizes, such as ``1024 - n``,
    are largest in smaller steps.
    """
    compiled.kernels.build()
    inputs = largest_inputs(example_inputs, traced)
    enlarged = any(a is not b for a, b in zip(inputs, example_inputs, strict=True) if isinstance(a, torch.Tensor))
    try:
        if compiled.whole is None:
            step = measure_step(compiled.run, inputs, hold_outputs=task.hold_outputs)
        else:
            with compiled.whole.on_trial():
                step = measure_whole_step(compiled.run, inputs)
    except (RuntimeError, IndexError, AssertionError) as error:
        if not enlarged:
            raise
        raise OptionError(
            f"a step of the largest sizes, {_shapes(inputs, traced)}, does not run: {error}",
            hint="give torch._dynamo.mark_dynamic(x, dim, min=2, max=...) the largest size that the model takes, or compile with "
            "dynamic=False, or with compiler='eager'",
        ) from error
    if compiled.counted is None:
        return step
    if step != compiled.counted:
        _log.debug("counted in the generated code: %s; measured: %s", compiled.counted, step)
    counted = dataclasses.asdict(compiled.counted)
    return (
        StepMemory(**{k: max(v, counted[k]) for k, v in dataclasses.asdict(step).items()}) if dynamic_dimensions(traced) else step
    )


def _shapes(inputs: Sequence[Any], traced: Sequence[Any]) -> str:
    """Shapes of the inputs with dynamic sizes."""
    return ", ".join(str(tuple(inputs[i].shape)) for i in dict.fromkeys(i for i, _ in dynamic_dimensions(traced)))


def _refuse_other_sizes(traced: Sequence[Any]) -> None:
    """Refuse code that was generated for fewer sizes than it is planned for.

    Raises:
        OptionError: Guards of the code exclude the largest sizes.
    """
    numbers = [n for value in traced if isinstance(value, torch.Tensor) for n in value.shape if isinstance(n, torch.SymInt)]
    excluded = guards_against_upper_bounds(numbers[0].node.shape_env) if numbers else []
    if excluded:
        raise OptionError(
            f"the compiled code does not serve the largest of the dynamic sizes: it needs {', '.join(excluded)}",
            hint="let the first batch have the largest sizes, compile with dynamic=False, or with compiler='eager'",
        )


def _with_measurement(compiled: Compiled, search: CalibratedSearch, chosen: int) -> Compiled:
    """The compilation with its memory, as a remark of its result and for the checks of its runs."""
    assert compiled.planned is not None
    interface, result = compiled.planned
    step = search.trials[chosen].outcome.memory
    peak = format_bytes(step.peak_bytes)
    how = "measured" if search.trials[chosen].measured else "counted"
    remark = f"compiled by Inductor (plan {len(search.trials)}): {how} peak {peak} above the resident bytes"
    result = msgspec.structs.replace(result, budget_bytes=search.budget_bytes, remarks=(*result.remarks, remark))
    compiled.planned, compiled.memory = (interface, result), step
    return compiled


def _refuse_unmeasurable(inputs: Sequence[Any]) -> None:
    """Refuse inputs on which no trial step can run.

    Raises:
        OptionError: An input is a fake tensor.
    """
    if any(isinstance(value, FakeTensor) for value in inputs):
        raise OptionError(
            "compiler='inductor' measures the compiled step, and this one was traced without real tensors",
            hint="under DistributedDataParallel set torch._dynamo.config.optimize_ddp = False; otherwise compile outside "
            "FakeTensorMode, or use compiler='eager'",
        )
