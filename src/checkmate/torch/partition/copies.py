"""Copies of storages to the host and back: functions for the nodes of a plan with copies.

On CUDA each of two copy engines is a stream, with pinned memory and events. On the CPU a copy runs when it is first waited for,
the latest moment that the plan allows. Copies lie in memory that torch's allocator does not know: on the CPU the measured peak of
the device is the peak of the step alone, and on CUDA no block of pinned memory is rounded up to a power of two.

The order of waits is as in `checkmate.simulate`: the compute stream waits for a copy before it frees the storage (`wait_sent`),
before it first reads a fetched value (`wait_fetched`), and before it discards the copy on the host. Device storage is allocated
and freed only on the compute stream, after its waits for every copy of the storage: the allocator needs no `record_stream`.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.fx.node import has_side_effect

from checkmate.core.plan import HostMemory
from checkmate.core.units import format_bytes
from checkmate.torch._compat.dispatch import no_dispatch, no_modes
from checkmate.torch.graph.storages import storage_key

_log = logging.getLogger("checkmate.torch")


class HostBuffers:
    """One buffer on the host for each device, for all plans: no copy outlives its step, and one step runs at a time."""

    def __init__(self) -> None:
        self.held_bytes = self.peak_bytes = 0  # of the copies now, and at most so far
        self.whole: dict[torch.device, npt.NDArray[np.uint8]] = {}  # no tensors, which would count as resident memory of a CPU
        self.devices = set[torch.device]()  # those that had copies
        self._running = threading.Lock()

    def reserve(self, size_bytes: int, device: torch.device) -> None:
        """Have a buffer for the copies of a plan before its first step: pinning takes longer than copying."""
        if device not in self.whole or self.whole[device].nbytes < size_bytes:
            _synchronize(device)  # the last copies may be under way
            self.whole.pop(device, None)
            self.whole[device] = host_memory(size_bytes, device)

    def take(self, offset: int, size_bytes: int, device: torch.device) -> torch.Tensor:
        """The part of a buffer that a plan gives to a copy."""
        self.held_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return torch.from_numpy(self.whole[device][offset : offset + size_bytes])

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step with copies; if it raises, no copy is under way afterwards in memory that others may get."""
        with self._running:
            try:
                yield
            except BaseException:
                self.held_bytes = 0
                for device in self.devices:
                    _synchronize(device)
                raise


BUFFERS = HostBuffers()


def host_memory(size_bytes: int, device: torch.device) -> npt.NDArray[np.uint8]:
    """Memory of the host; for a CUDA device it is pinned, to the byte and for as long as it exists."""
    memory = np.empty(size_bytes, dtype=np.uint8)
    if device.type == "cuda":
        _pin(memory, memory.ctypes.data, size_bytes)
    return memory


def pin_weight(weight: torch.Tensor, device: torch.device) -> None:
    """Pin a weight where it is, for a CUDA device; if that cannot be, each of its copies waits for the host."""
    if device.type != "cuda" or weight.is_pinned():
        return
    try:
        _pin(weight.untyped_storage(), weight.data_ptr(), weight.nbytes)
    except RuntimeError as error:
        _log.warning(
            "a frozen weight of %s cannot be pinned, so that its copies are slow: %s\nhint: load weights without mmap, or "
            "raise the limit of locked memory (ulimit -l)",
            format_bytes(weight.nbytes),
            error,
        )


def _pin(owner: object, address: int, size_bytes: int) -> None:
    cuda: Any = torch.cuda.cudart()
    torch.cuda.check_error(cuda.cudaHostRegister(address, size_bytes, 0))
    weakref.finalize(owner, cuda.cudaHostUnregister, address).atexit = False


@dataclass(eq=False, slots=True)
class HostCopy:
    """The copy of one storage on the host."""

    buffer: torch.Tensor
    tensor: tuple[Any, ...]  # type, device, offset, size and strides of the copied tensor
    sent: Callable[[], None] = lambda: None  # waits until the copy out is done
    fetched: Callable[[], None] = lambda: None  # waits until the last copy back is done


def offload(tensor: torch.Tensor, offset: int) -> HostCopy:
    """Begin to copy the storage of a tensor to the host, to a place in the buffer there."""
    return _sent(tensor, BUFFERS.take(offset, tensor.untyped_storage().nbytes(), tensor.device))


def _sent(tensor: torch.Tensor, buffer: torch.Tensor) -> HostCopy:
    storage = tensor.untyped_storage()
    where = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
    meaning = (tensor.dtype, tensor.device, tensor.storage_offset(), tensor.size(), tensor.stride())
    copy = HostCopy(buffer, meaning)
    copy.sent = _copy("out", buffer, where, tensor.device, after=lambda: None)
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
    BUFFERS.held_bytes -= copy.buffer.numel()


class _Residents:
    """Copies of weights on a device between steps; a step that fails leaves none of those that it began with."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, torch.Tensor]] = {}

    def take(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The copy of a weight, if there is one and the weight has not changed since; from now on there is none."""
        owner, version, copy = self._found.pop(storage_key(weight), (lambda: None, -1, None))
        return copy if owner() is not None and version == weight._version else None

    def put(self, weight: torch.Tensor, copy: torch.Tensor) -> None:
        """Hold a copy of a weight for as long as the weight exists."""
        key = storage_key(weight)
        owner = weakref.ref(weight.untyped_storage(), lambda _: self._found.pop(key, None))
        self._found[key] = owner, weight._version, copy

    def of(self, weights: Iterable[torch.Tensor | torch.UntypedStorage]) -> list[torch.Tensor]:
        """The copies of some weights, or of weights with some storages."""
        return [self._found[key][2] for key in map(_key, weights) if key in self._found]

    def forget(self, weights: Iterable[torch.Tensor | torch.UntypedStorage]) -> None:
        """Free the copies of some weights."""
        for key in map(_key, weights):
            self._found.pop(key, None)


def _key(weight: torch.Tensor | torch.UntypedStorage) -> int:
    return storage_key(weight) if isinstance(weight, torch.Tensor) else weight._cdata


RESIDENTS = _Residents()


def weight(tensor: torch.Tensor, device: torch.device) -> HostCopy:
    """The copy on the host of a weight that a step on a device fetches: the weight itself. The device keeps no other copy."""
    RESIDENTS.forget([tensor])
    buffer = torch.empty(0, dtype=torch.uint8).set_(storage := tensor.untyped_storage(), 0, (storage.nbytes(),), (1,))
    return HostCopy(buffer, (tensor.dtype, device, tensor.storage_offset(), tensor.size(), tensor.stride()))


def resident(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A weight that is on the device when a step begins, which is copied there in front of the first step."""
    kept = RESIDENTS.take(tensor)
    return kept if kept is not None else wait_fetched(fetch(copy := weight(tensor, device)), copy)


def keep(tensor: torch.Tensor, device: torch.device, on_device: torch.Tensor) -> None:
    """Keep a weight on the device until the next step begins."""
    RESIDENTS.put(tensor, on_device)


def hand_over(tensor: torch.Tensor) -> torch.Tensor:
    """A fetched tensor that the forward saves for the backward."""
    return tensor


COPIES: Final = frozenset[Callable[..., Any]]({offload, wait_sent, fetch, wait_fetched, discard, weight, resident, keep})
COPY_FUNCTIONS: Final = COPIES | {hand_over}
for _function in COPIES:
    has_side_effect(_function)


def measured_host(device: torch.device, amount_bytes: int) -> HostMemory:
    """The host with ``amount_bytes`` for copies, and the rates of the copy engines of a device, each measured alone."""
    best = {"out": float("inf"), "in": float("inf")}
    with no_dispatch(), no_modes(), torch.no_grad():  # compilers call this while they trace with fake tensors
        sample = torch.ones(32 * 2**20, dtype=torch.uint8, device=device)  # enough for the full rate of a bus
        buffer = torch.from_numpy(host_memory(sample.numel(), device))
        for _ in range(4):  # the first also allocates
            began = time.perf_counter()
            copy = _sent(sample, buffer)
            copy.sent()
            _synchronize(device)
            sent = time.perf_counter()
            wait_fetched(fetch(copy), copy)
            _synchronize(device)
            best["in"] = min(best["in"], time.perf_counter() - sent)
            best["out"] = min(best["out"], sent - began)
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
def side_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """The stream of a device for one purpose, such as copies in one direction."""
    return torch.cuda.Stream(device)


def _copy(
    direction: Literal["out", "in"], into: torch.Tensor, source: torch.Tensor, device: torch.device, after: Callable[[], None]
) -> Callable[[], None]:
    """Begin a copy between a device and the host, once ``after`` returns; the result waits until it is done."""
    if device.type == "cpu":
        return _copy_when_awaited(into, source, after)
    BUFFERS.devices.add(device)
    stream = side_stream(device, direction)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        after()  # waits on the current stream, the stream of this copy
        into.copy_(source, non_blocking=True)
    done = stream.record_event()
    return lambda: torch.cuda.current_stream(device).wait_event(done)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
