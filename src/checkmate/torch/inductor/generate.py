"""Generates the code of a graph by Inductor under a plan, or takes it from AOTAutograd's cache."""

from __future__ import annotations

import dataclasses
import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx

from checkmate.core.result import Result
from checkmate.frontend.plan_store import sources_digest
from checkmate.frontend.step_memory import StepMemory
from checkmate.torch._compat.aot import (
    BoxedRun,
    CachedCompilation,
    aot_cache_disabled,
    cached_attributes,
    functorch_config,
    mark_static,
    regions_as_hints,
    save_any_number,
    tell_parameters,
)
from checkmate.torch._compat.inductor import (
    CustomPartitionerFn,
    InductorChoices,
    compile_fx,
    compile_fx_inner,
    donated_inputs,
    inductor_config,
    prefers_channels_last,
    under_a_plan,
)
from checkmate.torch._compat.kernels import PendingKernels
from checkmate.torch.graph.traced import copy_graph
from checkmate.torch.inductor.account import Account
from checkmate.torch.inductor.fusion import ns_per_byte
from checkmate.torch.inductor.pieces import write_out_pieces
from checkmate.torch.inductor.repeats import outline_repeats, takes_subgraphs
from checkmate.torch.inductor.whole_step import WHOLE_STEP_CONFIG, WholeStep
from checkmate.torch.options import Options
from checkmate.torch.partition.split import CapturedJoint, Task, partition
from checkmate.torch.passes.channels_last import with_channels_last
from checkmate.torch.steps.program import GraphInterface


class ReplaceableCallable:
    """A callable whose implementation can be replaced after AOTAutograd holds a reference to it."""

    def __init__(self, run: BoxedRun) -> None:
        self.run = run
        # AOTAutograd looks for these attributes. Its wrappers copy attributes of instances (functools.wraps), not of classes.
        self._boxed_call = True
        self.__dict__.update(cached_attributes(run))

    def __call__(self, args: list[Any]) -> Any:
        """Call the implementation."""
        return self.run(args)


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class CompiledGraph:
    """One compilation of a graph."""

    run: Callable[..., Any]
    forward: ReplaceableCallable
    backward: ReplaceableCallable  # the forward for a graph without gradients
    kernels: PendingKernels  # kernels that have to be built before it runs
    planned: tuple[GraphInterface, Result] | None  # None for a graph without gradients, which is not planned
    joint: CapturedJoint | None = None  # None for a graph without gradients, and for code from AOTAutograd's cache
    whole: WholeStep | None = None  # the graph as a whole step, if it is one
    counted: StepMemory | None = None  # memory of its step, as counted in its code; None if not known
    cost_ns: int | None = None  # cost of its step, as counted in its code
    memory: StepMemory | None = None  # measured memory; None without a budget
    # Saves it in AOTAutograd's cache with a note; None for code from there, and for code that cannot be stored.
    save: Callable[[Any], None] | None = None

    @property
    def cached(self) -> bool:
        """Whether the code came from AOTAutograd's cache."""
        return self.planned is not None and self.joint is None

    def store(self) -> None:
        """Store the code with its plan in AOTAutograd's cache, if it can be stored."""
        if self.save is not None and self.planned is not None:
            self.save((*self.planned, self.memory))


class PlanPartitioner(CustomPartitionerFn):
    """Plans a joint graph and splits it into forward and backward; Inductor's `custom_partitioner_fn`.

    The problem is a text of everything that decides which plan is chosen, except the graph and the options. It is None if code
    from AOTAutograd's cache cannot be used.
    """

    def __init__(self, task: Task, options: Options, problem: str | None = None) -> None:
        self._task = dataclasses.replace(task, on_planned=self._record_plan, remakes_views=True)
        self._settings = f"{sources_digest()} {options!r}"
        self._problem = problem
        self.planned: tuple[GraphInterface, Result] | None = None
        self.joint: CapturedJoint | None = None

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and backward modules of the plan."""
        kwargs.pop("compiler", None)
        mark_static(gm, kwargs.get("static_lifetime_input_indices") or ())
        return partition(gm, joint_inputs, task=self.task_for(gm), **kwargs)

    def task_for(self, gm: fx.GraphModule) -> Task:
        """How a graph is planned and split."""
        return dataclasses.replace(self._task, layout_pass=with_channels_last) if prefers_channels_last(gm) else self._task

    def __deepcopy__(self, memo: dict[int, Any]) -> PlanPartitioner:
        """The same object: Inductor copies its configuration to make a cache key, and a captured graph cannot be copied."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the `uuid` in place of the partitioner: Inductor's cache key is a hash of the pickled configuration."""
        return str, (str(self.uuid()),)

    def uuid(self) -> Any | None:
        """A hash of everything that decides the modules: the package's sources, the options, the graph and its plan.

        Before there is a plan, a hash of everything that will decide the plan, for AOTAutograd's cache, which has the graph in
        its key. None bypasses that cache.
        """
        decides = self._problem
        if self.planned is not None:
            decides = f"{self.planned[0].graph.digest} {self.planned[1].plan.order}"
        return None if decides is None else hashlib.sha256(f"{self._settings} {decides}".encode()).hexdigest()

    def _record_plan(self, joint: CapturedJoint, result: Result) -> None:
        self.joint, self.planned = joint, (GraphInterface.of(joint), result)


class PlanChoices(InductorChoices):
    """Inductor's choices, without the fusion of ops that are far apart in the order of a plan.

    A plan may compute a value twice instead of holding it. Inductor sees two chains that read the same tensors and fuses them,
    and both values then exist at once: a fifth more than planned on a small network. Therefore two loops are fused only if no
    kernel of another library, such as a matrix product, runs between them in the order of the plan.
    """

    @staticmethod
    def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: Any) -> bool:
        """Whether two nodes of the scheduler can become one kernel: Inductor fuses them, and no barrier is between them."""
        first, last = min(node1.min_order, node2.min_order), max(node1.max_order, node2.max_order)
        if scheduler not in _BARRIERS:
            _BARRIERS[scheduler] = sorted(n.min_order for n in scheduler.nodes if n.is_extern() or n.is_template())
        barriers = _BARRIERS[scheduler]
        if bisect_left(barriers, last) > bisect_right(barriers, first):
            return False
        return InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)


_BARRIERS: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
"""Positions, in each scheduler, of kernels of other libraries and templates, which Inductor never fuses with each other."""


def generate(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    task: Task,
    options: Options,
    settings: Mapping[str, Any],
    whole: WholeStep | None = None,
    problem: str | None = None,
    as_stock: bool = False,
) -> CompiledGraph:
    """Generate the code of the graph under the plan of a task, whatever its peak; its kernels are not built.

    With ``as_stock`` Inductor decides on order and fusion: the code of a partition of PyTorch is that of stock Inductor.
    If AOTAutograd's cache has the code that was chosen for this problem before, the code is taken from there.
    """
    partitioner = PlanPartitioner(task, options, problem)
    copy = fx.GraphModule(gm, copy_graph(gm.graph))  # Inductor changes its graph in place, and the next trial needs it unchanged
    copy.meta = dict(gm.meta)
    if as_stock and hasattr(gm, "_param_name_to_source"):
        tell_parameters(gm, copy)
    patches = {**settings, **({} if whole is None else WHOLE_STEP_CONFIG), "custom_partitioner_fn": partitioner}
    modules, cache = _Modules(partitioner, whole, repeats=not as_stock), CachedCompilation()
    kernels, account = PendingKernels(), Account(lambda node: task.costs([node])[0])
    with (
        # The backward is compiled now, not at its first run: a trial step runs it while Dynamo is still compiling, and Dynamo's
        # metrics of a compilation can be recorded only once.
        functorch_config.patch(force_non_lazy_backward_lowering=True),
        regions_as_hints(),
        under_a_plan(None if as_stock else PlanChoices()),
        kernels.collecting(),
        account.counting(),
        aot_cache_disabled() if problem is None else cache.looking_up(modules.loaded),
    ):
        run: Any = compile_fx(copy, list(example_inputs), inner_compile=modules.compile, config_patches=patches)  # type: ignore[arg-type]
    joint = partitioner.joint
    compiled = CompiledGraph(
        run=run,
        forward=modules.callables["forward"],
        backward=modules.callables.get("backward", modules.callables["forward"]),
        kernels=kernels,
        planned=partitioner.planned,
        joint=joint,
        whole=whole,
        save=cache.entries[-1] if cache.entries else None,
    )
    if compiled.planned is None and cache.note is not None:
        interface, result, compiled.memory = cache.note
        compiled.planned = interface, result
    elif whole is not None:
        compiled.counted = account.memory_of_whole_step()
    elif joint is not None:
        compiled.counted = account.memory(num_outputs=joint.capture.num_fwd_outputs, hold_outputs=task.hold_outputs)
        compiled.cost_ns = account.cost_ns(ns_per_byte(joint.capture.graph))
    return compiled


class _Modules:
    """The forward and the backward of a graph while they are compiled or loaded."""

    def __init__(self, partitioner: PlanPartitioner, whole: WholeStep | None, *, repeats: bool) -> None:
        self.callables: dict[str, ReplaceableCallable] = {}
        self._partitioner, self._whole, self._repeats = partitioner, whole, repeats

    def loaded(self, which: str, run: Callable[..., Any]) -> ReplaceableCallable:
        """The callable that replaces a loaded or compiled forward or backward."""
        self.callables[which] = ReplaceableCallable(run)
        return self.callables[which]

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> ReplaceableCallable:
        """Inductor's `inner_compile`, which compiles the forward or the backward."""
        which = "backward" if kwargs.get("is_backward") else "forward"
        whole = self._whole
        if which == "forward" and self._partitioner.joint is not None:
            save_any_number()
        # A planned graph has its layouts already (`with_channels_last`); other layouts would take other bytes.
        choose_layouts = inductor_config.layout_optimization and bool(kwargs.get("is_inference")) and whole is None
        if whole is not None:
            module, more = whole.plan(module, self._partitioner.task_for(module))
            inputs = [*inputs, *more]
        module = write_out_pieces(module)
        if self._repeats and takes_subgraphs():
            module = outline_repeats(module, donated_inputs() if which == "backward" else frozenset())
        with inductor_config.patch(layout_optimization=choose_layouts):
            run: Any = compile_fx_inner(module, inputs, **kwargs)
        if whole is not None:
            whole.run, run = run, whole
        return self.loaded(which, run)
