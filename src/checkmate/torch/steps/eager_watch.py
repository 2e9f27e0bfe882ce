"""Sees what eager code allocates in a step: the loss outside of the compiled model, code at a graph break, an auxiliary head."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch.utils import _pytree as pytree

from checkmate.torch._compat import replaced
from checkmate.torch._compat.dispatch import TorchDispatchMode, top_mode
from checkmate.torch._compat.distributed import wrapper_runs
from checkmate.torch._compat.engine import current_backward
from checkmate.torch._compat.profiler import memory_trace, profiler_running
from checkmate.torch.graph.storages import storage_key, strided_parts


@dataclass(frozen=True, slots=True)
class EagerOp:
    """An op that has run outside of planned graphs, and those of its arguments and results that have memory."""

    given: Sequence[torch.Tensor]
    made: Sequence[torch.Tensor]  # results with new storages
    peak_bytes: int  # most bytes that it had allocated at once: results and scratch memory of its kernels; 0 if not measured
    is_exchange: bool  # whether it is a collective of a backward, as of the gradient buckets of ``DistributedDataParallel``


class EagerWatch(TorchDispatchMode):
    """A dispatch mode that reports every op outside of planned graphs.

    The allocations of ``DistributedDataParallel`` and ``fully_shard`` are not reported but computed (`wrapper_memory`).

    The context around a call of a compiled function begins the mode, before the state of autograd is saved for the graphs in the
    call. The mode stays on until the step is over, in order to see the loss and the backward.
    """

    supports_higher_order_operators = True

    def __init__(self, report: Callable[[EagerOp], None]) -> None:
        super().__init__()
        self._report = report
        self.paused = False  # whether nothing is reported: a planned graph runs, or Dynamo compiles
        self.complete = True  # whether memory was measured for all ops: impossible while the user's profiler is active

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo compile while the mode is on; otherwise Dynamo would skip every function."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and report it."""
        kwargs = kwargs or {}
        if self.paused or wrapper_runs(sys._getframe()):
            return func(*args, **kwargs)
        given, peak_bytes = _parts((args, kwargs)), 0
        if profiler_running():
            self.complete = False
            results = func(*args, **kwargs)
        else:
            with memory_trace() as trace:  # 10 us
                results = func(*args, **kwargs)
            peak_bytes = trace.peak()
        known = {storage_key(t) for t in given}
        made = [t for t in _parts(results) if storage_key(t) not in known]
        self._report(EagerOp(given, made, peak_bytes, func.namespace == "c10d" and current_backward() >= 0))
        return results


class EagerCode:
    """The watch of eager code, and the compiled functions whose calls are watched."""

    def __init__(self, report: Callable[[EagerOp], None]) -> None:
        self._report = report
        self._watch: EagerWatch | None = None
        self._complete = True  # whether all watched eager code was measured
        self._callers = set[Any]()  # compiled functions that were called in the step
        self._seen = WeakSet[Any]()  # functions of steps whose eager code has been seen

    @property
    def is_watched(self) -> bool:
        """Whether a watch is on."""
        return self._watch is not None

    def is_due(self, function: object) -> bool:
        """Whether the eager code around a function has not been seen, and a watch can begin."""
        self._callers.add(function)
        return function not in self._seen and self._watch is None and top_mode() is None

    def begin(self) -> None:
        """Begin to watch."""
        self._complete = True
        self._watch = EagerWatch(self._report)
        self._watch.__enter__()

    def end(self) -> None:
        """Take the watch off. Autograd undoes this while autograd runs; an interrupt may have come before the watch began."""
        watch, top = self._watch, top_mode()
        if watch is None or current_backward() >= 0 or (top is not None and top is not watch):
            return  # a mode that was begun later has to end first
        if top is watch:
            watch.__exit__(None, None, None)
        self._complete, self._watch = watch.complete, None

    def pause(self, paused: bool) -> None:
        """Stop reporting the ops that run from now on, or report them again."""
        if self._watch is not None:
            self._watch.paused = paused

    def paused(self) -> AbstractContextManager[None]:
        """Context of code that is not the user's."""
        return nullcontext() if self._watch is None else replaced(self._watch, "paused", True)

    def end_step(self, seen: bool) -> None:
        """Note that the step of the called functions is over, and whether its eager code was seen."""
        if seen and self._complete:
            self._seen |= self._callers
        else:
            self._seen -= self._callers
        self._callers.clear()

    def forget(self) -> None:
        """Watch every function once more."""
        self.end()
        self._callers.clear()
        self._seen.clear()


def _parts(values: object) -> list[torch.Tensor]:
    """Tensors with memory among nested values. Tensors inside of a wrapper subclass are seen when the ops of the subclass are."""
    plain = [v for v in pytree.tree_leaves(values) if type(v) is torch.Tensor or type(v) is torch.nn.Parameter]
    return [part for tensor in plain if not tensor.is_meta for part in strided_parts(tensor)]
