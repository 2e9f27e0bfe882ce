"""Budgets of reserved memory, and what a budget of allocated memory counts on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

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


class FakeAllocator:
    """Counts what is asked of the CUDA allocator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, reserved: int = 0, allocated: int = 0) -> None:
        self.made: list[int] = []
        self.reserved, self.allocated = reserved, allocated
        known: dict[str, Any] = {
            "empty_cache": lambda: self.made.append(0),
            "memory_reserved": lambda device: self.reserved,
            "memory_allocated": lambda device: self.allocated,
            "get_allocator_backend": lambda: "native",
        }
        for name, value in known.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(allocator.torch, "empty", lambda size, **options: self.made.append(size))


def test_memory_is_reserved_in_one_piece_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is emptied first: what profiling left would stay reserved beside the arena."""
    model, given = network()
    keep = checkmate.torch.compile(model, **given)
    fake = FakeAllocator(monkeypatch, reserved=60, allocated=48)
    memory = ReservedMemory(CUDA)
    arena = smallest_arena(keep.graph, keep.plan)
    assert memory(keep.graph, keep.plan) == arena.reserved_bytes + 12
    memory.prepare(keep.graph, keep.plan)
    assert fake.made == [0, 0, arena.size_bytes]


def test_more_than_the_budget_after_the_first_step_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """What runs beside the plan is not in the prediction."""
    fake = FakeAllocator(monkeypatch)
    memory = ReservedMemory(CUDA)
    fake.reserved = 3 << 20
    memory.check(2 << 20)
    memory.check(2 << 20)
    (message,) = caplog.messages
    assert "holds 3.00 MiB after the first step, more than the budget of 2.00 MiB" in message
    within = ReservedMemory(CUDA)
    within.check(3 << 20)
    assert len(caplog.messages) == 1


def test_allocated_memory_counts_what_is_not_split_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with segments of fixed sizes; not with expandable segments, and not on a CPU."""
    FakeAllocator(monkeypatch)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    counted = counted_memory("allocated", CUDA)
    assert counted is not None
    graph = checkmate.Graph.from_dag(cost=[1], size_bytes=[23 << 19], edges=[], kept=[0])
    assert counted(graph, checkmate.Plan.from_order(graph, [0])) == 12 << 20
    assert counted_memory("allocated", None) is None
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert has_expandable_segments()
    assert counted_memory("allocated", CUDA) is None


def test_both_libraries_are_called_in_both_threads() -> None:
    """The products run, forward and backward, and leave nothing behind; on a CPU nothing else can be seen."""
    allocator.warm_up(None)
    state = torch.get_rng_state()
    allocator.warm_up(torch.device("cpu", 0))
    assert torch.equal(state, torch.get_rng_state())
