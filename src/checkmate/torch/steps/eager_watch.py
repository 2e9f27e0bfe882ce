"""Sees what eager code allocates in a step: the loss outside of the compiled model, code at a graph break, an auxiliary head."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from checkmate.torch._compat.dispatch import TorchDispatchMode, top_mode
from checkmate.torch._compat.distributed import wrapper_runs
from checkmate.torch._compat.engine import current_backward
from checkmate.torch._compat.profiler import memory_trace, profiler_running
from checkmate.torch.graph.storages import storage_key, strided_parts


class EagerWatch(TorchDispatchMode):
    """A dispatch mode that reports every storage which an op outside of planned graphs allocates.

    What ``DistributedDataParallel`` and ``fully_shard`` allocate is not reported: it is computed (`wrapper_memory`).

    It is begun by the context around a call of a compiled function, before autograd's state is saved for the graphs in it, and
    stays until the step is over, so that the loss and the backward are seen.

    Args:
        made: Called with a tensor whose storage is new.
        read: Called with each tensor that an op is given.
        exchanged: Called with each tensor that a collective of a backward is given, such as the gradient buckets of
            ``DistributedDataParallel``.
        took: Called with the most bytes that an op had allocated at once, results and scratch memory of its kernels.

    Attributes:
        paused: Whether nothing is reported: a planned graph runs, or Dynamo compiles.
        complete: Whether scratch memory was measured for all ops: it cannot be where a profiler of the user is active.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        made: Callable[[torch.Tensor], None],
        read: Callable[[torch.Tensor], None],
        exchanged: Callable[[torch.Tensor], None],
        took: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._made = made
        self._read = read
        self._exchanged = exchanged
        self._took = took
        self.paused = False
        self.complete = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo compile while the mode is on; it would skip every function otherwise."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and report the storages that it allocates."""
        kwargs = kwargs or {}
        if self.paused or wrapper_runs(sys._getframe()):
            return func(*args, **kwargs)
        given = _parts((args, kwargs))
        exchange = func.namespace == "c10d" and current_backward() >= 0
        for tensor in given:
            self._read(tensor)
            if exchange:
                self._exchanged(tensor)
        if profiler_running():
            self.complete = False
            results = func(*args, **kwargs)
        else:
            with memory_trace() as trace:  # 10 us
                results = func(*args, **kwargs)
            self._took(trace.peak())
        known = {storage_key(t) for t in given}
        for tensor in _parts(results):
            if storage_key(tensor) not in known:
                self._made(tensor)
        return results

    def end(self) -> bool:
        """Take the mode off; whether that was possible. A mode that was begun later has to end first."""
        if top_mode() is not self:
            return False
        self.__exit__(None, None, None)
        return True


def _parts(values: object) -> list[torch.Tensor]:
    """Tensors with memory among nested values. Those inside of a subclass that wraps them are seen when its ops are."""
    plain = [v for v in pytree.tree_leaves(values) if type(v) is torch.Tensor or type(v) is torch.nn.Parameter]
    return [part for tensor in plain if not tensor.is_meta for part in strided_parts(tensor)]
