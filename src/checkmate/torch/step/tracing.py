"""Tracing a step as one graph, and stopping as soon as the graph or its compiled form exists, before anything runs."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from checkmate.core.errors import CheckmateError, GraphError, OptionError
from checkmate.torch._compat import replaced
from checkmate.torch._compat.dispatch import DATA_DEPENDENT, FakeTensor, fake_mode_with_numbers
from checkmate.torch._compat.dynamo import DynamoTransparentError, TorchRuntimeError, Unsupported, UserError, patched_settings
from checkmate.torch.backend import compile_graph
from checkmate.torch.chunking.choose import ChunkableStep
from checkmate.torch.compilation.call import in_words
from checkmate.torch.compilation.resident_account import Hooks
from checkmate.torch.emulate.autocast import cuda_autocast_rules
from checkmate.torch.emulate.device import EmulatedDevice
from checkmate.torch.joint.capture import Capture
from checkmate.torch.options import Options
from checkmate.torch.step.arguments import Example, described
from checkmate.torch.step.function import Backend, FlatProgram
from checkmate.torch.step.recipe import StepSpec

_DYNAMO_CONFIG = {
    "recompile_limit": 64,  # shapes of one step; after torch's default of 8 a step would run unplanned, without an error
    "trace_autograd_ops": True,  # the backward of a whole step is a call of torch.autograd.grad
    "optimize_ddp": False,  # it cuts the graph at the buckets of DistributedDataParallel
}
if torch.__version__ < "2.13":  # it would go on training a layer that is frozen later
    _DYNAMO_CONFIG["skip_tensor_guards_with_matching_dict_tags"] = False
_LOG_METHODS = ("debug", "info", "warning", "error", "exception", "critical", "log")


class GraphBreakError(CheckmateError, RuntimeError):
    """The step cannot be traced as one graph."""


class _StopAfterCapture(Exception):
    """Ends the block of `StopAfterCapture`; never seen outside it."""


class StopAfterCapture(contextlib.AbstractContextManager["StopAfterCapture"]):
    """Context in which a compiled function is called for its compilation alone; its methods are for `Hooks`.

    `torch.compile` compiles a function at its first call and then runs it, and has no public way to only compile. An exception
    therefore ends the call before the first kernel of the step: model, optimizer and random state stay unchanged. A graph alone
    needs no plan and no compiled code: the exception takes the place of planning, within Dynamo. Dynamo wraps any exception of a
    backend except one in a `DynamoTransparentError`. A compiled step has to be complete, with its code in Dynamo's cache:
    its forward therefore raises when Dynamo runs it for the first time.
    """

    def __init__(self) -> None:
        self.step: ChunkableStep[Capture] | None = None  # as captured, after the call of `before_planning`
        self.active = True

    def before_planning(self, step: ChunkableStep[Capture]) -> NoReturn:
        """End the block as soon as the step is captured; called by the backend inside Dynamo."""
        self.step = step
        raise DynamoTransparentError(_StopAfterCapture())

    def before_running(self) -> None:
        """End the block when the step is planned and compiled; called by its forward, which does nothing after the block ends."""
        if self.active:
            raise _StopAfterCapture

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.active = False
        return kind is _StopAfterCapture


def trace_step(spec: StepSpec, batch: Example, options: Options, target: EmulatedDevice | None = None) -> ChunkableStep[Capture]:
    """The capture of a step for a device, by default the current one; nothing runs."""
    rules = cuda_autocast_rules() if target is not None and target.device.kind == "cuda" else contextlib.nullcontext()
    with StopAfterCapture() as stop, rules:
        hooks = Hooks(captured=stop.before_planning, inference=False, whole=spec.whole, target=target)
        backend = functools.partial(compile_graph, options=options, hooks=hooks)
        run_as_one_graph(compiled_program(spec, backend), spec, batch)
    if stop.step is None:
        raise GraphError(
            "the step was not traced: torch.compile is off", hint="unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE"
        )
    return stop.step


def compiled_program(spec: StepSpec, backend: Backend, *, dynamic: bool = False) -> Callable[..., Any]:
    """The program of a step, which a backend compiles at its first call and for each new shape."""
    if spec.flat:
        return FlatProgram(spec.program, backend, _untraceable)
    return torch.compile(spec.program, backend=backend, fullgraph=True, dynamic=dynamic)


def run_as_one_graph(run: Callable[..., Any], spec: StepSpec, batch: Example, example: str = "") -> Any:
    """Call the compiled program of a step with a batch; ``example`` is its example in words, if the batch differs.

    Dynamo compiles at any call with a new shape: its settings for one graph therefore apply to every call.
    """
    args, kwargs = ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
    # Methods of loggers that Dynamo has to skip, including ``warning_once`` and others of libraries.
    methods = {method for name, method in vars(logging.Logger).items() if name.partition("_")[0] in _LOG_METHODS}
    try:
        settings = patched_settings(**_DYNAMO_CONFIG, ignore_logging_functions=methods)
        with torch.enable_grad(), _without_log_of_shapes(), settings, spec.traced():
            return run(args, kwargs)
    except (Unsupported, TorchRuntimeError, UserError) as error:
        told = in_words(error)
        if told is not None:
            raise told from None
        own = _own_error(spec, args, kwargs)
        if own is not None:
            raise _refusal(own, batch, example) from None
        hint = "move the operation that breaks the graph out of the model, or use torch.compile(model, backend='checkmate'), "
        hint += "which plans each part"
        if isinstance(error, TorchRuntimeError):  # Dynamo fails, and not the model
            hint = "trace the step without Dynamo, as a function with loss.backward(), optimizer.step() and "
            hint += "optimizer.zero_grad() in it: checkmate.torch.compile(function, example=(x, y), budget=...)"
        raise GraphBreakError(f"the step cannot be traced as one graph: {_describe_break(error)}", hint=hint) from error


def _without_log_of_shapes() -> contextlib.AbstractContextManager[None]:
    """Context without torch's log of ops that refuse their inputs, a traceback for each: the error is reported once, in words."""
    return replaced(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


def _own_error(spec: StepSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """The error that model and loss raise without Dynamo, if any; they run on fake tensors, without memory."""
    held = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
    mode = held[0].fake_mode if held else fake_mode_with_numbers()
    try:
        # The earlier call has shown the warnings.
        with mode, _without_log_of_shapes(), torch.enable_grad(), warnings.catch_warnings(action="ignore"):
            fake = args if held else pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
            spec.forward(fake, kwargs if held else pytree.tree_map_only(torch.Tensor, mode.from_tensor, kwargs))
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises
        return None if type(error).__module__.startswith("torch.") else error  # an op that fake tensors cannot do
    return None


def _raised(error: Exception) -> str:
    """An error in one sentence, with the place in the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))
    of_user = [f for f in frames if not f.filename.startswith(ours)]
    where = f", at {(f := of_user[-1]).filename}:{f.lineno}: `{f.line}`" if of_user else ""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0].rstrip('.')}{where}"


def _untraceable(error: Exception) -> CheckmateError:
    """The error of a function that is traced without Dynamo."""
    if isinstance(error, CheckmateError):
        return error
    told, hint = in_words(error), "check that the function runs for the example, and that it calls ops of PyTorch only"
    if isinstance(error, DATA_DEPENDENT):
        hint = "keep the number a tensor, such as by torch.where in place of `if`; or return it, and read it after the step"
    return told or GraphBreakError(f"the function cannot be traced as one graph: {_raised(error)}", hint=hint)


def _refusal(own: Exception, batch: Example, example: str) -> CheckmateError:
    """The error of model or loss in one sentence."""
    if isinstance(own, CheckmateError):
        return own
    other = f", and the example was {example}" if example and example != described(batch) else ""
    return OptionError(
        f"model and loss raise {_raised(own)}; they are called with {described(batch)}{other}",
        hint="give a batch like the example" if other else "check that loss(model(x), y) runs for the example",
    )


def _describe_break(error: Unsupported | UserError | TorchRuntimeError) -> str:
    """Reason and place of a graph break in one line; torch's full text stays as the cause of the exception."""
    why = str(error).split("\n", 1)[0]
    frame = next(reversed(getattr(error, "real_stack", None) or ()), None)
    return why if frame is None else f"{why}, at {frame.filename}:{frame.lineno}: `{frame.line}`"
