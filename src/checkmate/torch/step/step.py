"""A whole training step under a budget: ``prediction, loss = step(x, y)``."""

from __future__ import annotations

import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Never, NoReturn, Unpack

import msgspec
import torch
from torch.utils import _pytree as pytree

from checkmate.core.budget import Budget
from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.core.units import Amount, format_bytes
from checkmate.cost.device import Device, load_device
from checkmate.frontend.options import CostSource, takes_options
from checkmate.torch.backend import compile_graph
from checkmate.torch.chunking.choose import Chunks, with_smallest_peak
from checkmate.torch.compilation.resident_account import Hooks
from checkmate.torch.emulate.device import EmulatedDevice, fake_inputs
from checkmate.torch.graph.optimizer_ops import uncompiled_reason
from checkmate.torch.measure.device_memory import state_bytes
from checkmate.torch.measure.profiler import Profiler
from checkmate.torch.options import Chunking, GraphOptions, Options, StepOptions, check_chunking, fields_of
from checkmate.torch.step.arguments import BatchLayout, Example, Loss, refuse_inference_mode, refuse_untrainable, warn_of_clipping
from checkmate.torch.step.planned_step import Planned
from checkmate.torch.step.recipe import StepRecipe, check_micro_batches, refuse_for_function
from checkmate.torch.step.tracing import StopAfterCapture, compiled_program, run_as_one_graph, trace_step
from checkmate.torch.steps.program import GraphInterface

_log = logging.getLogger("checkmate.torch")


@dataclass(eq=False, slots=True)
class _Compiled:
    """The graphs that a step was compiled for. PyTorch keeps a backend for ever, and therefore no backend may hold the model."""

    planned: list[tuple[Graph, Result]] = field(default_factory=list)
    returned: list[weakref.ref[torch.UntypedStorage]] = field(default_factory=list)  # storages that the last run returned

    def returned_bytes(self) -> int:
        """Bytes that the last run returned and that still exist: the plan of a whole step has room for them."""
        return sum({s.data_ptr(): s.nbytes() for ref in self.returned if (s := ref()) is not None}.values())

    def record(self, interface: GraphInterface, result: Result) -> None:
        """Note a plan; log it if it is not the first one."""
        if self.planned:
            peak = format_bytes(result.peak_bytes)
            _log.warning("the step was compiled again and planned in %.1f s: peak %s", result.elapsed_s, peak)
        self.planned.append((interface.graph, result))


class Step(Planned):
    """A compiled training step. `checkmate.torch.compile` makes one.

    Attributes:
        graph: The graph of the step for the example.
        plan: The plan of the step.
        result: The solver's result: the plan with its cost, its peak and their proven bounds.
        whole: Whether the optimizer's updates are in the graph, each right after the last op of its gradient.
    """

    whole: bool

    def __init__(self, recipe: StepRecipe, options: Options, *, dynamic: bool = False) -> None:
        self._spec = spec = recipe.spec()
        self.whole = spec.whole
        self._unclipped = recipe.optimizer is not None and recipe.clip_norm is None
        self._own_loss, self._micro_batches = recipe.loss is None, recipe.micro_batches
        self._layout = BatchLayout.of(recipe.example)
        self._compiled = compiled = _Compiled()
        given = options.plan
        with StopAfterCapture() as stop:
            hooks = Hooks(planned=compiled.record, before_forward=stop.before_running, inference=False, whole=spec.whole)

            def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
                # A given plan is for the example's shape; other shapes are planned.
                now = replace(options, plan=given if not compiled.planned else None)
                return compile_graph(gm, inputs, now, replace(hooks, returned_bytes=compiled.returned_bytes()))

            self._run = compiled_program(spec, backend, dynamic=dynamic)
            run_as_one_graph(self._run, spec, recipe.example)
        self.graph, self.result = compiled.planned[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step: forward, loss, backward, and the optimizer if there is one. The gradients are then cleared.

        Args:
            args: A batch like the example: the model's inputs, then the loss's target; or this batch as one argument.
            kwargs: The model's inputs, if the example was a mapping.

        Returns:
            The prediction and the loss, both detached, since the backward is done. If the model computes its loss, its output,
            detached, for example an output of Hugging Face's with ``.loss`` and ``.logits``. (None, loss) if the output is the
            loss alone, or with ``outputs="released"``. The cache that only generation reads is left out.

        Raises:
            CheckmateError: The batch has a new shape, and no plan for it keeps the budget.
            OptionError: The arguments do not match the example, or ``micro_batches`` does not divide the rows.
        """
        refuse_inference_mode()
        if self._unclipped:
            warn_of_clipping(sys._getframe(1).f_code)
            self._unclipped = False
        batch = self._layout.batch_of(args, kwargs)
        check_micro_batches(batch, self._micro_batches)
        run = functools.partial(run_as_one_graph, self._run, self._spec, batch, self._layout.example)
        prediction, loss = self._spec.finish(run)
        if self.whole:
            tensors = [t for t in pytree.tree_leaves((prediction, loss)) if isinstance(t, torch.Tensor)]
            self._compiled.returned = [weakref.ref(t.untyped_storage()) for t in tensors]
        own = self._own_loss and (prediction is not None or loss is None)
        return prediction if own else (prediction, loss)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            owners = {"model": torch.nn.Module, "optimizer": torch.optim.Optimizer, "step.result": Result}
            owner = next((owner for owner, kind in owners.items() if hasattr(kind, name)), None)
            raise AttributeError(f"a step has no {name!r}" + (f"; write {owner}.{name}" if owner else ""), name=name, obj=self)

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
        ("device", "unplanned", "no_recompute", "ranks"),
        "leave it out: it is an option of torch.compile(model, backend='checkmate', options={...})",
    ),
}
"""Hints for options of other functions, by their names."""


@takes_options(StepOptions, Options, StepRecipe, elsewhere=_ELSEWHERE, dynamic=False, inductor_options=None)
def compile(  # noqa: A001 - named like torch.compile
    model: torch.nn.Module | Callable[..., Any],
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *by_position: Never,
    example: Example = (),
    budget: Amount | Budget | None = None,
    **options: Unpack[StepOptions],
) -> Step:
    """A training step that keeps a memory budget: ``prediction, loss = step(x, y)``.

    The step is traced and planned here, from the example; nothing runs, and model, optimizer and random
    state are unchanged afterwards.

    Args:
        model: Called with all elements of a batch but the last, or with a mapping's items as keyword arguments. Or a function
            that is the step, called with all elements: it takes its own gradients, and steps its optimizers. The step returns
            what it returns, detached.
        loss: Called with the prediction and the last element of a batch. None if the model returns its loss: itself, as ``.loss``
            or ``["loss"]`` of an output, or as the only number of a tuple. The step then returns that output.
        optimizer: Updates the parameters after every backward; the gradients are then cleared. None leaves them in ``.grad``.
        by_position: Refused: all other arguments are given by name.
        example: A batch: ``(x, y)``, or a mapping of the model's arguments.
        budget: Maximum of bytes on the device during a step, everything included: ``"8GiB"``, a number, or a share
            such as ``"70%"`` of the bytes that the step needs above fixed bytes; a smaller batch has the same number of bytes.
            None keeps everything.
        options: Options of planning and compiling; `StepOptions` describes them.

    Raises:
        InfeasibleBudgetError: No plan keeps the budget.
        PlanNotFoundError: No plan was found in time.
        GraphBreakError: The step cannot be traced as one graph.
        OptionError: ``whole`` is true, and the optimizer or the options do not allow a whole step.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> x, y = torch.ones(3, 4), torch.zeros(3, 2)
        >>> step = compile(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), example=(x, y))
        >>> prediction, loss = step(x, y)
        >>> prediction.shape, step.whole, step.result.overhead
        (torch.Size([3, 2]), True, 1.0)
    """
    if by_position:
        raise OptionError(
            f"compile takes model, loss and optimizer by position, and {len(by_position)} more were given",
            hint="name the others: compile(model, loss, optimizer, example=(x, y), budget='8GiB')",
        )
    given = {"model": model, "loss": loss, "optimizer": optimizer, "example": example}
    recipe = StepRecipe(**given, **fields_of(StepRecipe, options))
    checked = Options(budget=budget, **fields_of(Options, options))
    if isinstance(model, torch.nn.Module):
        refuse_untrainable(model)
    else:
        respected = checked.checkpoints == "respected"
        refuse_for_function({"dynamic": options.get("dynamic"), "accumulate": checked.accumulate, "checkpoints": respected})
    whole = _whole(recipe, checked)
    if recipe.autocast is torch.float16 and optimizer is not None and recipe.active_scaler is None:
        raise OptionError(
            "autocast=torch.float16 needs a scaled loss, or small gradients become zero",
            hint="use torch.bfloat16; or give scaler=torch.amp.GradScaler()",
        )
    return Step(replace(recipe, whole=whole, on_host=checked.host is not None), checked, dynamic=options.get("dynamic", False))


@takes_options(GraphOptions, Options, StepRecipe)
def capture(
    model: torch.nn.Module | Callable[..., Any],
    loss: Loss | None = None,
    *,
    example: Example,
    optimizer: torch.optim.Optimizer | None = None,
    costs: CostSource = "measured",
    chunking: Chunking = "off",
    device: Device | str | os.PathLike[str] | None = None,
    plain_loop: bool = False,
    **options: Unpack[GraphOptions],
) -> Graph:
    """The graph of a training step. Nothing runs and nothing is allocated, except to measure costs.

    Args:
        model: As in `compile`.
        loss: As in `compile`.
        example: A batch.
        optimizer: Its state counts as resident, and in a whole step its updates are ops of the graph.
        costs: ``"measured"`` runs every distinct op alone a few times; ``"estimated"`` runs nothing, and counts the
            most workspace that kernels of their kind take on a CPU.
        chunking: ``"auto"`` or ``"exact"`` for the graph whose regions run piece by piece if that lowers the smallest peak, for
            `min_budget`, `pareto` and reports. `compile` takes no plan of this graph: it chooses regions by the budget.
        device: A device that need not be present: a name (``"H100"``), a profile or the path of a file with one. The step is
            traced on the CPU and then changed into the step of that device: its attention kernels and its allocator's
            block sizes, each op with the least time that the device's arithmetic and memory traffic allow. Model and batch may
            be on the meta device. `fits` also reports unknown properties of the device.
        plain_loop: Whether a loop compiles only the model, by `torch.compile`, and calls the loss and the optimizer itself. A
            plan of this step is for ``options={"plan": ...}`` of the backend.
        options: Further options, as in `compile`; `GraphOptions` describes them.

    Raises:
        GraphBreakError: The step cannot be traced as one graph.
        OptionError: The device is unknown, or exact pieces are requested but nothing runs.
    """
    given = {"model": model, "loss": loss, "optimizer": optimizer, "example": example}
    recipe = StepRecipe(**given, **fields_of(StepRecipe, options))
    if not isinstance(model, torch.nn.Module):
        refuse_for_function({"plain_loop": plain_loop})
    target = None if device is None else EmulatedDevice(load_device(device), cpu_costs=Profiler())
    checked = Options(costs=costs, chunking=chunking, **fields_of(Options, options))
    if target is not None or costs != "measured":
        check_chunking(chunking)
    granule = 1 if target is None else target.device.granule_bytes
    modules, optimizers = recipe.owners()
    state = sum(state_bytes(optimizer, granule) for optimizer in optimizers)
    checked = replace(checked, reserve=checked.reserve_bytes + state)
    with fake_inputs(example, *modules, *optimizers) as batch:
        if plain_loop:
            inputs = batch if loss is None or isinstance(batch, Mapping) else tuple(batch)[:-1]
            recipe = replace(recipe, loss=None, example=inputs)
            step = trace_step(recipe.spec_of_model(), inputs, checked, target)
        else:
            step = trace_step(replace(recipe, example=batch).spec(), batch, checked, target)
        chunks = Chunks(exact=chunking == "exact")
        graph = (step.whole if chunking == "off" else with_smallest_peak(step, chunks, budget_bytes=0)).graph
    return msgspec.structs.replace(graph, name=getattr(model, "__name__", type(model).__name__))


def _whole(recipe: StepRecipe, options: Options) -> bool | None:
    """Whether the updates are in the step; None if they are in it whenever possible.

    Inductor compiles updates only with ``whole`` or ``micro_batches``: it rounds them in another way.
    """
    whole, is_function = recipe.whole, not isinstance(recipe.model, torch.nn.Module)
    if options.checkpoints == "respected":
        if whole:
            raise OptionError("checkpoints='respected' cannot be in a whole step", hint="leave out whole=True")
        whole = False
    if options.compiler == "inductor":
        whole = whole or (recipe.micro_batches > 1 and whole is None)
        compiled = recipe.owners()[1] if whole or is_function else ()
        reason = next(filter(None, map(uncompiled_reason, compiled)), None)
        reason = "a scaler decides on them in each step" if whole and recipe.active_scaler is not None else reason
        if reason is not None:
            raise OptionError(
                f"compiler='inductor' cannot compile the updates of a whole step: {reason}",
                hint="leave out whole=True and micro_batches, or use compiler='eager', which calls the optimizer's own code",
            )
    return recipe.whole if is_function else whole and not options.accumulate
