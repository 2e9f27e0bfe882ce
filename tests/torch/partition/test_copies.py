"""Steps that copy values to the host: the same bits, and the planned bytes on both sides, although the copies are late."""

from __future__ import annotations

import pytest
import torch

import checkmate
import checkmate.torch
from checkmate import Compute, Fetch, Free, HostMemory, Limits, Offload, OptionError, Plan, PlanError, Problem, simulate, solve
from checkmate.core.plan import with_frees
from checkmate.frontend.planner import GivenPlan, order_of
from checkmate.solvers.offload.placement import Reference, place
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.reductions.unread import needed_steps
from checkmate.torch.partition import copies

FAST = HostMemory(2**30, 10**12, 10**12)
X, Y = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 5
LOSS = torch.nn.functional.cross_entropy


def network() -> torch.nn.Module:
    """Layers with views, dropout masks and batch statistics."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = [torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32)]
    for _ in range(4):
        layers += [torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Dropout(0.2)]
    return torch.nn.Sequential(*layers, torch.nn.Unflatten(1, (4, 8)), torch.nn.Flatten(), torch.nn.Linear(32, 5))


def step_of(**keywords: object) -> tuple[torch.nn.Module, checkmate.torch.Step]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return model, checkmate.torch.compile(model, LOSS, optimizer, example=(X, Y), **keywords)  # type: ignore[arg-type]


def trained(model: torch.nn.Module, step: checkmate.torch.Step) -> list[torch.Tensor]:
    torch.manual_seed(1)
    losses = [step(X, Y)[1].clone() for _ in range(3)]
    return [*losses, *(p.detach().clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]


@pytest.fixture(scope="module")
def plain() -> tuple[checkmate.torch.Step, list[torch.Tensor]]:
    """The step that keeps everything, and what it computes."""
    model, step = step_of()
    return step, trained(model, step)


@pytest.fixture(scope="module")
def plan(plain) -> Plan:
    """A plan that copies every value that is away for some op, on a bus that is fast enough for it."""
    graph = plain[0].graph
    fold = FoldViews.of(graph)
    reference = Reference.of(fold.folded, range(len(fold.folded.ops)))
    placed = place(reference, reference.gaps, FAST, [v.size_bytes for v in fold.folded.values], 1.0)
    steps: list[Compute | Free | Fetch | Offload] = []
    for stage, o in enumerate(reference.targets):
        steps += [Free(p.value) for p in placed if p.gone_at == stage]
        steps += [Fetch(p.value) for p in placed if p.fetch_at == stage]
        steps.append(Compute(o))
        steps += [Offload(p.value) for p in placed if fold.folded.producer[p.value] == o]
    found = with_frees(graph, needed_steps(Problem(graph, "100%", host=FAST), fold.invert_steps(steps)), FAST)
    assert sum(isinstance(s, Fetch) for s in found.steps) > 10
    return found


def test_bits_and_bytes_are_as_planned(plain, plan):
    """Losses, parameters and statistics are those of the step that keeps everything; device and host bytes are the plan's."""
    model, step = step_of(plan=plan)
    assert all(torch.equal(a, b) for a, b in zip(plain[1], trained(model, step), strict=True))
    timeline = simulate(step.graph, step.plan)
    for _ in range(3):
        copies.BUFFERS.peak_bytes = 0
        measured = checkmate.torch.measure_peak(lambda: step(X, Y))
        assert measured == timeline.peak_bytes - step.graph.resident_bytes
        assert (copies.BUFFERS.peak_bytes, copies.BUFFERS.held_bytes) == (timeline.host_peak_bytes, 0)


def test_memory_of_the_host_is_made_once_when_the_step_is_compiled(plain, plan):
    """As many bytes as the plan holds there at most, and not in the first step: pinning takes longer than copying."""
    cpu = torch.device("cpu")
    copies.BUFFERS.whole.pop(cpu, None)
    model, step = step_of(plan=plan)
    made = copies.BUFFERS.whole[cpu]
    assert made.nbytes == simulate(step.graph, step.plan).host_peak_bytes > 0
    trained(model, step)
    assert copies.BUFFERS.whole[cpu] is made


def test_a_fetch_that_is_not_read_ends_before_its_memory_is_freed(plain, plan):
    """Otherwise the copy would be written where another tensor is by then; here the late copy would hold the memory."""
    graph = plain[0].graph
    sent = next(k for k, s in enumerate(plan.steps) if isinstance(s, Offload))
    v = plan.steps[sent].value
    gone = next(k for k, s in enumerate(plan.steps) if s == Free(v) and k > sent)
    steps = (*plan.steps[: gone + 1], Fetch(v), Free(v), *plan.steps[gone + 1 :])
    model, step = step_of(plan=Plan(steps, graph.digest, plan.host))
    assert all(torch.equal(a, b) for a, b in zip(plain[1], trained(model, step), strict=True))
    assert checkmate.torch.measure_peak(lambda: step(X, Y)) == simulate(graph, step.plan).peak_bytes - graph.resident_bytes


def test_a_step_that_fails_leaves_no_copy_behind(plain, plan):
    """The next step has the bits and the bytes of a step that nothing preceded."""
    model, step = step_of(plan=plan)
    with pytest.raises(IndexError, match="out of bounds"):
        step(X, Y + 5)
    assert copies.BUFFERS.held_bytes == 0
    copies.BUFFERS.peak_bytes = 0
    model.load_state_dict(network().state_dict())
    assert all(torch.equal(a, b) for a, b in zip(plain[1], trained(model, step), strict=True))
    assert copies.BUFFERS.peak_bytes == simulate(step.graph, step.plan).host_peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["40%", "50%", "60%", "80%"])
def test_bits_and_bytes_are_as_planned_at_every_budget(plain, budget):
    """The same, from few copies to many."""
    host = HostMemory(2**30, 10**9, 5 * 10**8)
    model, step = step_of(plan=solve(Problem(plain[0].graph, budget, host=host), limits=Limits(time_s=5)).plan)
    assert all(torch.equal(a, b) for a, b in zip(plain[1], trained(model, step), strict=True))
    timeline = simulate(step.graph, step.plan)
    copies.BUFFERS.peak_bytes = 0
    assert checkmate.torch.measure_peak(lambda: step(X, Y)) == timeline.peak_bytes - step.graph.resident_bytes
    assert copies.BUFFERS.peak_bytes == timeline.host_peak_bytes


@pytest.mark.slow
def test_the_option_host_keeps_the_budget():
    """Planned with the measured rates of this machine, whatever they make of it."""
    _, step = step_of(budget="60%", host="1GiB", time_limit_s=1)
    step(X, Y)  # makes the optimizer's state
    assert step.result.peak_bytes <= step.result.budget_bytes
    measured = checkmate.torch.measure_peak(lambda: step(X, Y))
    assert measured <= step.result.budget_bytes - step.graph.resident_bytes


def test_a_bus_is_measured():
    """Rates of the two engines, each alone."""
    host = copies.measured_host(torch.device("cpu"), 5)
    assert host.bytes == 5
    assert 10**7 < host.out_bytes_per_s < 10**12
    assert 10**7 < host.in_bytes_per_s < 10**12


def test_memory_of_the_host_is_pinned_to_the_byte_and_for_as_long_as_it_exists(seeming_gpu, seeming_pins):
    """PyTorch's allocator of pinned memory takes the next power of two. Nothing here was run on a GPU."""
    seen: list[str] = []
    seeming_gpu(check_error=seen.append)
    memory = copies.host_memory(12345, torch.device("cuda", 0))
    assert (seeming_pins, seen) == ({memory.ctypes.data: 12345}, ["success"])
    part = memory[100:]
    del memory
    assert seeming_pins
    del part
    assert not seeming_pins


def test_strides_and_offsets_come_back():
    """A copy is of a storage; the tensor that names it may be a part of it, with any strides."""
    whole = torch.arange(24.0).reshape(4, 6)
    part = whole.t()[1:4]
    copies.BUFFERS.reserve(100, torch.device("cpu"))
    copy = copies.offload(part, 4)
    copies.wait_sent(copy, part)
    again = copies.wait_fetched(copies.fetch(copy), copy)
    assert torch.equal(again, part)
    assert (again.stride(), again.storage_offset()) == (part.stride(), part.storage_offset())
    assert again.untyped_storage().nbytes() == whole.untyped_storage().nbytes()
    copies.discard(copy)


def test_host_is_refused_where_copies_are_not_run(plain, plan):
    """In graphs that are no whole step, under Inductor and without a budget; before anything runs."""
    with pytest.raises(PlanError, match="only fetch frozen weights"):
        order_of(plan)
    with pytest.raises(OptionError, match="compiler='eager'"):
        step_of(budget="50%", host="1GiB", compiler="inductor")
    with pytest.raises(OptionError, match="without a budget"):
        step_of(host="1GiB")
    with pytest.raises(checkmate.UnitError):
        step_of(budget="50%", host="a lot")
    with pytest.raises(PlanError, match="which this program does not"):
        GivenPlan(plan)(plain[0].graph)
