"""Tracing a step as one graph, and stopping where the graph or its compiled form exists, before anything runs."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from checkmate.core.errors import CheckmateError, GraphError, OptionError
from checkmate.torch._compat.dispatch import FakeTensor, fake_mode_with_numbers
from checkmate.torch._compat.dynamo import DynamoTransparentError, TorchRuntimeError, Unsupported, UserError, patched_settings
from checkmate.torch.backend import compile_graph
from checkmate.torch.chunking.variants import ChunkableStep
from checkmate.torch.compilation.hooks import Hooks
from checkmate.torch.compilation.torch_errors import in_words
from checkmate.torch.emulate.autocast import cuda_autocast_rules
from checkmate.torch.emulate.device import EmulatedDevice
from checkmate.torch.joint.capture import Capture
from checkmate.torch.options import Options
from checkmate.torch.step.batch import Example, described
from checkmate.torch.step.recipe import StepSpec

_DYNAMO_CONFIG = {
    "recompile_limit": 64,  # shapes of one step; after torch's default of 8 a step would run unplanned, without an error
    "trace_autograd_ops": True,  # the backward of a whole step is a call of torch.autograd.grad
    "optimize_ddp": False,  # it cuts the graph at the buckets of DistributedDataParallel
}
_LOG_METHODS = ("debug", "info", "warning", "error", "exception", "critical", "log")


class GraphBreakError(CheckmateError, RuntimeError):
    """The step cannot be traced as one graph."""


class _StopAfterCapture(Exception):
    """Ends the block of `stop_after_capture`; never seen outside it."""


class CaptureStop:
    """The two places at which `stop_after_capture` can end its block.

    Attributes:
        step: The captured step, once `before_planning` was called.
    """

    def __init__(self) -> None:
        self.step: ChunkableStep[Capture] | None = None
        self._active = True

    def before_planning(self, step: ChunkableStep[Capture]) -> NoReturn:
        """End the block as soon as the step is captured; called by the backend inside Dynamo."""
        self.step = step
        raise DynamoTransparentError(_StopAfterCapture())

    def before_running(self) -> None:
        """End the block when the step is planned and compiled; called by its forward, which does nothing after the block."""
        if self._active:
            raise _StopAfterCapture

    def close(self) -> None:
        """Let forwards run from now on."""
        self._active = False


@contextlib.contextmanager
def stop_after_capture() -> Iterator[CaptureStop]:
    """Call a compiled function for its compilation alone.

    `torch.compile` compiles a function at its first call and then runs it, and has no public way to do only the first. The
    call is therefore ended by an exception, before the first kernel of the step: model, optimizer and random state stay as they
    are. This context manager is the only place that raises and catches it.

    The exception comes from one of two places. A graph alone needs no plan and no compiled code, so that it comes in place of
    planning, within Dynamo (`CaptureStop.before_planning`); Dynamo would wrap any exception of a backend, except one in a
    `DynamoTransparentError`. A compiled step has to be complete, with its code in Dynamo's cache, so that its forward raises when
    Dynamo runs it for the first time (`CaptureStop.before_running`).

    Yields:
        The functions that end the block, to be put into `Hooks`.
    """
    stop = CaptureStop()
    with contextlib.suppress(_StopAfterCapture):
        yield stop
    stop.close()


def trace_step(spec: StepSpec, batch: Example, options: Options, target: EmulatedDevice | None = None) -> ChunkableStep[Capture]:
    """A captured step; nothing runs.

    Args:
        spec: The step.
        batch: The example.
        options: Options of the backend.
        target: The device to trace the step for; by default the one at hand.

    Raises:
        GraphBreakError: The step cannot be traced as one graph.
        GraphError: `torch.compile` is switched off.
    """
    rules = cuda_autocast_rules() if target is not None and target.device.kind == "cuda" else contextlib.nullcontext()
    with stop_after_capture() as stop, spec.tracing_context(), rules:
        hooks = Hooks(captured=stop.before_planning, inference=False, whole=spec.whole, target=target)
        backend = functools.partial(compile_graph, options=options, hooks=hooks)
        run_as_one_graph(torch.compile(spec.program, backend=backend, fullgraph=True, dynamic=False), spec, batch)
    if stop.step is None:
        raise GraphError(
            "the step was not traced: torch.compile is off", hint="unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE"
        )
    return stop.step


def run_as_one_graph(run: Callable[..., Any], spec: StepSpec, batch: Example, example: str = "") -> Any:
    """Call a compiled program with a batch.

    Dynamo compiles at any call with a new shape, so that its settings for one graph hold at every call.

    Args:
        run: The compiled program.
        spec: The step that it is of.
        batch: The batch.
        example: What the example was, in words, if the batch is another.

    Raises:
        GraphBreakError: The program cannot be traced as one graph.
        OptionError: Model and loss themselves cannot be run with the batch.
    """
    args, kwargs = ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
    try:
        settings = patched_settings(**_DYNAMO_CONFIG, ignore_logger_methods=_logging_methods())
        with torch.enable_grad(), _without_log_of_shapes(), settings:
            return run(args, kwargs)
    except (Unsupported, TorchRuntimeError, UserError) as error:
        told = in_words(error)
        if told is not None:
            raise told from None
        own = _own_error(spec, args, kwargs)
        if own is not None:
            raise _refusal(own, batch, example) from None
        if isinstance(error, TorchRuntimeError):
            raise
        raise GraphBreakError(
            f"the step cannot be traced as one graph: {_describe_break(error)}",
            hint="move the operation that breaks the graph out of the model, or use torch.compile(model, backend='checkmate'), "
            "which plans each part",
        ) from error


@contextlib.contextmanager
def _without_log_of_shapes() -> Iterator[None]:
    """Context without torch's log of ops that refuse their inputs, a traceback for each: the error is told once, in words."""
    before, _SHAPES_LOG.disabled = _SHAPES_LOG.disabled, True
    try:
        yield
    finally:
        _SHAPES_LOG.disabled = before


_SHAPES_LOG = logging.getLogger("torch._subclasses.fake_tensor")


def _own_error(spec: StepSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """The error that model and loss raise without Dynamo, if they do: they run on fake tensors, without memory."""
    held = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
    mode = held[0].fake_mode if held else fake_mode_with_numbers()
    try:
        # The call has shown the warnings.
        with mode, _without_log_of_shapes(), torch.enable_grad(), warnings.catch_warnings(action="ignore"):
            fake = args if held else pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
            spec.forward(fake, kwargs if held else pytree.tree_map_only(torch.Tensor, mode.from_tensor, kwargs))
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises
        return None if type(error).__module__.startswith("torch.") else error  # what fake tensors cannot do
    return None


def _refusal(own: Exception, batch: Example, example: str) -> CheckmateError:
    """The error of model or loss in one sentence, with the place in the user's code."""
    if isinstance(own, CheckmateError):
        return own
    frames = traceback.extract_tb(own.__traceback__)
    of_user = [f for f in frames if not f.filename.startswith(_PACKAGES)]
    where = f", at {(f := of_user[-1]).filename}:{f.lineno}: `{f.line}`" if of_user else ""
    why = (str(own).splitlines() or [""])[0].rstrip(".")
    beside = f", and the example was {example}" if example and example != described(batch) else ""
    return OptionError(
        f"model and loss raise {type(own).__name__}: {why}{where}; they are called with {described(batch)}{beside}",
        hint="give a batch like the example" if beside else "check that loss(model(x), y) runs for the example",
    )


_PACKAGES = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))
"""Folders whose code is not the user's."""


def _logging_methods() -> set[Callable[..., Any]]:
    """Methods of `logging.Logger` that Dynamo is to skip, with those that libraries add, such as ``warning_once``."""
    return {method for name, method in vars(logging.Logger).items() if name.partition("_")[0] in _LOG_METHODS}


def _describe_break(error: Unsupported | UserError) -> str:
    """Reason and place of a graph break in one line; torch's full text stays as the cause of the exception."""
    why = str(error).split("\n", 1)[0]
    frame = next(reversed(getattr(error, "real_stack", None) or ()), None)
    return why if frame is None else f"{why}, at {frame.filename}:{frame.lineno}: `{frame.line}`"
