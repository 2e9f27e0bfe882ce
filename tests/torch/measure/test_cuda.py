"""What is measured on a CUDA device, run against one that only counts: nothing here was measured on a real one."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from checkmate.torch import measure_peak
from checkmate.torch.integrations import PeakCallback
from checkmate.torch.measure import single_op
from checkmate.torch.measure.peak import measure_step, peaks
from checkmate.torch.steps.coordinator import Coordinator

GRANULE, SEGMENT, HAS = 512, 2**14, 2**20


class Device:
    """An allocator that rounds to 512 bytes, and a clock that gains a millisecond at each event."""

    def __init__(self) -> None:
        self.held = self.peak = self.now_ms = self.emptied = 0

    def alloc(self, size: int) -> None:
        self.held += -(-size // GRANULE) * GRANULE
        if self.held > HAS:
            self.held = 0
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.peak = max(self.peak, self.held)

    def free(self, size: int) -> None:
        self.alloc(-size)

    def reset(self, device: Any = None) -> None:
        self.peak = self.held

    def empty(self) -> None:
        self.emptied += 1

    def event(self, enable_timing: bool) -> Any:
        found = types.SimpleNamespace(at=0, synchronize=lambda: None)
        found.elapsed_time = lambda later: later.at - found.at

        def record() -> None:
            self.now_ms += 1
            found.at = self.now_ms

        found.record = record
        return found


@pytest.fixture
def cuda(seeming_gpu: Callable[..., None]) -> Device:
    device = Device()
    known: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 0,
        "synchronize": lambda device=None: None,
        "memory_allocated": lambda _=None: device.held,
        "memory_stats_as_nested_dict": lambda _=None: {"allocated_bytes": {"all": {"current": device.held}}},
        "max_memory_allocated": lambda _=None: device.peak,
        "reset_peak_memory_stats": device.reset,
        "max_memory_reserved": lambda _=None: -(-device.peak // SEGMENT) * SEGMENT,
        "mem_get_info": lambda _=None: (HAS - device.held, HAS),
        "empty_cache": device.empty,
        "Event": device.event,
        "_sleep": lambda cycles: None,
    }
    seeming_gpu(**known)
    return device


def step_on(cuda: Device, forward: int, held: int, backward: int) -> Any:
    """A compiled step that takes so many bytes at its forward's peak, between, and at its backward's."""

    class Held(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            cuda.alloc(held)
            cuda.alloc(forward - held)
            cuda.free(forward - held)
            return x.sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            cuda.alloc(backward - held)
            cuda.free(backward)
            return torch.ones(4) * grad

    return lambda x: (Held.apply(x),)


def test_a_dry_step_is_measured_in_its_parts(cuda: Device) -> None:
    """Above what was there before it."""
    cuda.alloc(5 * GRANULE)
    with peaks(torch.device("cuda")) as (parts, mark):
        cuda.alloc(4096)
        cuda.free(3072)
        mark()
        cuda.alloc(7168)
        cuda.free(8192)
    assert parts == [(4096, 1024), (8192, 0)]
    assert cuda.held == 5 * GRANULE


def test_a_step_for_cuda_graphs_is_measured_by_what_the_allocator_holds(cuda: Device) -> None:
    """Their pool keeps whole segments, above what was allocated before."""
    cuda.alloc(5 * GRANULE)
    with peaks(torch.device("cuda"), reserved=True) as (parts, mark):
        cuda.alloc(4096)
        cuda.free(3072)
        mark()
        cuda.alloc(SEGMENT)
        cuda.free(SEGMENT + 1024)
    assert parts == [(SEGMENT - 5 * GRANULE, 1024), (2 * SEGMENT - 5 * GRANULE, 0)]
    assert cuda.emptied == 1


def test_a_step_that_runs_out_of_memory_takes_all_of_it(cuda: Device) -> None:
    """It is over any budget, another plan may be tried, and nothing of it stays."""
    x = torch.ones(4, requires_grad=True)
    found = measure_step(step_on(cuda, 4096, 1024, 2 * HAS), [x], hold_outputs=True)
    assert found.peak_bytes == HAS
    assert x.grad is None and cuda.emptied == 1


def test_the_peak_is_the_devices(cuda: Device) -> None:
    """`measure_peak` asks CUDA where it is in use."""
    cuda.alloc(GRANULE)

    def work() -> None:
        cuda.alloc(700)
        cuda.free(700)

    assert measure_peak(work) == 2 * GRANULE


def test_what_else_is_allocated_counts(request: pytest.FixtureRequest) -> None:
    """All of the budget is on the device, whoever allocated it; what the graph shows is not counted twice."""
    with FakeTensorMode():  # made first: once a device seems to be there, a build of PyTorch for CUDA asks its driver
        parameter = torch.ones(128, device="cuda:0", requires_grad=True)
    cuda: Device = request.getfixturevalue("cuda")
    cuda.alloc(512)  # the parameter
    cuda.alloc(4096)
    assert Coordinator().outside_bytes([parameter], torch.device("cuda")) == 4096


def test_garbage_is_not_resident(cuda: Device) -> None:
    """A model of before is often in a cycle that compilation left."""

    class Model:
        def __init__(self) -> None:
            self.itself = self
            cuda.alloc(4096)

        def __del__(self) -> None:
            cuda.free(4096)

    Model()
    assert cuda.held == 4096
    assert Coordinator().outside_bytes([torch.ones(4)], torch.device("cuda")) == 0


def test_workspace_and_time_of_an_op(cuda: Device) -> None:
    """Workspace is the peak beyond what the op returns; time comes from events."""
    graph = fx.Graph()
    x = graph.placeholder("x")

    def op(x: torch.Tensor) -> torch.Tensor:
        cuda.alloc(512 + 2048)
        cuda.free(2048)
        return x

    node = graph.call_function(op, (x,))
    x.meta["val"], node.meta["val"] = torch.ones(128), torch.ones(128)
    assert single_op.measure_on_cuda(node) == (1e6, 2048)


def test_a_trainers_step_is_measured_by_the_allocator(cuda: Device) -> None:
    """What is there at its begin is in the total."""
    cuda.alloc(1024)
    callback, state = PeakCallback(step=1), types.SimpleNamespace(global_step=0, log_history=[])
    callback.on_step_begin(None, state, None, model=torch.nn.Linear(2, 2))
    cuda.alloc(2048)
    cuda.free(2048)
    callback.on_pre_optimizer_step(None, state, None)
    assert callback.measured_bytes == 3072
