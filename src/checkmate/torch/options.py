"""The options of a step and of the backend: their types, documentation and checked values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch

from checkmate.core.budget import Budget
from checkmate.core.errors import OptionError
from checkmate.core.units import Amount, parse_bytes
from checkmate.frontend.options import (
    TIME_LIMIT_S,
    CommonOptions,
    CostSource,
    PlanningOptions,
    PlanSource,
    check_choices,
    refuse_unknown,
)
from checkmate.solvers.session import Solver

Compiler = Literal["eager", "inductor"]
Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Checkpoints = Literal["hints", "respected"]
Outputs = Literal["held", "released"]
Chunking = Literal["exact", "auto", "off"]
BudgetOf = Literal["allocated", "reserved"]


class GraphOptions(TypedDict, total=False):
    """Options of `checkmate.torch.compile` and `checkmate.torch.capture` that decide on the graph of a step.

    Attributes:
        whole: Whether the optimizer's updates are planned with the rest of the step, each directly after the computation of its
            gradient: the gradients never exist all at once. By default this is done whenever possible: for optimizers of torch
            that update each parameter separately, among them SGD, Adam and AdamW. Arithmetic, state and ``state_dict`` are the
            optimizer's, and its learning rate can change at any time.
        micro_batches: Equal parts into which a batch is cut. They are computed one after the other and their gradients added
            up: one step over the whole batch. Only in a whole step.
        clip_norm: Largest norm of all gradients together, in place of `torch.nn.utils.clip_grad_norm_`: after a step with an
            optimizer no gradient is left. Clipping needs every gradient before it can use the first one: all of them exist at
            once, in a whole step too.
        autocast: ``torch.bfloat16`` or ``torch.float16``: model and loss run under `torch.autocast` for their device, the
            parameters keep their type. Float16 needs a ``scaler`` if there is an optimizer.
        outputs: ``"held"`` if the step returns the prediction, or the model's own output: it then stays in memory to the end of
            the step, logits of a large vocabulary too. ``"released"`` for the loss alone: the step returns ``(None, loss)``. For
            the backend: whether the caller holds the outputs of the model to the end of the backward.
        reserve: Memory to leave free for later allocations. The optimizer's state is always reserved in a step.
    """

    whole: bool | None
    micro_batches: int
    clip_norm: float | None
    autocast: torch.dtype | None
    outputs: Outputs
    reserve: Amount


class StepOptions(GraphOptions, CommonOptions, total=False):
    """All options of `checkmate.torch.compile`: `GraphOptions`, `CommonOptions`, and these.

    Attributes:
        budget_of: The memory that the budget limits. ``"allocated"`` is the memory of tensors. ``"reserved"`` is the memory that
            the CUDA allocator holds for them, unused parts of segments included: other processes cannot have it. The plan is then
            chosen by a model of the allocator, and on a GPU its memory is reserved in one piece before the first step. It needs
            ``compiler="eager"``, and all ops run whole.
        compiler: ``"eager"`` runs the ops of the plan one by one, in its exact order. ``"inductor"`` fuses them. The compiled
            step then runs twice on the first batch, all changed state is restored, and its measured peak has to keep the
            budget; this takes up to four compilations. If none keeps it, the ``"eager"`` compiler is used, with a warning. The
            updates are in the step only with ``whole`` or ``micro_batches``: they are then compiled, for SGD, Adam, AdamW,
            Adagrad and RMSprop, which rounds them differently.
        accumulate: Whether the first plan is already for a step that begins with gradients. Such a step needs no option: by
            default it is planned at its first occurrence. With True there is one plan instead of two, and a budget that is too
            small for accumulated gradients is refused at the first step.
        checkpoints: Treatment of regions under ``torch.utils.checkpoint``. With ``"hints"`` a plan may keep any of their values.
            With ``"respected"`` the backward recomputes them and never holds them, and the planner decides on all other values.
            Values that selective checkpointing must save are computed once in both cases. ``"respected"`` is refused for a whole
            step, which has no boundary before the backward.
        costs: ``"measured"`` on the device, or ``"estimated"``: time by a roofline, and on a CPU the most workspace
            that kernels of its kind take.
        chunking: Whether ops on large tensors may run piece by piece, for example the head of a language model with its loss: the
            tensors then never exist whole. ``"exact"`` allows regions that give the bits of the whole ops, tested on random data
            of their sizes on this device; they are searched if whole ops have no plan, or an overhead above 10 %. ``"auto"``
            allows sums over the pieces too, in another order than in the plain step: gradients are then not bitwise the same.
            With ``compiler="inductor"`` only ``"auto"`` has an effect: regions that compute nothing twice run piece by piece at
            every budget, and bits do not depend on the budget. With several ranks all ops run whole.
        host: Memory of the host that values may be copied to while the step runs (``"32GiB"``), if that is faster than computing
            them again; the rates of the bus are measured. Frozen parameters (``requires_grad=False``) that are on the CPU are
            fetched from there before each use, as packed if they are quantized, or are on the device all the time if they fit.
            Only with ``compiler="eager"``; without a whole step nothing but frozen weights. All ops then run whole.
        scaler: A `torch.amp.GradScaler`. The step scales the loss, skips its updates if a gradient overflows, and calls
            ``scaler.update()``, to the bit as a plain loop. All gradients exist at once, as with ``clip_norm``. Without an
            optimizer they stay scaled in ``.grad``.
        dynamic: Whether one plan, made for the sizes of the example, is used for all batches that are no larger; otherwise
            every shape is compiled and planned separately.
        mode: The ``mode`` of `torch.compile`, for ``compiler="inductor"``; ``"reduce-overhead"`` is for whole steps of
            ``compiler="eager"`` too. Steps after the third are then replayed by a CUDA graph. The optimizer is SGD, or another
            with ``capturable=True``; a learning rate that changes has to be a tensor. CUDA graphs have no effect on a CPU; with
            them a budget is one of reserved memory (see ``budget_of``).
        inductor_options: Settings of ``torch._inductor.config`` by name, for ``compiler="inductor"``; they override those of the
            mode. Settings that would undo the plan are refused.
    """

    budget_of: BudgetOf
    compiler: Compiler
    accumulate: bool
    checkpoints: Checkpoints
    costs: CostSource
    chunking: Chunking
    host: Amount | None
    scaler: torch.amp.GradScaler | None
    dynamic: bool
    mode: Mode
    inductor_options: Mapping[str, Any] | None


class TracedOptions(TypedDict, total=False):
    """Options of `region_policy`, and of forecasts."""

    autocast: torch.dtype | None
    time_limit_s: float


class ForecastOptions(TracedOptions, total=False):
    """Options of `checkmate.torch.largest_batch` and `checkmate.torch.fits`.

    Attributes:
        whole: Whether the optimizer's updates are planned with the rest, as in `compile`. False is a plain training loop.
        micro_batches: As in `compile`, like ``clip_norm`` and ``outputs``. A largest batch is a multiple of it.
        autocast: As in `compile`. The rules are the device's: softmax, norms and losses become float32 on a CUDA device.
        time_limit_s: Seconds for everything, 60 by default. Tracing a large model takes half a minute, and a largest size takes
            three traces; searches without any time left are skipped, with a remark.
        host: Memory of the host that values may be copied to, and from which frozen weights may be fetched.
    """

    whole: bool | None
    micro_batches: int
    clip_norm: float | None
    outputs: Outputs
    host: Amount | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of ``torch.compile(model, backend="checkmate", options={...})``, checked.

    Options that are not listed below have the same names and meanings as in `StepOptions`.

    Attributes:
        budget: Maximum of bytes on the device during forward and backward, everything included: ``"8GiB"``, a number of bytes,
            or a share of the whole step. ``"70%"``: the fixed bytes (parameters, buffers, inputs, state of the optimizer,
            gradients that exist or that the step leaves, held outputs) plus 70 % of what keeping everything needs above them.
            None keeps everything.
        device: The device whose memory counts; by default the device of the model.
        no_recompute: Names of ops that must run only once: ``"my_library::op"``, or ``"op"`` for any library.
        ranks: In a distributed job, with ``"together"`` rank 0 plans for all ranks. They have to trace the same graphs, and all
            of them stop if they do not, or if one cannot plan. With ``"alone"`` each rank plans its own graphs.
        unplanned: Reaction to a call without any planned graph although a budget is given, because Dynamo makes no graph of it:
            with ``"error"`` the first call raises `NothingPlannedError`, with ``"warn"`` it logs a warning and runs unplanned.
    """

    budget: Amount | Budget | None = None
    budget_of: BudgetOf = "allocated"
    compiler: Compiler = "eager"
    solver: Solver | str | None = None
    time_limit_s: float | None = TIME_LIMIT_S
    plan: PlanSource | None = None
    device: str | None = None
    outputs: Outputs = "held"
    reserve: Amount = 0
    accumulate: bool = False
    no_recompute: Sequence[str] = ()
    checkpoints: Checkpoints = "hints"
    ranks: Literal["together", "alone"] = "together"
    costs: CostSource = "measured"
    unplanned: Literal["error", "warn"] = "error"
    chunking: Chunking = "exact"
    host: Amount | None = None
    mode: Mode = "default"
    inductor_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choices(Options, {field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        self._check_together()
        if not isinstance(self.inductor_options or {}, Mapping):
            raise OptionError(
                f"inductor_options={self.inductor_options!r} is not a mapping",
                hint="give settings by name, such as inductor_options={'epilogue_fusion': True}",
            )
        names = self.no_recompute
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise OptionError(
                f"no_recompute={names!r} is not a sequence of names",
                hint="give a tuple, such as no_recompute=('my_library::op',)",
            )
        planning = self.planning  # parsed now to refuse an unreadable budget before tracing
        parse_bytes(self.reserve)
        values: dict[str, Any] = {
            "budget": planning.budget,
            "solver": planning.solver,
            "plan": planning.plan,
            "host": None if self.host is None else parse_bytes(self.host),
            "no_recompute": tuple(names),
            "inductor_options": {str(name): value for name, value in (self.inductor_options or {}).items()},
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        """Refuse options that exclude each other."""
        if self.budget_of == "reserved" and (self.compiler != "eager" or self.chunking == "auto"):
            given = f"compiler={self.compiler!r}" if self.compiler != "eager" else "chunking='auto'"
            raise OptionError(
                f"budget_of='reserved' cannot be kept with {given}: what the allocator holds is predicted from the requests of "
                "whole ops in the order of the plan",
                hint=f"leave out budget_of, or {given.partition('=')[0]}",
            )
        if self.compiler == "eager" and (self.mode not in ("default", "reduce-overhead") or self.inductor_options):
            given = "inductor_options" if self.inductor_options else f"mode={self.mode!r}"
            raise OptionError(
                f"{given} needs compiler='inductor': compiler='eager' runs the ops of the plan as they are",
                hint=f"set compiler='inductor', or leave out {given}; torch.compile takes either mode or options, so that with "
                "a budget the mode is one of its options: options={'budget': ..., 'compiler': 'inductor', 'mode': ...}",
            )
        if self.host is not None and (self.compiler != "eager" or self.replays):
            raise OptionError(
                "host needs compiler='eager' and no CUDA graph: Inductor chooses the order of ops, and no graph has copies",
                hint="leave out compiler and mode, or host",
            )
        if self.host is not None and self.budget_of == "reserved":
            raise OptionError("host and budget_of='reserved' are not planned together", hint="leave out budget_of, or host")
        if self.host is not None and self.budget is None:
            raise OptionError("host without a budget copies nothing", hint="set a budget, such as budget='8GiB'")

    @property
    def planning(self) -> PlanningOptions:
        """The options that all front ends share: budget, solver, time limit and plan."""
        return PlanningOptions.of(budget=self.budget, solver=self.solver, time_limit_s=self.time_limit_s, plan=self.plan)

    @property
    def copies(self) -> bool:
        """Whether a plan may copy values to the host and fetch them, or a given plan does."""
        given = self.planning.plan
        return self.host is not None or (given is not None and given.host is not None)

    @property
    def replays(self) -> bool:
        """Whether whole steps are to be replayed by a CUDA graph."""
        return self.compiler == "eager" and self.mode == "reduce-overhead"

    @property
    def reserve_bytes(self) -> int:
        """The option ``reserve`` in bytes."""
        return parse_bytes(self.reserve)

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Options:
        """Options from the mapping passed to ``torch.compile``.

        Args:
            options: Values by name, or None for the defaults.

        Raises:
            OptionError: An option is unknown; the message names the nearest known one.
            UnitError: The budget cannot be read.
        """
        hint = "give it to checkmate.torch.compile(model, loss, optimizer, example=(x, y), budget=...), which plans a whole step"
        of_compile = ("loss", "optimizer", "example", "whole", "micro_batches", "clip_norm", "autocast")
        known = [field.name for field in dataclasses.fields(cls)]
        refuse_unknown(options or {}, "backend 'checkmate'", known, dict.fromkeys(of_compile, hint))
        return cls(**(options or {}))


def fields_of(kind: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are fields of a dataclass."""
    return {field.name: options[field.name] for field in dataclasses.fields(kind) if field.name in options}


def check_chunking(chunking: Chunking) -> None:
    """Refuse exact pieces where nothing runs to test their bits."""
    if chunking == "exact":
        raise OptionError(
            "chunking='exact' cannot be answered for: which regions keep every bit is found out by running them on the device, "
            "at the sizes of the step",
            hint="set chunking='auto', which also runs regions in pieces that change the order of sums, or chunking='off'",
        )
