"""Trains the modules of an unchanged script within a budget.

A module is compiled in place at its first call with gradients, if an optimizer owns parameters of it and no other module of this
kind is calling it. The compiled module is the outermost one that the script calls, which need not be the one that the script
calls its model. Until then calls of every module with parameters of an optimizer go through a `_FirstCall`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import statistics
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Set
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from checkmate.core.budget import keep_all_bytes
from checkmate.core.result import told_time
from checkmate.core.units import Amount, format_at_least, format_bytes, seconds
from checkmate.torch._compat import replaced
from checkmate.torch._compat.dispatch import innermost_transform
from checkmate.torch._compat.dynamo import OptimizedModule, call_through, called_through, traceable_call
from checkmate.torch.measure.device_memory import instances
from checkmate.torch.options import Options
from checkmate.torch.steps.coordinator import coordinator

_log = logging.getLogger("checkmate.torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """The figures of a plan."""

    peak_bytes: int
    budget_bytes: int
    keep_all_bytes: int | None  # peak of keeping everything; None if the step was not planned as a whole
    overhead: float  # cost over the cost of computing each op once
    gap: float  # maximum share of the cost that a better plan could save
    planned_s: float | None  # sum of the op costs; None if the step was not planned as a whole

    def __str__(self) -> str:
        each = "" if self.keep_all_bytes is not None else ", each graph on its own"
        peak, budget = format_bytes(self.peak_bytes), format_bytes(self.budget_bytes)
        return f"planned {peak} of {budget}, overhead {self.overhead:.3f}x, gap {100 * self.gap:.2f}%{each}"


class TrainingReport:
    """The modules that were trained within a budget, and their plans."""

    def __init__(self, budget: Amount) -> None:
        self.budget = budget
        self.compiled: list[str] = []
        self.optimizers = 0
        self.steps = 0
        self._steps: Counter[int] = Counter()  # of each optimizer, by its identity
        self.planned: dict[StepFigures, tuple[int, int, int]] = {}  # number of optimizer steps, the first and the last, from 1
        self._ended: dict[int, float] = {}  # when the last step of each optimizer ended
        self._times: dict[StepFigures, list[float]] = {}  # seconds from the end of a step to that of the next
        self.announced_bytes = 0
        self.measured_bytes: int | None = None

    def step_s(self, plan: StepFigures) -> float | None:
        """Median seconds of the steps that ran a plan after its first, optimizer and data included; None if there are none."""
        times = self._times.get(plan, [])[1:]
        return statistics.median(times) if times else None

    def rows(self) -> list[tuple[str, str]]:
        """Names and texts, for two columns."""
        rows = [("budget", str(self.budget)), ("compiled", ", ".join(self.compiled) or "nothing")]
        rows.append(("steps", f"{self.steps}, of which {sum(count for count, *_ in self.planned.values())} ran plans"))
        for plan, (count, first, last) in self.planned.items():
            time_s = self.step_s(plan)
            told = "" if time_s is None or plan.planned_s is None else f"; {told_time(plan.planned_s, time_s)}"
            rows.append(("", f"{f'step {first}' if count == 1 else f'{count} of steps {first} to {last}'}: {plan}{told}"))
        if self.announced_bytes:
            rows.append(("announced", f"up to {format_bytes(self.announced_bytes)} in a step that was not planned as a whole"))
        measured = "no CUDA device was used" if self.measured_bytes is None else f"{format_bytes(self.measured_bytes)} at most"
        return [*rows, ("measured", measured)]

    def lines(self) -> list[str]:
        """The rows and the advice as text."""
        return [f"  {name:<10}{text}" for name, text in [*self.rows(), ("try", self.advice())]]

    def advice(self) -> str:
        """The next thing to try."""
        if not self.compiled and not self.planned:
            if not self.optimizers:
                return "train with an optimizer of torch.optim: no optimizer was made, and what it owns is what is compiled"
            return "call the model itself, not model.forward: no module of which an optimizer owns parameters was called"
        if not self.planned:
            return "read the warnings above, or set TORCH_LOGS=graph_breaks to see what torch.compile makes of the model"
        whole = [planned for planned in self.planned if planned.keep_all_bytes is not None]
        if not whole:
            return "train for two steps or more: a step is planned as a whole when it comes for the second time"
        largest = max(whole, key=lambda planned: planned.peak_bytes)
        assert largest.keep_all_bytes is not None
        if largest.peak_bytes >= largest.keep_all_bytes:
            return f"try a larger batch, or a budget below {format_bytes(largest.keep_all_bytes)}: nothing is computed twice"
        if largest.overhead >= 1.2:  # more memory is worth a try
            more = format_at_least((largest.peak_bytes + largest.keep_all_bytes) // 2)
            return f"try --budget {more} for less overhead; keeping everything takes {format_bytes(largest.keep_all_bytes)}"
        if largest.overhead <= 1.05:  # less memory is worth a try
            return "try a larger batch or a smaller budget: what is computed twice costs little"
        return f"compare with --budget {format_at_least(largest.keep_all_bytes)}, which keeps everything"

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the plan of a step of an optimizer that has run."""
        self._steps[id(optimizer)] += 1
        step = self._steps[id(optimizer)]
        self.steps = max(self.steps, step)
        result, whole = coordinator().result, coordinator().step
        began, now_s = self._ended.get(id(optimizer)), time.perf_counter()
        self._ended[id(optimizer)] = now_s
        if result is None:
            return
        now = StepFigures(
            peak_bytes=result.peak_bytes,
            budget_bytes=result.budget_bytes,
            keep_all_bytes=None if whole is None else _keep_all_bytes(whole),
            overhead=result.overhead,
            gap=result.gap,
            planned_s=None if whole is None else seconds(result.cost, whole.graph.cost_unit),
        )
        count, first, last = self.planned.get(now, (0, step, 0))
        self.planned[now] = count + (step > last), first, step
        if began is not None:
            self._times.setdefault(now, []).append(now_s - began)

    def end(self) -> None:
        """Record the announced bytes, and the bytes that the device measured."""
        self.announced_bytes = coordinator().announced_bytes
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self.measured_bytes = torch.cuda.max_memory_allocated()


@functools.lru_cache(maxsize=16)
def _keep_all_bytes(step: Any) -> int:
    return keep_all_bytes(step.graph)


_ACTIVE: list[TrainingReport] = []


def is_active() -> bool:
    """Whether a block of `training_within` is running, as under `checkmate run`."""
    return bool(_ACTIVE)


@contextlib.contextmanager
def training_within(budget: Amount, **options: Any) -> Generator[TrainingReport]:
    """Context in which every module that an optimizer trains is compiled within a budget.

    Calls of `torch.compile` with another backend compile within the budget instead.
    """
    given = {"unplanned": "warn", **options, "budget": budget}
    Options.of(given)
    report = TrainingReport(budget)
    training = _Training(given, report)
    hook = register_optimizer_step_post_hook(lambda optimizer, _args, _kwargs: report.note(optimizer))
    _ACTIVE.append(report)
    try:
        made = replaced(torch.optim.Optimizer, "__init__", training.init_of_optimizers())
        with made, replaced(torch, "compile", training.compiles()):
            yield report
    finally:
        _ACTIVE.remove(report)
        hook.remove()
        for module in instances(nn.Module):  # calls go to the modules again, or to their compiled code
            _release(module)
        report.end()


class _FirstCall:
    """Takes the calls of a module until the first training call, which compiles the module."""

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        self._module = weakref.ref(module)
        self._options = options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; compile it before if the call is for training."""
        return self._call(*args, **kwargs)

    @torch.compiler.disable  # the script may call it between the graphs of a function compiled by the script
    def _call(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        if not torch.is_grad_enabled() or innermost_transform() is not None:
            return module._call_impl(*args, **kwargs)
        module.compile(backend="checkmate", options=self._options)
        return module(*args, **kwargs)


class _Training:
    """The modules and optimizers of a block of `training_within`."""

    def __init__(self, options: dict[str, Any], report: TrainingReport) -> None:
        self._options = options
        self._report = report
        self._compiled: list[weakref.ref[nn.Module]] = []

    def init_of_optimizers(self) -> Callable[..., None]:
        """The constructor of optimizers, which also looks for the modules of the optimizer's parameters."""
        original = torch.optim.Optimizer.__init__

        @functools.wraps(original)
        def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._report.optimizers += 1
            compiled = {id(inner) for ref in self._compiled if (outer := ref()) is not None for inner in outer.modules()}
            owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
            modules = list(instances(nn.Module))
            deriving = self._told_of_derivatives([m for m in modules if _derives(type(m))], owned)
            for module in modules:
                traced = not isinstance(module, (torch.jit.ScriptModule, OptimizedModule)) and id(module) not in compiled
                traced = traced and deriving.isdisjoint(map(id, module.modules()))
                if traced and any(id(p) in owned for p in module.parameters()) and called_through(module) is None:
                    call_through(module, _FirstCall(module, self._options))

        return init

    def _told_of_derivatives(self, deriving: Iterable[nn.Module], owned: Set[int]) -> set[int]:
        """Modules that take derivatives that are derived again, and all modules in them: nothing of them can be compiled."""
        found = set[int]()
        for module in deriving:
            inside = {id(inner) for inner in module.modules()}
            if not inside <= found and any(id(p) in owned for p in module.parameters()):
                _log.warning(
                    "%s derives with create_graph=True, which torch.compile cannot: it is trained as it is, without a budget"
                    "\n\nhint: compile the step as a function: checkmate.torch.compile(step_fn, example=..., budget=...)",
                    type(module).__name__,
                )
            found |= inside
        return found

    def compiles(self) -> Callable[..., Any]:
        """`torch.compile` with the backend of this package."""
        original, told = torch.compile, set[str]()

        @functools.wraps(original)
        def compiled(model: Any = None, *, backend: Any = "inductor", **settings: Any) -> Any:
            if model is None or settings.get("disable"):
                return original(model, backend=backend, **settings)
            module = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
            if isinstance(module, nn.Module):
                self._compiled.append(weakref.ref(module))
                _release(module)
                if model == module._call_impl:
                    model = traceable_call(module) or model
            self._report.compiled.append(type(module).__name__ if isinstance(module, nn.Module) else _name(model))
            if not _is_ours(backend):
                if _name(backend) not in told:
                    told.add(_name(backend))
                    _log.warning(
                        "torch.compile(..., backend=%r) of the script: backend 'checkmate' is used instead", _name(backend)
                    )
                kept = {name: settings[name] for name in ("fullgraph", "dynamic") if name in settings}
                backend, settings = "checkmate", {**kept, "options": self._options}
            return original(model, backend=backend, **settings)

        return compiled


@functools.cache
def _derives(of: type) -> bool:
    """Whether a method of a class, or a function that one names, derives with ``create_graph``."""
    stack = [f for base in of.__mro__ for f in vars(base).values() if isinstance(f, FunctionType) and _is_script(f)]
    known = set[FunctionType]()
    while stack:
        function = stack.pop()
        if function not in known:
            known.add(function)
            code = function.__code__
            if any(isinstance(constant, tuple) and "create_graph" in constant for constant in code.co_consts):
                return True
            named = (function.__globals__.get(name) for name in code.co_names)
            stack += [f for f in named if isinstance(f, FunctionType) and _is_script(f)]
    return False


def _is_script(function: FunctionType) -> bool:
    return str(function.__module__).partition(".")[0] not in ("torch", "lightning", "pytorch_lightning")


def _release(module: nn.Module) -> None:
    """Remove any `_FirstCall` from a module and from the modules in it."""
    for inner in module.modules():
        if isinstance(called_through(inner), _FirstCall):
            call_through(inner, None)


def _is_ours(backend: Any) -> bool:
    """Whether a backend belongs to this package."""
    function = getattr(backend, "func", backend)
    return backend == "checkmate" or str(getattr(function, "__module__", "")).partition(".")[0] == "checkmate"


def _name(of: Any) -> str:
    return of if isinstance(of, str) else getattr(of, "__qualname__", None) or type(of).__name__
