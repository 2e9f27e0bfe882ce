"""Copies of storages to the host and back, concurrent with the ops of a step: functions for the nodes of a plan with copies.

On the CPU two threads are the copy engines. They copy into memory that torch's allocator does not know: the measured peak of the
device is therefore the peak of the step alone. On CUDA each engine is a stream, with pinned memory and events.

The order of waits is as in `checkmate.simulate`: the compute stream waits for a copy before it frees the storage (`wait_sent`),
before it first reads a fetched value (`wait_fetched`), and before it discards the copy on the host. Device storage is allocated
and freed only on the compute stream, after its waits for every copy of the storage: the allocator needs no `record_stream`. A
host buffer is reused only by a copy that is issued after one of these waits.

On CUDA nothing here has been run: no GPU was available. torch 2.13 has separate ops for the same purpose (``ao::offload``,
``ao::reload``, ``ao::wait_tensor``). They are not used: both directions share one stream there, and a copy back would wait for
earlier copies out; ``wait_tensor`` also frees the storage of its source although views may share it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from torch.fx.node import has_side_effect

from checkmate.core.plan import HostMemory
from checkmate.torch._compat.dispatch import no_dispatch, no_modes

Direction: TypeAlias = Literal["out", "in"]


def _nothing() -> None:
    """Return at once: there is nothing to wait for."""


class HostBuffers:
    """Buffers on the host, with the bytes of the current copies and their maximum so far."""

    def __init__(self) -> None:
        self.held_bytes = self.peak_bytes = 0
        self._free: dict[int, list[torch.Tensor]] = {}
        self._lock = threading.Lock()

    def take(self, size_bytes: int, *, pinned: bool) -> torch.Tensor:
        """A buffer of bytes; pinned buffers are kept for the next step, because pinning takes longer than copying."""
        with self._lock:
            self.held_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
            known = self._free.get(size_bytes)
            if pinned and known:
                return known.pop()
        if pinned:
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        return torch.from_numpy(np.empty(size_bytes, dtype=np.uint8))

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer out of use."""
        with self._lock:
            self.held_bytes -= buffer.numel()
            if buffer.is_pinned():
                self._free.setdefault(buffer.numel(), []).append(buffer)


BUFFERS = HostBuffers()


@dataclass(eq=False, slots=True)
class HostCopy:
    """The copy of one storage on the host."""

    buffer: torch.Tensor
    tensor: tuple[Any, ...]  # type, device, offset, size and strides of the copied tensor
    sent: Callable[[], None] = _nothing  # waits until the copy out is done
    fetched: Callable[[], None] = _nothing  # waits until the last copy back is done


def offload(tensor: torch.Tensor) -> HostCopy:
    """Begin to copy the storage of a tensor to the host."""
    where = _bytes_of(tensor)
    buffer = BUFFERS.take(where.numel(), pinned=tensor.is_cuda)
    meaning = (tensor.dtype, tensor.device, tensor.storage_offset(), tensor.size(), tensor.stride())
    copy = HostCopy(buffer, meaning)
    copy.sent = _engines(tensor.device).copy("out", buffer, where, after=_nothing)
    return copy


def wait_sent(copy: HostCopy, tensor: torch.Tensor) -> None:
    """Wait until a tensor's storage has been copied; then it can be freed."""
    del tensor  # as an argument it was alive until here
    copy.sent()


def fetch(copy: HostCopy) -> torch.Tensor:
    """Allocate a tensor and begin to copy it back from the host."""
    dtype, device, offset, size, stride = copy.tensor
    where = torch.empty(copy.buffer.numel(), dtype=torch.uint8, device=device)
    copy.fetched = _engines(device).copy("in", where, copy.buffer, after=copy.sent)
    return torch.empty(0, dtype=dtype, device=device).set_(where.untyped_storage(), offset, size, stride)


def wait_fetched(tensor: torch.Tensor, copy: HostCopy) -> torch.Tensor:
    """Wait until a tensor has been copied back; then it can be read."""
    copy.fetched()
    return tensor


def discard(copy: HostCopy) -> None:
    """Free a copy on the host, once all copies to and from it are done."""
    copy.sent()
    copy.fetched()
    BUFFERS.give_back(copy.buffer)


COPY_FUNCTIONS: Final[frozenset[Callable[..., Any]]] = frozenset({offload, wait_sent, fetch, wait_fetched, discard})
for _function in COPY_FUNCTIONS:
    has_side_effect(_function)


def measured_host(device: torch.device, amount_bytes: int) -> HostMemory:
    """The host with ``amount_bytes`` for copies, and the rates of the copy engines of a device, each measured alone."""
    best = {"out": float("inf"), "in": float("inf")}
    with no_dispatch(), no_modes(), torch.no_grad():  # compilers call this while they trace with fake tensors
        sample = torch.ones(32 * 2**20, dtype=torch.uint8, device=device)  # enough for the full rate of a bus
        for _ in range(4):  # the first also allocates
            began = time.perf_counter()
            copy = offload(sample)
            copy.sent()
            _synchronize(device)
            sent = time.perf_counter()
            wait_fetched(fetch(copy), copy)
            _synchronize(device)
            best["in"] = min(best["in"], time.perf_counter() - sent)
            best["out"] = min(best["out"], sent - began)
            discard(copy)
    return HostMemory(amount_bytes, int(sample.numel() / best["out"]), int(sample.numel() / best["in"]))


class _ThreadEngines:
    """One thread for each direction, for tensors of the CPU."""

    def __init__(self) -> None:
        self.before_copy: Callable[[], None] = _nothing  # called by a thread before each copy; tests delay copies with it
        self._threads = {d: ThreadPoolExecutor(1, thread_name_prefix=f"checkmate-copy-{d}") for d in ("out", "in")}

    def copy(
        self, direction: Direction, into: torch.Tensor, source: torch.Tensor, after: Callable[[], None]
    ) -> Callable[[], None]:
        """Queue a copy through numpy: another thread must not write torch's version counters."""
        both = [(into.numpy(), source.numpy())]

        def run() -> None:
            self.before_copy()
            after()
            # The thread keeps this function a moment longer than the copy takes; the function must not keep the storages.
            np.copyto(*both.pop())

        done: Future[None] = self._threads[direction].submit(run)
        return done.result


class _StreamEngines:
    """One stream for each direction, for a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {"out": torch.cuda.Stream(device), "in": torch.cuda.Stream(device)}

    def copy(
        self, direction: Direction, into: torch.Tensor, source: torch.Tensor, after: Callable[[], None]
    ) -> Callable[[], None]:
        stream = self._streams[direction]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            after()  # waits on the current stream, the stream of this copy
            into.copy_(source, non_blocking=True)
        done = stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)


THREADS = _ThreadEngines()
_STREAMS: dict[torch.device, _StreamEngines] = {}


def _engines(device: torch.device) -> _ThreadEngines | _StreamEngines:
    if device.type == "cpu":
        return THREADS
    if device not in _STREAMS:
        _STREAMS[device] = _StreamEngines(device)
    return _STREAMS[device]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The storage of a tensor as a tensor of bytes; nothing is allocated."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
