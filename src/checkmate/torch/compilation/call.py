"""A context around each call of a compiled function, which finds the ops of the call that no plan covers.

Dynamo leaves out code that it cannot trace: it skips a function, or runs the code between two graphs eagerly. Nothing then calls
the backend: only a look at whole calls can tell. Differentiable ops make autograd nodes. Their numbers inside of planned
graphs, while Dynamo compiles (from fake tensors), and elsewhere tell which ops ran where. A call without gradients makes none.
"""

from __future__ import annotations

import functools
import gc
import linecache
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from checkmate.core.errors import CheckmateError, GraphError, OptionError
from checkmate.torch._compat.dynamo import (
    RECURRENT,
    CompileLog,
    RecurrentLayersOutside,
    TorchRuntimeError,
    autograd_nodes,
    runs_eagerly_on_request,
    untraced,
    watch_compilations,
)
from checkmate.torch.graph.host_weights import traced_on_device
from checkmate.torch.options import Options
from checkmate.torch.steps.coordinator import coordinator

_log = logging.getLogger("checkmate.torch")
NO_GRADIENT = "nothing in this step requires a gradient, so that there is no backward to plan"
NO_GRADIENT_HINT = "check that parameters have requires_grad=True, and that the loss depends on them"
_TWO_DEVICES = r"tensors of model and batch are on two devices, \1 and \2"
_ONE_DEVICE = "call model.to(device) and x.to(device) with one device; what is on meta has no data and has to be made there"
_FROZEN = "a parameter that the step updates does not require a gradient any more"
_AGAIN = "call checkmate.torch.compile again, with an optimizer of [p for p in model.parameters() if p.requires_grad]"
_BACKWARD = "model or loss call backward() or torch.autograd.grad themselves, and the step does the backward"
_KNOWN: tuple[tuple[str, type[CheckmateError], str, str], ...] = (
    (r"(?:at least|found) two (?:different )?devices,? (\S+?),? (?:and )?([^\s!]+)", OptionError, _TWO_DEVICES, _ONE_DEVICE),
    (r"does not have a grad_fn|argument to `grad\(\)` cannot be empty", GraphError, NO_GRADIENT, NO_GRADIENT_HINT),
    ("One of the differentiated Tensors does not require grad", OptionError, _FROZEN, _AGAIN),
    ("consumed? (returned tensor's )?grad_fn", OptionError, _BACKWARD, "return the loss alone"),
)
"""Patterns in the text of errors of Dynamo whose cause in the user's code is known, with the error, the sentence and the hint."""


_LIMIT = "Dynamo recompile limit exceeded"

# By the beginning of Dynamo's reason. The figures of the first are of torch 2.13 on one core of a CPU, with 32 time steps.
_HINTS = {
    RECURRENT: (
        "set torch._dynamo.config.allow_rnn = True to plan the layer as well: it is then traced time step by time step (32 steps "
        "of one layer: 5 to 7 s to the first step, and each step takes 5 to 8 times as long)"
    ),
    "Unsupported Tensor.item()": (
        "keep the value a tensor (torch.where in place of `if`), move the call out of the loop or out of what is compiled, or, "
        "if nothing branches on the number, set torch._dynamo.config.capture_scalar_outputs = True"
    ),
    "Data-dependent branching": (
        "replace the branch on a tensor's value by torch.where or torch.cond, or compile only the modules around it "
        "(of a mixture of experts, each expert)"
    ),
    "using `torch.autograd.grad`": (
        "set torch._dynamo.config.trace_autograd_ops = True to plan a loss with derivatives inside as one graph, or plan the "
        "whole step: checkmate.torch.compile(model, loss, optimizer, example=..., budget=...)"
    ),
    "Dynamic shape operator": (
        "select a fixed number of elements (torch.topk, torch.where, a fixed capacity for each expert), or compile only the "
        "modules around it"
    ),
    "Failed to trace builtin operator": "move the call out of what is compiled, or at least out of the loop",
    "Skip inlining `torch.compiler.disable()`d function": "remove torch.compiler.disable, if Dynamo can trace the function",
    _LIMIT: (
        "use torch.compile(..., dynamic=True) or torch._dynamo.mark_dynamic(x, dim, min=2, max=...) for one plan for all sizes "
        "up to the largest; pad to a few lengths; or raise torch._dynamo.config.recompile_limit"
    ),
}
_OTHERWISE = "set TORCH_LOGS=graph_breaks to see all such places; torch.compile(..., fullgraph=True) stops at the first"


class Place(NamedTuple):
    """A line of the user's code at which Dynamo stopped: ops run outside of every graph."""

    function: str  # name of the function
    file: str
    line: int
    reason: str  # the first line of Dynamo's reason

    def __str__(self) -> str:
        """Function, file and line, the code of the line, and the reason."""
        code = linecache.getline(self.file, self.line).strip()
        return f"{self.where}{f', `{code[:60]}`' if code else ''}: {self.reason}"

    @property
    def where(self) -> str:
        """Function, file and line."""
        return f"`{self.function}` ({_shortest(self.file)}:{self.line})" if self.file else "a function"

    @property
    def hint(self) -> str:
        """An action of the user."""
        return next((hint for begin, hint in _HINTS.items() if self.reason.startswith(begin)), _OTHERWISE)


class NothingPlannedError(CheckmateError, RuntimeError):
    """A budget was given, and Dynamo made no graph of the call that could be planned."""


class CompiledCalls:
    """The calls of one compiled function. Calling it makes the context of one call."""

    def __init__(self, options: Options) -> None:
        self.options, self.budget = options, options.planning.budget
        self.planned = False
        self.evaluations = 0
        self._skipped: dict[Place, None] = {}  # places at which Dynamo compiled nothing of a function
        self._breaks: dict[Place, None] = {}  # places at which it compiled the code before and after
        self._told: set[Place] = set()
        self._functions: dict[str, tuple[str, str, int]] = {}  # name, file and line by the number of the frame

    @functools.cached_property
    def device(self) -> torch.device:
        """The device that fetches frozen weights from the host; the CPU without a host."""
        if self.options.host is None:
            return torch.device("cpu")
        return torch.empty(0, device=self.options.device or ("cuda" if torch.cuda.is_available() else "cpu")).device

    def __call__(self) -> Call:
        """The context of one call."""
        return Call(self)

    def read(self, log: CompileLog) -> None:
        """Take over the records of Dynamo."""
        for record in log.new_frames():
            at = (record.function, record.file, record.line)
            if not record.reason:
                self._functions.setdefault(record.frame, at)
                continue
            # If the limit of compilations was reached, the record does not name the function.
            found = place(*(at if record.function else self._functions.get(record.frame, at)), record.reason)
            self._skipped.setdefault(found)
        for found in log.new_breaks():
            self._breaks.setdefault(place(*found[:4]))

    def judge(self, planned_nodes: int, other_nodes: int) -> None:
        """Tell the user of ops that a call ran outside of every planned graph."""
        self.planned = self.planned or planned_nodes > 0
        if not other_nodes:  # graph breaks that leave out no differentiable op: all of these ops are planned
            if planned_nodes and (places := self._untold(self._breaks)):
                _log.info("this call is planned in several graphs. %s", listed(places))
        elif not self.planned and not coordinator().in_flight:  # else it is eager code in a step of other functions
            self._nothing_planned()
        elif places := self._untold([*self._skipped, *self._breaks]):
            # The share of the step's memory and time that is planned belongs here as soon as something measures it.
            budget, counts = self.options.budget, planned_nodes or coordinator().in_flight
            _log.warning(
                "%s. %s\nhint: %s",
                f"part of this call runs outside of every plan: what it allocates counts towards the budget of {budget}, but "
                "nothing of it is computed again to save memory"
                if counts
                else f"this call runs outside of every plan: the budget of {budget} is not kept for it and others like it",
                listed(places),
                hints(places),
            )

    def _untold(self, places: Iterable[Place]) -> list[Place]:
        """The places that no message has named; the next message names them."""
        found = [p for p in _users(places) if p not in self._told]
        self._told.update(found)
        return found

    def _nothing_planned(self) -> None:
        places = _users([*self._skipped, *self._breaks])
        where = f"Dynamo compiled no graph of it. {listed(places)}" if places else "Dynamo traced no function of it"
        message = f"nothing of this call is planned, so that the budget of {self.options.budget} is not kept: {where}"
        hint = hints(places) or (
            "write model = torch.compile(model, ...) in place of model.compile(...), by which PyTorch before 2.14 compiles "
            "nothing of nn.Sequential; or call torch._dynamo.reset() if another backend has compiled the function before"
        )
        if self.options.unplanned == "error" and (self.budget is None or not self.budget.keeps_everything):
            raise NothingPlannedError(message, hint=f"{hint}; or set the option unplanned='warn' to run without a plan")
        if self._untold(places or [Place("", "", 0, "")]):
            _log.warning("%s\nhint: %s", message, hint)


def _users(places: Iterable[Place]) -> list[Place]:
    """The places, without those of hooks that FSDP and DistributedDataParallel run between graphs."""
    return [p for p in places if "/torch/distributed/" not in p.file.replace("\\", "/")]


class Call:
    """The context of one call; of nested calls in one thread, only the outermost counts."""

    def __init__(self, calls: CompiledCalls) -> None:
        self._calls = calls
        self.planned_nodes = 0
        self.compile_nodes = 0
        self.compiled = False
        self.compile_began: int | None = None

    def __enter__(self) -> Call:
        """Begin to count."""
        if _thread.call is None:
            with ExitStack() as contexts:
                if torch.is_grad_enabled():
                    coordinator().begin_call(self._calls, self._calls.budget)
                watch_compilations(_compile_began, _compile_ended)
                contexts.enter_context(RecurrentLayersOutside())
                contexts.enter_context(traced_on_device(self._calls.device))
                self._evaluates = not torch.is_grad_enabled()
                # A loop that generates text, one token longer each time, would use up Dynamo's limit of compilations, with none
                # left for training: calls without gradients are compiled for three shapes.
                if self._evaluates and self._calls.evaluations >= 3:
                    contexts.enter_context(torch.compiler.set_stance("eager_on_recompile"))
                self._exception = sys.exception()
                self._log = CompileLog()
                self._nodes = autograd_nodes()
                self._contexts = contexts.pop_all()
            _thread.call = self
        return self

    def __exit__(self, *_: object) -> None:
        """Judge the counted nodes, unless the call raised."""
        if _thread.call is not self:
            return
        _thread.call = None
        self._contexts.close()
        coordinator().end_call()
        self._calls.evaluations += self.compiled and self._evaluates
        other = autograd_nodes() - self._nodes - self.planned_nodes - self.compile_nodes
        self._calls.read(self._log)
        if self.compiled:
            gc.collect()  # Dynamo leaves cycles of frames, which hold outputs that the user has dropped
        # Dynamo calls this without the exception, in a `finally`.
        if isinstance(sys.exception(), TorchRuntimeError) and (told := in_words(sys.exception())) is not None:
            raise told from None
        # Other messages tell the memory of a call without gradients.
        if not self._evaluates and sys.exception() is self._exception and not runs_eagerly_on_request():
            self._calls.judge(self.planned_nodes, other)

    def read_log(self) -> None:
        """Read Dynamo's records now: it keeps only the newest 64."""
        self._calls.read(self._log)


class _Thread(threading.local):
    call: Call | None = None


_thread = _Thread()


# Dynamo calls these while it holds the lock of its callbacks, and would wait for that lock if it compiled them.
@untraced
def _compile_began(_: Any) -> None:
    if _thread.call is not None:
        _thread.call.compile_began = autograd_nodes()
        _thread.call.compiled = True
        coordinator().compiling(True)


@untraced
def _compile_ended(_: Any) -> None:
    call = _thread.call
    if call is not None and call.compile_began is not None:
        call.compile_nodes += autograd_nodes() - call.compile_began
        call.compile_began = None
        coordinator().compiling(False)
        call.read_log()


def counted(run: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph that counts its autograd nodes as planned ones of the call that runs it."""

    def counting(*args: Any) -> Any:
        call = _thread.call
        if call is None:
            return run(*args)
        before = autograd_nodes()
        results = run(*args)
        call.planned_nodes += autograd_nodes() - before
        return results

    return counting


def in_words(error: BaseException | None) -> CheckmateError | None:
    """The error that tells the cause of an error of Dynamo; None if the cause is not known."""
    for pattern, kind, sentence, hint in _KNOWN:
        found = re.search(pattern, str(error))
        if found is not None:
            return kind(found.expand(sentence), hint=hint)
    return None


def place(function: str, file: str, line: int, reason: str) -> Place:
    """A place, with the first line of Dynamo's reason."""
    return Place(function, file, line, RECURRENT if RECURRENT in reason else next(iter(reason.strip().splitlines()), "no reason"))


def listed(places: Sequence[Place], most: int = 5) -> str:
    """The places in words."""
    more = f"; and {len(places) - most} more" if len(places) > most else ""
    return "; ".join(map(str, places[:most])) + more


def hints(places: Iterable[Place]) -> str:
    """Actions for all of the places."""
    found = dict.fromkeys(p.hint for p in places)
    specific = [hint for hint in found if hint != _OTHERWISE]
    return "; ".join(specific or found)


def _shortest(file: str) -> str:
    path, here = Path(file), Path(os.getcwd())  # noqa: PTH109 - Path.cwd() has the same meaning
    return str(path.relative_to(here)) if path.is_relative_to(here) else file
