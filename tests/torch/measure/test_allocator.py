"""Budgets of reserved memory, and what a budget of allocated memory counts on a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import checkmate.torch
from benchmarks.gpu.history import replayed_history
from checkmate import OptionError
from checkmate.allocators import CachingAllocator, Chunk
from checkmate.oom.snapshot import snapshot_of
from checkmate.studies.reserved import requests, smallest_arena
from checkmate.torch import measure_peak
from checkmate.torch.measure import allocator
from checkmate.torch.measure.allocator import ReservedMemory, counted_memory, has_expandable_segments

CUDA, MIB = torch.device("cuda", 0), 2**20


def network() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    layers = [m for width in (640, 896, 704, 960) for m in (nn.LazyLinear(width), nn.GELU())]
    model = nn.Sequential(*layers, nn.LazyLinear(8))
    batch = torch.randn(2048, 32), torch.randn(2048, 8)
    model(batch[0])
    return model, {"loss": nn.functional.mse_loss, "example": batch, "costs": "estimated"}


def sizes(*tensors: torch.Tensor) -> list[int]:
    return [t.untyped_storage().nbytes() for t in tensors]


def test_reserved_memory_is_planned_for() -> None:
    """By the model of the allocator, with parameters and batch as blocks of their own; bits are those of keeping everything."""
    model, given = network()
    keep = checkmate.torch.compile(model, **given)
    resident = sizes(*model.parameters(), *given["example"])
    budget = int(0.8 * smallest_arena(keep.graph, keep.plan, resident).reserved_bytes)
    step = checkmate.torch.compile(model, **given, budget=budget, budget_of="reserved", time_limit_s=0.4)
    assert smallest_arena(step.graph, step.plan, resident).reserved_bytes <= budget
    assert step.result.budget_bytes == budget
    losses = [run(*given["example"])[1] for run in (keep, step)]
    assert torch.equal(*losses)
    model.zero_grad(set_to_none=True)
    assert step.graph.resident_bytes + measure_peak(lambda: step(*given["example"])) <= budget


@pytest.mark.parametrize("whole", [False, True])
def test_the_arena_is_real_memory_in_a_compilation(whole: bool) -> None:
    """Although AOTAutograd traces with fake tensors then: nothing else takes as much before a step has run."""
    model, given = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if whole else None
    steps: list[Any] = []
    measured = measure_peak(
        lambda: steps.append(checkmate.torch.compile(model, optimizer=optimizer, **given, budget="100%", budget_of="reserved"))
    )
    arena = smallest_arena(steps[0].graph, steps[0].plan, sizes(*model.parameters(), *given["example"]))
    assert measured >= arena.size_bytes > steps[0].graph.resident_bytes


@pytest.mark.parametrize("kind", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9)])
@pytest.mark.parametrize("whole", [False, True])
def test_the_state_of_an_optimizer_is_there_before_the_arena(kind: Any, whole: bool) -> None:
    """What its first step makes would be cut from the arena for ever. The state is what that step would make, bit by bit."""
    trained = []
    for options in ({"budget_of": "reserved"}, {}):
        model, given = network()
        optimizer = kind(model.parameters())
        budget = {"budget": "100%", "optimizer": optimizer if whole else None, **given, **options}
        step = checkmate.torch.compile(model, **budget)
        assert bool(optimizer.state) == bool(options)
        for _ in range(2):
            step(*given["example"])
            if not whole:
                optimizer.step()
                optimizer.zero_grad()
        state = [t for p in model.parameters() for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
        trained.append([*model.parameters(), *state])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


@pytest.mark.parametrize("options", [{"compiler": "inductor"}, {"chunking": "auto"}])
def test_what_reserved_memory_cannot_be_combined_with(options: dict[str, Any]) -> None:
    """What the allocator holds is predicted from whole ops in the order of the plan."""
    with pytest.raises(OptionError, match="budget_of='reserved' cannot be kept with"):
        checkmate.torch.Options(budget="1GiB", budget_of="reserved", **options)


class SeemingPool:
    """A memory pool that only has a number."""

    def __init__(self, number: int = 0) -> None:
        self.id = (0, number)


class SeemingDevice:
    """A GPU whose memory is given out by the model of the allocator, in the pool that is in use."""

    def __init__(self) -> None:
        expandable = has_expandable_segments()
        self.pools = {(0, n): CachingAllocator(expandable) for n in range(3)}
        self.pool, self.made = (0, 0), 0
        self.blocks: dict[int, tuple[tuple[int, int], Chunk]] = {}

    @property
    def reserved(self) -> int:
        return sum(pool.held for pool in self.pools.values())

    def allocate(self, size: int) -> int:
        chunk = self.pools[self.pool].allocate(size)
        address = chunk.address + (self.pool[1] << 61)
        self.blocks[address] = self.pool, chunk
        return address

    def free(self, address: int) -> None:
        pool, chunk = self.blocks.pop(address)
        self.pools[pool].release(chunk)

    def storage(self, size: int, device: Any) -> Any:
        """What `torch.UntypedStorage` makes: freed at once, for no tensor has it."""
        self.free(address := self.allocate(size))
        return SimpleNamespace(data_ptr=lambda: address)

    def new_pool(self, use_on_oom: bool) -> SeemingPool:
        assert use_on_oom
        self.made += 1
        return SeemingPool(self.made)

    @contextmanager
    def within(self, pool: SeemingPool, device: Any) -> Iterator[None]:
        self.pool = pool.id
        yield
        self.pool = (0, 0)

    def snapshot(self) -> list[dict[str, Any]]:
        return [
            {
                "device": 0,
                "address": start + (number[1] << 61),
                "total_size": size,
                "segment_type": "small" if start < 1 << 60 else "large",
                "segment_pool_id": number,
                "blocks": [
                    {"address": at, "size": chunk.size, "state": "active_allocated"}
                    for at, (of, chunk) in sorted(self.blocks.items())
                    if of == number and start <= chunk.address < start + size
                ],
            }
            for number, pool in self.pools.items()
            for start, size in pool._regions.items()
        ]

    def empty_cache(self) -> None:
        """Free segments of the pool of all tensors; those of other pools stay for as long as the pools exist."""
        self.pools[0, 0].empty_cache()

    def run(self, graph: checkmate.Graph, plan: checkmate.Plan, steps: int = 3) -> list[int]:
        """Make the requests of a plan; what it leaves after the last step, its gradients and outputs, is returned."""
        held: dict[int, int] = {}
        for _ in range(steps):
            for block in held.values():
                self.free(block)
            held = {}
            for request in requests(graph, plan):
                if request.size_bytes:
                    held[request.block] = self.allocate(request.size_bytes)
                else:
                    self.free(held.pop(request.block))
        return list(held.values())


@pytest.fixture
def device(
    request: pytest.FixtureRequest, seeming_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> SeemingDevice:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environ.pop(name, None)
    environ["PYTORCH_ALLOC_CONF"] = getattr(request, "param", "")
    made = SeemingDevice()
    monkeypatch.setattr(torch, "UntypedStorage", made.storage)
    monkeypatch.setattr(allocator, "_RESERVED", {})
    seeming_gpu(
        empty_cache=made.empty_cache,
        memory_snapshot=made.snapshot,
        memory_reserved=lambda device: made.reserved,
        get_allocator_backend=lambda: "native",
        MemPool=made.new_pool,
        use_mem_pool=made.within,
    )
    return made


@pytest.fixture(scope="module")
def planned() -> checkmate.torch.Step:
    model, given = network()
    return checkmate.torch.compile(model, **given)


@pytest.mark.parametrize("device", ["", "expandable_segments:True"], indirect=True)
@pytest.mark.parametrize("whole", [False, True])
def test_a_step_holds_what_was_predicted(device: SeemingDevice, planned: checkmate.torch.Step, whole: bool) -> None:
    """From the memory that was reserved before: with parts of segments beside resident tensors, and in a pool apart from them."""
    device.free(device.allocate(60 * MIB))  # of work that is over
    rest = planned.graph.resident_bytes
    for size in (3 * MIB, 100, 2 * MIB, rest - 6 * MIB):
        device.allocate(size)
    device.free(device.allocate(700))
    memory = counted_memory("reserved", CUDA, whole=whole)
    assert isinstance(memory, ReservedMemory)
    predicted = memory(planned.graph, planned.plan)
    memory.prepare(planned.graph, planned.result)
    assert device.made == int(whole and not has_expandable_segments())
    before = device.reserved
    with memory.running():
        device.run(planned.graph, planned.plan)
    assert before <= device.reserved == predicted


def test_a_whole_step_runs_in_its_pool(seeming_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward runs in the same thread, to which the pool belongs; other steps run in none."""
    entered: list[object] = []
    seeming_gpu(use_mem_pool=lambda pool, device: entered.append(pool) or nullcontext())
    monkeypatch.setattr(allocator, "_RESERVED", {})
    for whole in (True, False):
        model, given = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1) if whole else None
        step = checkmate.torch.compile(model, optimizer=optimizer, **given, budget="100%", budget_of="reserved")
        allocator._RESERVED[None, False] = allocator._RESERVED[None, False]._replace(pool=model)
        step(*given["example"])
        assert entered.pop() is model if whole else not entered


def test_a_second_plan_has_the_arena_of_the_first(device: SeemingDevice) -> None:
    """Gradients of the first step are still in it when a loop clears them only after the next forward."""
    sizes = [20 * MIB, 20 * MIB, 12 * MIB, 40 * MIB]
    graph = checkmate.Graph.from_dag(cost=[1] * 4, size_bytes=sizes, edges=[(0, 1), (0, 2), (1, 2), (2, 3)], kept=[2])
    result = checkmate.evaluate(graph, checkmate.Plan.from_order(graph, range(4)))
    memory = ReservedMemory(CUDA)
    memory.prepare(graph, result)
    first = device.reserved
    (gradient,) = device.run(graph, result.plan, steps=1)
    assert device.reserved == first == 52 * MIB
    assert memory(graph, result.plan) == first
    memory.prepare(graph, result)
    assert device.reserved == first
    device.free(gradient)
    memory.prepare(graph, result)
    device.run(graph, result.plan)
    assert device.reserved == first


def test_a_larger_arena_stays_for_the_plan_that_needs_it(device: SeemingDevice, planned: checkmate.torch.Step) -> None:
    """Batches of two sizes alternate: as far as both budgets allow."""
    small = checkmate.Graph.from_dag(cost=[1], size_bytes=[11 * MIB], edges=[], kept=[0])
    result = checkmate.evaluate(small, checkmate.Plan.from_order(small, [0]))
    memory = ReservedMemory(CUDA)
    memory.prepare(planned.graph, planned.result)
    first = device.reserved
    for budget, reserved in ((2 * first, first), (12 * MIB, 12 * MIB)):
        other = ReservedMemory(CUDA)
        other.prepare(small, msgspec.structs.replace(result, budget_bytes=budget))
        for address in device.run(small, result.plan):
            device.free(address)
        assert device.reserved == reserved


@pytest.mark.parametrize("settings", ["max_split_size_mb:64", "roundup_power2_divisions:[256:1,>:4]", "large_segment_size_mb:40"])
def test_settings_that_the_model_does_not_know_are_refused(environ: dict[str, str], settings: str, caplog: Any) -> None:
    """They change segments: a budget of reserved memory is refused in a compilation, and one of allocated memory is in doubt."""
    environ.pop("PYTORCH_ALLOC_CONF", None)
    environ["PYTORCH_CUDA_ALLOC_CONF"] = f"pinned_use_background_threads:True,{settings}"
    model, given = network()
    with pytest.raises(OptionError, match=f"cannot be kept with {settings.partition(':')[0]} in the settings"):
        checkmate.torch.compile(model, **given, budget="100%", budget_of="reserved")


def test_more_than_the_budget_after_the_first_step_is_told_once(device: SeemingDevice, caplog: Any) -> None:
    """What runs beside the plan is not in the prediction."""
    memory = ReservedMemory(CUDA)
    device.pools[0, 0].held = 3 << 20
    memory.check(2 << 20)
    assert not caplog.messages
    for _ in range(3):
        memory.check(2 << 20)
    (message,) = caplog.messages
    assert "holds 3.00 MiB after the first step, more than the budget of 2.00 MiB" in message
    within = ReservedMemory(CUDA)
    for _ in range(2):
        within.check(3 << 20)
    assert len(caplog.messages) == 1


@pytest.mark.usefixtures("device")
def test_allocated_memory_counts_what_is_not_split_off(environ: dict[str, str], caplog: Any) -> None:
    """On a GPU with segments of fixed sizes; not with expandable segments, and not on a CPU."""
    counted = counted_memory("allocated", CUDA)
    assert counted is not None
    graph = checkmate.Graph.from_dag(cost=[1], size_bytes=[23 << 19], edges=[], kept=[0])
    assert counted(graph, checkmate.Plan.from_order(graph, [0])) == 12 << 20
    assert counted_memory("allocated", None) is None
    environ["PYTORCH_ALLOC_CONF"] = "roundup_power2_divisions:4"
    counted_memory("allocated", CUDA)
    assert ["with roundup_power2_divisions in the settings" in message for message in caplog.messages] == [True]
    environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    assert has_expandable_segments()
    assert counted_memory("allocated", CUDA) is None


def test_both_libraries_are_called_in_both_threads() -> None:
    """The products run, forward and backward, and leave nothing behind; on a CPU nothing else can be seen."""
    allocator.warm_up(None)
    state = torch.get_rng_state()
    allocator.warm_up(torch.device("cpu", 0))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [False, True])
def test_a_gpu_holds_what_was_predicted(whole: bool) -> None:
    """The arena is a segment of the device when the step is compiled; after the steps all segments are as predicted."""
    model, given = network()
    model, batch = model.cuda(), tuple(t.cuda() for t in given["example"])
    optimizer = torch.optim.AdamW(model.parameters()) if whole else None
    options = {**given, "example": batch, "budget": "80%", "budget_of": "reserved", "time_limit_s": 2}
    step = checkmate.torch.compile(model, optimizer=optimizer, **options)
    reserved = allocator._RESERVED[CUDA.index, whole and not has_expandable_segments()]
    assert reserved.address in {segment["address"] for segment in torch.cuda.memory_snapshot()}
    for _ in range(3):
        step(*batch)
        model.zero_grad(set_to_none=True)
    assert torch.cuda.memory_reserved(CUDA) <= step.result.budget_bytes


@pytest.mark.gpu
def test_the_model_of_the_allocator_is_the_allocator() -> None:
    """For a recorded history of random requests, from the first to the last."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(CUDA)
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=10**5)
    chance, held = random.Random(0), list[torch.Tensor]()
    for _ in range(3000):
        if held and chance.random() < 0.5:
            held.pop(chance.randrange(len(held)))
        else:
            held.append(torch.empty(int(2 ** chance.uniform(3, 25)), dtype=torch.uint8, device=CUDA))
    found = replayed_history(snapshot_of(torch.cuda.memory._snapshot()), CUDA.index)
    torch.cuda.memory._record_memory_history(enabled=None)
    assert found.recorded_bytes == torch.cuda.max_memory_reserved(CUDA)
    assert found.differs_at is None
