"""Private names of Dynamo, the front end of ``torch.compile``."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar

import torch
import torch._dynamo.config as dynamo_config
import torch._dynamo.eval_frame as eval_frame
import torch._dynamo.utils as dynamo_utils
from torch import fx, nn
from torch._C._autograd import _get_sequence_nr
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import OptimizedModule, callback_handler, trace_rules
from torch._dynamo.exc import ShortenTraceback, TorchDynamoException, TorchRuntimeError, Unsupported, UserError
from torch._dynamo.repro.after_dynamo import WrapBackendDebug
from torch._dynamo.symbolic_convert import InstructionTranslator

from checkmate.torch._compat import replaced

__all__ = ["OptimizedModule", "TorchDynamoException", "TorchRuntimeError", "Unsupported", "UserError", "dynamo_config"]

autograd_nodes = _get_sequence_nr
"""Number of autograd nodes that this thread has made since it began: it grows with every differentiable op that runs."""


RECURRENT = "recurrent layers run by their kernels, outside of the graphs"
"""Reason that Dynamo gives for the graph breaks of `recurrent_layers_outside`."""


class DynamoTransparentError(ShortenTraceback):
    """Carries an exception of a backend through Dynamo to the user unchanged.

    Dynamo wraps every exception of a backend in ``BackendCompilerFailed``, which hides the type and the hint of the error.
    An exception of ``ShortenTraceback`` is not wrapped: Dynamo raises the result of ``remove_dynamo_frames``, the carried error.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error), first_useful_frame=None)
        self.error = error

    def remove_dynamo_frames(self) -> BaseException:  # type: ignore[override]
        """The carried exception; called by Dynamo. Code that handles it must not hold the tensors of the compilation by it."""
        error = self.error
        self.__traceback__ = error.__traceback__ = None  # their frames have the tensors
        vars(self).clear()  # Dynamo has noted its tracer here
        return error


def recompile_current_frame() -> Callable[[], None]:
    """A function that drops the compiled code of the frame being compiled now, if any: the next call compiles it again."""
    try:
        code = InstructionTranslator.current_tx().output.root_tx.f_code  # type: ignore[union-attr]
    except AttributeError:
        return lambda: None
    return lambda: reset_code(code)


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def untraced(function: FunctionT) -> FunctionT:
    """A function that Dynamo does not trace, with all functions that it calls.

    In a backward inside of a compiled function Dynamo's frame hook is on: it would compile callbacks of autograd and Dynamo.
    """
    return torch.compiler.disable(function)  # type: ignore[return-value]


def takes_gradients(graph: fx.Graph) -> bool:
    """Whether a graph that Dynamo traced takes gradients itself: by `torch.func`, or `torch.autograd.grad`."""
    names = {getattr(n.target, "__name__", "") for n in graph.nodes if n.op == "call_function"}
    return not names.isdisjoint(("_grad_increment_nesting", "grad"))


def call_through(module: nn.Module, function: Callable[..., Any] | None) -> None:
    """Have calls of a module go through a function, as ``module.compile()`` has them go through compiled code.

    Dynamo traces the module itself. Copies and files of the module do not have the function.
    """
    module._compiled_call_impl = function  # the place of the code that `nn.Module.compile` compiled


def called_through(module: nn.Module) -> Callable[..., Any] | None:
    """The function that calls of a module go through, for example after ``module.compile()``; None for the module itself."""
    return module._compiled_call_impl


def traceable_call(module: nn.Module) -> Callable[..., Any] | None:
    """A function that calls one of torch's own modules; None for a module whose forward Dynamo traces without help.

    Dynamo begins no graph in a function of ``torch.nn``: ``nn.Sequential(...).compile()`` compiles nothing.
    """
    if not isinstance(module.forward, MethodType) or not trace_rules.check(module.forward):
        return None

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    # With a separate code object: Dynamo counts recompilations by code object.
    return FunctionType(call.__code__.replace(), call.__globals__, call.__name__, closure=call.__closure__)


CallContext = Callable[[], AbstractContextManager[Any]]
"""Makes the context of one call."""


def enter_around_calls(backend: Callable[..., Any], context_of: Callable[[Mapping[str, Any]], CallContext | None]) -> None:
    """Enter a context around every call of a function that `torch.compile` compiled with a backend.

    Dynamo has this for backends with an attribute ``backend_ctx_ctor``. ``torch._dynamo.optimize`` looks it up on the
    `WrapBackendDebug` that wraps a backend and has none of its attributes. Hence a property on that class.
    """

    def backend_ctx_ctor(wrapper: Any) -> CallContext:
        found = wrapper.__dict__.get("_checkmate_calls")
        if found is None:
            function, given = _unwrapped(wrapper._torchdynamo_orig_backend)
            found = context_of(given) if function is backend else None
            if found is None:
                # Dynamo then falls back to no context, as it does without this property.
                raise AttributeError("backend_ctx_ctor")
            wrapper.__dict__["_checkmate_calls"] = found
        return found

    WrapBackendDebug.backend_ctx_ctor = property(backend_ctx_ctor)  # type: ignore[attr-defined]


def _unwrapped(backend: Any) -> tuple[Any, dict[str, Any]]:
    """The function of a backend, and the keyword arguments of its calls."""
    given: dict[str, Any] = {}
    if isinstance(backend, torch._TorchCompileWrapper):
        given.update(backend.kwargs)
        backend = backend.compiler_fn
    if isinstance(backend, functools.partial):
        given = {**backend.keywords, **given}
        backend = backend.func
    return backend, given


def runs_eagerly_on_request() -> bool:
    """Whether ``torch.compiler.set_stance`` asks for calls without compilation, or without recompilation."""
    return eval_frame._stance.stance != "default"


class CompileRecord(NamedTuple):
    """Dynamo's record of one attempt to compile a frame, or of a break between two graphs."""

    function: str  # name of the function; empty if Dynamo's limit of compilations was reached
    file: str
    line: int  # the first line, or, after a failure, the line that failed
    reason: str  # why nothing was compiled; empty after a success
    frame: str = ""  # number of the frame: attempts for the same code share it


class CompileLog:
    """Reads Dynamo's records of compilations, each record once."""

    def __init__(self) -> None:
        # The newest records themselves and not their number: `torch._dynamo.reset` empties the lists.
        self._record = next(reversed(dynamo_utils.get_compilation_metrics()), None)
        self._break = next(reversed(dynamo_utils.graph_break_reasons), None)

    def new_frames(self) -> list[CompileRecord]:
        """Frames that Dynamo compiled, or could not compile, since the last look."""
        records = dynamo_utils.get_compilation_metrics()
        new = _after(records, self._record)
        self._record = next(reversed(records), None)
        return [_frame_record(r) for r in new if r.co_name or r.fail_type]

    def new_breaks(self) -> list[CompileRecord]:
        """Graph breaks since the last look."""
        reasons = dynamo_utils.graph_break_reasons
        new = _after(reasons, self._break)
        self._break = next(reversed(reasons), None)
        return [CompileRecord(at.name, at.filename, at.lineno or 0, r.reason) for r in new for at in (r.user_stack or ())[-1:]]


def _after(records: list[Any], last: Any) -> list[Any]:
    """The records after the last known one; all of them if that record is gone."""
    position = next((i for i in range(len(records) - 1, -1, -1) if records[i] is last), -1)
    return records[position + 1 :]


def _frame_record(metrics: Any) -> CompileRecord:
    failed = metrics.fail_type not in (None, "SkipFrame")  # SkipFrame: there is nothing in the frame to compile
    return CompileRecord(
        frame=(metrics.compile_id or "").partition("/")[0],
        function=metrics.co_name or "",
        file=metrics.fail_user_frame_filename or metrics.co_filename or "",
        line=metrics.fail_user_frame_lineno or metrics.co_firstlineno or 0,
        reason=(metrics.fail_reason or metrics.fail_type) if failed else "",
    )


@contextmanager
def patched_settings(**settings: Any) -> Generator[None]:
    """Context with some settings of Dynamo, which may be sets of functions; no alias of a setting has an effect.

    PyTorch 2.11 and 2.12 sort these sets to log them, which fails with a traceback.
    """
    log = dynamo_utils._get_dynamo_config_for_logging

    def logged() -> str | None:
        with suppress(TypeError):
            return log()
        return None

    with replaced(dynamo_utils, "_get_dynamo_config_for_logging", logged):
        revert = dynamo_config._make_closure_patcher(**settings)()  # an eighth of the time of `dynamo_config.patch`
        try:
            yield
        finally:
            revert()


class RecurrentLayersOutside(AbstractContextManager[None]):
    """Context in which Dynamo breaks the graph at `nn.LSTM`, `nn.GRU` and `nn.RNN`; several threads may be in such contexts.

    Otherwise Dynamo skips the whole function; or, if ``allow_rnn`` is set, it traces every time step.
    """

    _lock, _inside = threading.Lock(), 0

    def __enter__(self) -> None:
        self._revert: Callable[[], None] | None = None
        if dynamo_config.allow_rnn:
            return
        with self._lock:
            RecurrentLayersOutside._inside += 1
            for layer, (_, untraced_forward) in _recurrent_layers().items() if self._inside == 1 else ():
                layer.forward = untraced_forward
        self._revert = _trace_recurrent_layers()()

    def __exit__(self, *_: object) -> None:
        if self._revert is None:
            return
        self._revert()
        with self._lock:
            RecurrentLayersOutside._inside -= 1
            for layer, (forward, _) in _recurrent_layers().items() if not self._inside else ():
                layer.forward = forward


@functools.cache
def _trace_recurrent_layers() -> Callable[[], Callable[[], None]]:
    return dynamo_config._make_closure_patcher(allow_rnn=True)


@functools.cache
def _recurrent_layers() -> dict[Any, tuple[Any, Any]]:
    """Recurrent layers, their forwards, and forwards that Dynamo does not trace: always the same, since it guards on them."""
    layers = (nn.RNN, nn.LSTM, nn.GRU)
    return {layer: (layer.forward, torch.compiler.disable(layer.forward, reason=RECURRENT)) for layer in layers}


def watch_compilations(began: Callable[[Any], None], ended: Callable[[Any], None]) -> None:
    """Call functions when Dynamo begins and ends to compile a frame; ``torch._dynamo.reset`` forgets the functions."""
    if began not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(began)
        callback_handler.register_end_callback(ended)
