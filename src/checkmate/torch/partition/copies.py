"""Copies of storages to the host and back: functions for the nodes of a plan with copies.

On CUDA each of two copy engines is a stream, with pinned memory and events. On the CPU a copy runs when it is first waited for,
the latest moment that the plan allows, into memory that torch's allocator does not know: the measured peak of the device is the
peak of the step alone.

The order of waits is as in `checkmate.simulate`: the compute stream waits for a copy before it frees the storage (`wait_sent`),
before it first reads a fetched value (`wait_fetched`), and before it discards the copy on the host. Device storage is allocated
and freed only on the compute stream, after its waits for every copy of the storage: the allocator needs no `record_stream`.

On CUDA nothing here has been run: no GPU was available. torch 2.13 has separate ops for the same purpose (``ao::offload``,
``ao::reload``, ``ao::wait_tensor``). They are not used: both directions share one stream there, and a copy back would wait for
earlier copies out; ``wait_tensor`` also frees the storage of its source although views may share it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
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

    def take(self, size_bytes: int, *, pinned: bool) -> torch.Tensor:
        """A buffer of bytes; torch keeps freed pinned memory for the next step, because pinning takes longer than copying."""
        self.held_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        if pinned:
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        return torch.from_numpy(np.empty(size_bytes, dtype=np.uint8))

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer out of use."""
        self.held_bytes -= buffer.numel()


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
    copy.sent = _copy("out", buffer, where, tensor.device, after=_nothing)
    return copy


def wait_sent(copy: HostCopy, tensor: torch.Tensor) -> None:
    """Wait until a tensor's storage has been copied; then it can be freed."""
    del tensor  # as an argument it was alive until here
    copy.sent()


def fetch(copy: HostCopy) -> torch.Tensor:
    """Allocate a tensor and begin to copy it back from the host."""
    dtype, device, offset, size, stride = copy.tensor
    where = torch.empty(copy.buffer.numel(), dtype=torch.uint8, device=device)
    copy.fetched = _copy("in", where, copy.buffer, device, after=copy.sent)
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


def _copy_when_awaited(into: torch.Tensor, source: torch.Tensor, after: Callable[[], None]) -> Callable[[], None]:
    """A copy on the CPU, which runs when it is first waited for."""
    both = [(into, source)]

    def wait() -> None:
        if both:
            after()
            target, origin = both.pop()  # this function must not keep the storages
            np.copyto(target.numpy(), origin.numpy())

    return wait


@functools.cache
def _engine(device: torch.device, direction: Direction) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _copy(
    direction: Direction, into: torch.Tensor, source: torch.Tensor, device: torch.device, after: Callable[[], None]
) -> Callable[[], None]:
    """Begin a copy between a device and the host, once ``after`` returns; the result waits until it is done."""
    if device.type == "cpu":
        return _copy_when_awaited(into, source, after)
    stream = _engine(device, direction)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        after()  # waits on the current stream, the stream of this copy
        into.copy_(source, non_blocking=True)
    done = stream.record_event()
    return lambda: torch.cuda.current_stream(device).wait_event(done)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The storage of a tensor as a tensor of bytes; nothing is allocated."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
