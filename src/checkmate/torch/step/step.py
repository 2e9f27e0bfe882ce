"""A whole training step under a budget: ``prediction, loss = step(x, y)``."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, NoReturn

import msgspec
import torch
from torch.utils import _pytree as pytree

from checkmate.core.budget import Budget
from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Curve, Result
from checkmate.core.units import Amount, format_bytes
from checkmate.cost.device import Device, load_device
from checkmate.frontend.options import PlanSource, check_choice, unknown_option
from checkmate.solvers.session import Solver
from checkmate.torch.backend import compile_graph
from checkmate.torch.chunking.choose import with_smallest_peak
from checkmate.torch.chunking.variants import Chunks
from checkmate.torch.compilation.hooks import Hooks
from checkmate.torch.distributed.wrappers import run_inside_ddp
from checkmate.torch.emulate.device import EmulatedDevice
from checkmate.torch.emulate.fake_inputs import fake_inputs
from checkmate.torch.graph.optimizer_ops import uncompiled_reason
from checkmate.torch.measure.optimizer_state import state_bytes
from checkmate.torch.measure.profiler import Profiler
from checkmate.torch.options import BudgetOf, Checkpoints, Chunking, Compiler, CostSource, Mode, Options, Outputs, check_chunking
from checkmate.torch.step.arguments import refuse_inference_mode, refuse_untrainable, validate_arguments, warn_of_clipping
from checkmate.torch.step.batch import BatchLayout, Example
from checkmate.torch.step.planned_step import PlannedStep, StepExplanation
from checkmate.torch.step.programs import Loss, check_micro_batches
from checkmate.torch.step.recipe import StepSpec, spec_of_model, spec_of_step
from checkmate.torch.step.tracing import run_as_one_graph, stop_after_capture, trace_step
from checkmate.torch.steps.program import GraphInterface

_log = logging.getLogger("checkmate.torch")


@dataclass(eq=False, slots=True)
class _Compiled:
    """The graphs that a step was compiled for. PyTorch keeps a backend until the process ends, so that none may hold the model.

    Attributes:
        planned: Each graph and its plan.
        shapes: Sizes of the inputs of each.
        returned: Storages of what the last run returned, by weak references.
    """

    planned: list[tuple[Graph, Result]] = field(default_factory=list)
    shapes: list[tuple[Any, ...]] = field(default_factory=list)
    returned: list[weakref.ref[torch.UntypedStorage]] = field(default_factory=list)

    def returned_bytes(self) -> int:
        """Bytes of what the last run returned, as far as it exists: the plan of a whole step has room for it."""
        return sum({s.data_ptr(): s.nbytes() for ref in self.returned if (s := ref()) is not None}.values())

    def record(self, interface: GraphInterface, result: Result) -> None:
        """Note a plan; say so if it is not the first one."""
        if self.planned:
            peak = format_bytes(result.peak_bytes)
            what = "the step was compiled again" if self.shapes[-1] in self.shapes[:-1] else "a new shape was compiled"
            _log.warning("%s and planned in %.1f s: peak %s", what, result.elapsed_s, peak)
        self.planned.append((interface.graph, result))


class Step:
    """A compiled training step. Make one with `checkmate.torch.compile`.

    Attributes:
        graph: The graph of the step for the example.
        plan: The plan that runs it.
        result: The solver's result: the plan with its cost, its peak and their proven bounds.
        whole: Whether the optimizer's updates are in the graph, each right after the last op of its gradient.
    """

    graph: Graph
    plan: Plan
    result: Result
    whole: bool

    def __init__(self, spec: StepSpec, example: Example, options: Options, *, dynamic: bool = False) -> None:
        self.whole = spec.whole
        self._spec, self._unclipped = spec, spec.unclipped
        self._layout = BatchLayout.of(example)
        self._compiled = compiled = _Compiled()
        given = options.plan
        with stop_after_capture() as stop, spec.tracing_context():
            hooks = Hooks(planned=compiled.record, before_forward=stop.before_running, inference=False, whole=spec.whole)

            def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
                # A plan that was given is for the example's shape; other shapes are planned.
                now = replace(options, plan=given if not compiled.planned else None)
                compiled.shapes.append(tuple(tuple(map(str, t.shape)) for t in inputs if isinstance(t, torch.Tensor)))
                return compile_graph(gm, inputs, now, replace(hooks, returned_bytes=compiled.returned_bytes()))

            self._run = torch.compile(spec.program, backend=backend, fullgraph=True, dynamic=dynamic)
            run_as_one_graph(self._run, spec, example)
        if spec.wrapped is not None:
            self._run = run_inside_ddp(spec.wrapped, self._run)
        self.graph, self.result = compiled.planned[0]
        self.plan = self.result.plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step: forward, loss, backward, and the optimizer if there is one. The gradients are then cleared.

        Args:
            args: A batch like the example: the model's inputs, then the loss's target; or such a batch in one piece.
            kwargs: The model's inputs, if the example was a mapping.

        Returns:
            The prediction and the loss, both detached: the backward is done. Where the model computes its loss: what it
            returned, detached, such as an output of Hugging Face's with ``.loss`` and ``.logits``, or (None, loss) where that is
            the loss alone or ``outputs="released"`` asks for no more. The cache that only generation reads is left out.

        Raises:
            CheckmateError: The batch has a new shape, and no plan for it keeps the budget.
            OptionError: The arguments are not those of the example, or ``micro_batches`` does not divide the rows.
        """
        refuse_inference_mode()
        if self._unclipped:
            warn_of_clipping(sys._getframe(1).f_code)
            self._unclipped = False
        batch = self._layout.batch_of(args, kwargs)
        check_micro_batches(batch, self._spec.micro_batches)
        run = functools.partial(run_as_one_graph, self._run, self._spec, batch, self._layout.example)
        prediction, loss = self._spec.finish(run)
        if self.whole:
            tensors = [t for t in pytree.tree_leaves((prediction, loss)) if isinstance(t, torch.Tensor)]
            self._compiled.returned = [weakref.ref(t.untyped_storage()) for t in tensors]
        return prediction if self._spec.own_loss and prediction is not None else (prediction, loss)

    def explain(self, *, curve: Curve | None = None) -> StepExplanation:
        """The tensors that the step saves and the ops that it recomputes; see `checkmate.torch.explain`.

        Args:
            curve: Plans of the same graph for other budgets.
        """
        return self._planned_step.explain(curve=curve)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write one HTML page about the plan, which needs no network.

        Args:
            path: The file; one that is there is replaced.

        Returns:
            The path of the file.
        """
        return self._planned_step.report(path)

    def __repr__(self) -> str:
        return repr(self._planned_step)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            owners = {"model": torch.nn.Module, "optimizer": torch.optim.Optimizer, "step.result": Result}
            owner = next((owner for owner, kind in owners.items() if hasattr(kind, name)), None)
            raise AttributeError(f"a step has no {name!r}" + (f"; write {owner}.{name}" if owner else ""), name=name, obj=self)

    @property
    def _planned_step(self) -> PlannedStep:
        return PlannedStep(graph=self.graph, result=self.result)

    def __reduce__(self) -> NoReturn:
        raise OptionError(
            "a step holds compiled code and the model, and can neither be copied nor pickled",
            hint='write its plan, checkmate.write(step.plan, "step.plan.json"), and give compile(..., plan=...) the file',
        )


_ELSEWHERE: Mapping[str, str] = {
    "backend": "leave it out; compiler='inductor' fuses the ops of the step",
    "fullgraph": "leave it out: a step is always one graph",
    "options": "write each option by its name, such as budget='8GiB'",
    "budget_gb": "write budget='8GiB'",
    **dict.fromkeys(
        ("device", "unplanned", "no_recompute", "ranks", "split_convolutions"),
        "leave it out: it is an option of torch.compile(model, backend='checkmate', options={...})",
    ),
}
"""Hints for options of other functions, by their names."""


def compile(  # noqa: A001 - named like torch.compile
    model: torch.nn.Module,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *by_position: Never,
    example: Example = (),
    budget: Amount | Budget | None = None,
    budget_of: BudgetOf = "allocated",
    compiler: Compiler = "eager",
    whole: bool | None = None,
    micro_batches: int = 1,
    clip_norm: float | None = None,
    autocast: torch.dtype | None = None,
    solver: Solver | str | None = None,
    time_limit_s: float | None = 30.0,
    plan: PlanSource | None = None,
    outputs: Outputs = "held",
    reserve: Amount = 0,
    accumulate: bool = False,
    checkpoints: Checkpoints = "hints",
    costs: CostSource = "measured",
    chunking: Chunking = "exact",
    host: Amount | None = None,
    dynamic: bool = False,
    mode: Mode = "default",
    inductor_options: Mapping[str, Any] | None = None,
    **unknown: Never,
) -> Step:
    """A training step that keeps a memory budget: ``prediction, loss = step(x, y)``.

    The step is traced and planned here, from the example; nothing runs, and model, optimizer and random
    state are unchanged afterwards.

    Args:
        model: Called with all elements of a batch but the last, or with a mapping's items as keyword arguments.
        loss: Called with the prediction and the last element of a batch. None if the model returns its loss: itself, as ``.loss``
            or ``["loss"]`` of an output, or as the only number of a tuple. The step then returns that output.
        optimizer: Updates the parameters after every backward; the gradients are then cleared. None leaves them in ``.grad``.
        by_position: Refused: all other arguments are given by name.
        example: A batch: ``(x, y)``, or a mapping of the model's arguments.
        budget: Largest number of bytes on the device during a step, everything included: ``"8GiB"``, a number, or a share
            such as ``"70%"`` of what the step needs above what no plan can change, which stays as many bytes for smaller batches.
            None keeps everything. See `Options`, like every argument that is not described here.
        budget_of: Whether the budget is of allocated memory, or of what the CUDA allocator reserves.
        compiler: ``"inductor"`` measures every compilation on the example: a step runs twice, and all that it changes is
            restored. With it the updates are in the step only where ``whole`` or ``micro_batches`` asks for that: they are then
            compiled, for SGD, Adam, AdamW, Adagrad and RMSprop, which rounds them differently.
        whole: Whether the optimizer's updates are planned with the rest of the step, each right after its gradient is
            computed, so that the gradients never exist all at once. By default this is done wherever it is possible: for
            optimizers of torch that update each parameter separately, such as SGD, Adam and AdamW. Arithmetic, state and
            ``state_dict`` are those of the optimizer, and its learning rate can change at any time.
        micro_batches: Equal parts into which a batch is cut. They are computed one after the other and their gradients added
            up: one step over the whole batch. Only in a whole step.
        clip_norm: Largest norm of all gradients together, in place of `torch.nn.utils.clip_grad_norm_`: after a step with an
            optimizer no gradient is left. Clipping needs every gradient before the first can be used, so that in a whole step
            too all of them exist at once.
        autocast: ``torch.bfloat16`` or ``torch.float16``: model and loss run under `torch.autocast` for their device, the
            parameters keep their type. Float16 needs a scaled loss and is therefore refused together with an optimizer.
        solver: The solver.
        time_limit_s: Seconds for the search.
        plan: A plan, or the path of a file with one, to run instead of searching.
        outputs: ``"held"`` if the step returns the prediction, or the model's own output: it then stays in memory to the end of
            the step, logits of a large vocabulary too. ``"released"`` for the loss alone: the step returns ``(None, loss)``.
        reserve: Memory to leave free, in addition to the optimizer's state, which is always reserved.
        accumulate: Whether gradients stay from step to step; without an optimizer they do, unless the caller clears them.
        checkpoints: Whether regions under ``torch.utils.checkpoint`` are always recomputed. ``"respected"`` is refused for a
            whole step: the rule is that no value of a region is held where the backward begins, and a whole step is one graph
            without that boundary.
        costs: Where costs come from.
        chunking: Whether ops on large tensors may run piece by piece: where no bit changes, also with sums, or never.
        host: Memory of the host that values may be copied to, such as ``"32GiB"``. Only in a whole step.
        dynamic: Whether one plan, made for the sizes of the example, is used for all batches that are no larger; otherwise
            every shape is compiled and planned separately.
        mode: The ``mode`` of `torch.compile`, with ``compiler="inductor"``.
        inductor_options: Settings of ``torch._inductor.config`` by name, with ``compiler="inductor"``.
        unknown: Refused, with the name that may be meant.

    Raises:
        InfeasibleBudgetError: No plan keeps the budget.
        PlanNotFoundError: No plan was found in time.
        GraphBreakError: The step cannot be traced as one graph.
        OptionError: A whole step is asked for, and the optimizer or the options do not allow one.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> x, y = torch.ones(3, 4), torch.zeros(3, 2)
        >>> step = compile(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), example=(x, y))
        >>> prediction, loss = step(x, y)
        >>> prediction.shape, step.whole, step.plan.order == tuple(range(len(step.graph.ops)))
        (torch.Size([3, 2]), True, True)
    """
    if by_position:
        raise OptionError(
            f"compile takes model, loss and optimizer by position, and {len(by_position)} more were given",
            hint="name the others: compile(model, loss, optimizer, example=(x, y), budget='8GiB')",
        )
    for name in unknown:
        known = [name for name in inspect.signature(compile).parameters if name not in ("by_position", "unknown")]
        raise unknown_option(name, "checkmate.torch.compile", known, _ELSEWHERE)
    check_choice("whole", whole, (True, False, None))
    check_choice("dynamic", dynamic, (False, True))
    example = validate_arguments(model, loss, optimizer, example)
    refuse_untrainable(model)
    options = Options(
        budget=budget,
        budget_of=budget_of,
        compiler=compiler,
        solver=solver,
        time_limit_s=time_limit_s,
        plan=plan,
        outputs=outputs,
        reserve=reserve,
        accumulate=accumulate,
        checkpoints=checkpoints,
        costs=costs,
        chunking=chunking,
        host=host,
        mode=mode,
        inductor_options=inductor_options or {},
    )
    if checkpoints == "respected":
        if whole:
            raise OptionError("checkpoints='respected' cannot be in a whole step", hint="leave out whole=True")
        whole = False
    if compiler == "inductor":
        whole = _whole_by_inductor(optimizer, whole or (micro_batches > 1 and whole is None))
    if autocast is torch.float16 and optimizer is not None:
        raise OptionError(
            "autocast=torch.float16 needs a scaled loss, or small gradients become zero",
            hint="use torch.bfloat16; or leave out the optimizer, scale in the loss, and step through torch.amp.GradScaler",
        )
    spec = spec_of_step(model, loss, optimizer, example, whole and not accumulate, micro_batches, clip_norm, autocast, outputs)
    return Step(spec, example, options, dynamic=dynamic)


def capture(
    model: torch.nn.Module,
    loss: Loss | None = None,
    *,
    example: Example,
    optimizer: torch.optim.Optimizer | None = None,
    whole: bool | None = None,
    micro_batches: int = 1,
    clip_norm: float | None = None,
    autocast: torch.dtype | None = None,
    outputs: Outputs = "held",
    reserve: Amount = 0,
    costs: CostSource = "measured",
    chunking: Chunking = "off",
    device: Device | str | os.PathLike[str] | None = None,
    plain_loop: bool = False,
) -> Graph:
    """The graph of a training step. Nothing runs and nothing is allocated, except to measure costs.

    Args:
        model: As in `compile`, like every argument that is not described here.
        loss: The loss.
        example: A batch.
        optimizer: Its state counts as resident, and in a whole step its updates are ops of the graph.
        whole: Whether the updates are in the graph.
        micro_batches: Equal parts into which a batch is cut.
        clip_norm: Largest norm of all gradients together.
        autocast: Type of `torch.autocast` around model and loss.
        outputs: Whether the prediction is held until the backward is over.
        reserve: Memory to leave free.
        costs: ``"measured"`` runs every distinct op alone a few times; ``"estimated"`` runs nothing, and the graph then has no
            workspace.
        chunking: ``"auto"`` or ``"exact"`` for the graph in which those regions run piece by piece that make the smallest peak
            lower: for `min_budget`, `pareto` and reports. `compile` takes no plan of it: it chooses regions by the budget.
        device: A device that need not be present: a name (``"H100"``), a profile or the path of a file with one. The step is
            traced on the CPU and then changed into what that device would run: its attention kernels and its allocator's
            block sizes, each op with the least time that the device's arithmetic and memory traffic allow. Model and batch may
            be on the meta device. `fits` also reports what is not known about the device.
        plain_loop: Whether the step is that of a loop which compiles the model alone, by `torch.compile`, and calls the loss and
            the optimizer itself: a plan of it is for ``options={"plan": ...}`` of the backend.

    Raises:
        GraphBreakError: The step cannot be traced as one graph.
        OptionError: No such device is known, or exact pieces are asked for where nothing runs.
    """
    example = validate_arguments(model, loss, optimizer, example)
    target = None if device is None else EmulatedDevice(load_device(device), cpu_costs=Profiler())
    if target is not None or costs != "measured":
        check_chunking(chunking)
    granule = 1 if target is None else target.device.granule_bytes
    options = Options(outputs=outputs, reserve=_with_state(reserve, optimizer, granule), costs=costs, chunking=chunking)
    with fake_inputs(example, model, loss, optimizer) as batch:
        if plain_loop:
            inputs = batch if loss is None or isinstance(batch, Mapping) else tuple(batch)[:-1]
            step = trace_step(spec_of_model(model, inputs, autocast), inputs, options, target)
        else:
            spec = spec_of_step(model, loss, optimizer, batch, whole, micro_batches, clip_norm, autocast, outputs)
            step = trace_step(spec, batch, options, target)
        chunks = Chunks(exact=chunking == "exact")
        graph = (step.whole if chunking == "off" else with_smallest_peak(step, chunks, budget_bytes=0).captured).graph
    return msgspec.structs.replace(graph, name=type(model).__name__)


def _whole_by_inductor(optimizer: torch.optim.Optimizer | None, asked: bool) -> bool:
    """Whether Inductor compiles the updates: only where that is asked for, since they are then rounded in another way.

    Raises:
        OptionError: It is asked for, and the updates of the optimizer cannot be compiled.
    """
    reason = uncompiled_reason(optimizer) if asked and optimizer is not None else None
    if reason is not None:
        raise OptionError(
            f"compiler='inductor' cannot compile the updates of a whole step: {reason}",
            hint="leave out whole=True and micro_batches, or use compiler='eager', which calls the optimizer's own code",
        )
    return asked


def _with_state(reserve: Amount, optimizer: torch.optim.Optimizer | None, granule: int = 1) -> int:
    return Options(reserve=reserve).reserve_bytes + (0 if optimizer is None else state_bytes(optimizer, granule))
