"""Budgets of reserved memory, and what a budget of allocated memory counts on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import checkmate.torch
from checkmate import OptionError
from checkmate.studies.reserved import smallest_arena
from checkmate.torch import measure_peak
from checkmate.torch.measure import allocator
from checkmate.torch.measure.allocator import ReservedMemory, counted_memory, has_expandable_segments

CUDA = torch.device("cuda", 0)


def network() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    layers = [m for width in (640, 896, 704, 960) for m in (nn.LazyLinear(width), nn.GELU())]
    model = nn.Sequential(*layers, nn.LazyLinear(8))
    batch = torch.randn(2048, 32), torch.randn(2048, 8)
    model(batch[0])
    return model, {"loss": nn.functional.mse_loss, "example": batch, "costs": "estimated"}


def test_reserved_memory_is_planned_for() -> None:
    """By the model of the allocator; bits are those of keeping everything."""
    model, given = network()
    keep = checkmate.torch.compile(model, **given)
    arena = smallest_arena(keep.graph, keep.plan).reserved_bytes
    budget = int(0.8 * arena)
    step = checkmate.torch.compile(model, **given, budget=budget, budget_of="reserved", time_limit_s=0.4)
    assert smallest_arena(step.graph, step.plan).reserved_bytes <= budget
    assert step.result.budget_bytes == budget
    losses = [run(*given["example"])[1] for run in (keep, step)]
    assert torch.equal(*losses)
    model.zero_grad(set_to_none=True)
    assert step.graph.resident_bytes + measure_peak(lambda: step(*given["example"])) <= budget


@pytest.mark.parametrize("options", [{"compiler": "inductor"}, {"chunking": "auto"}])
def test_what_reserved_memory_cannot_be_combined_with(options: dict[str, Any]) -> None:
    """What the allocator holds is predicted from whole ops in the order of the plan."""
    with pytest.raises(OptionError, match="budget_of='reserved' cannot be kept with"):
        checkmate.torch.Options(budget="1GiB", budget_of="reserved", **options)


class FakeAllocator(TorchFunctionMode):
    """Counts what is asked of the CUDA allocator; tensors are asked of it where it is the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []
        self.reserved = self.allocated = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.made.append(args[0]) if func is torch.empty else func(*args, **kwargs or {})


@pytest.fixture
def fake(seeming_gpu: Callable[..., None]) -> FakeAllocator:
    made = FakeAllocator()
    seeming_gpu(
        empty_cache=lambda: made.made.append(0),
        memory_reserved=lambda device: made.reserved,
        memory_allocated=lambda device: made.allocated,
        get_allocator_backend=lambda: "native",
    )
    return made


def test_memory_is_reserved_in_one_piece_before_the_first_step(fake: FakeAllocator) -> None:
    """The cache is emptied first: what profiling left would stay reserved beside the arena."""
    model, given = network()
    keep = checkmate.torch.compile(model, **given)
    fake.reserved, fake.allocated = 60, 48
    memory = ReservedMemory(CUDA)
    arena = smallest_arena(keep.graph, keep.plan)
    assert memory(keep.graph, keep.plan) == arena.reserved_bytes + 12
    with fake:
        memory.prepare(keep.graph, keep.plan)
    assert fake.made == [0, 0, arena.size_bytes]


def test_more_than_the_budget_after_the_first_step_is_told_once(fake: FakeAllocator, caplog: Any) -> None:
    """What runs beside the plan is not in the prediction."""
    memory = ReservedMemory(CUDA)
    fake.reserved = 3 << 20
    memory.check(2 << 20)
    memory.check(2 << 20)
    (message,) = caplog.messages
    assert "holds 3.00 MiB after the first step, more than the budget of 2.00 MiB" in message
    within = ReservedMemory(CUDA)
    within.check(3 << 20)
    assert len(caplog.messages) == 1


@pytest.mark.usefixtures("fake")
def test_allocated_memory_counts_what_is_not_split_off(environ: dict[str, str]) -> None:
    """On a GPU with segments of fixed sizes; not with expandable segments, and not on a CPU."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environ.pop(name, None)
    counted = counted_memory("allocated", CUDA)
    assert counted is not None
    graph = checkmate.Graph.from_dag(cost=[1], size_bytes=[23 << 19], edges=[], kept=[0])
    assert counted(graph, checkmate.Plan.from_order(graph, [0])) == 12 << 20
    assert counted_memory("allocated", None) is None
    environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    assert has_expandable_segments()
    assert counted_memory("allocated", CUDA) is None


def test_both_libraries_are_called_in_both_threads() -> None:
    """The products run, forward and backward, and leave nothing behind; on a CPU nothing else can be seen."""
    allocator.warm_up(None)
    state = torch.get_rng_state()
    allocator.warm_up(torch.device("cpu", 0))
    assert torch.equal(state, torch.get_rng_state())
