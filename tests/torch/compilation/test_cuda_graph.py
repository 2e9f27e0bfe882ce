"""Whole steps that a CUDA graph replays, with a graph that runs its step again on a CPU and refuses what no capture allows."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import checkmate.torch
from checkmate import OptionError
from checkmate.torch import measure_peak
from checkmate.torch._compat import aot
from checkmate.torch.compilation import cuda_graph
from checkmate.torch.measure import allocator
from checkmate.torch.partition import copies

LOSS = nn.functional.cross_entropy


class AsIfCaptured(TorchDispatchMode):
    """A graph that runs its step again at the addresses of its capture, and raises where a capture would."""

    made: list[AsIfCaptured]
    holds_bytes = 0

    def __init__(self, device: torch.device, memory: Any) -> None:
        super().__init__()
        self.results: list[torch.Tensor] = []
        self.replays = 0
        self.made.append(self)

    def around(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def capture(self, run: Callable[..., Any], args: list[torch.Tensor]) -> None:
        self.run, self.args, self.addresses = run, args, [t.data_ptr() for t in args]

    def replay(self) -> Sequence[Any]:
        assert [t.data_ptr() for t in self.args] == self.addresses
        self.replays += 1
        with self, no_state_is_read():
            results = self.run([*self.args])
        if self.results:
            for old, new in zip(self.results, results, strict=True):
                old.copy_(new)  # as a graph overwrites its memory
        else:
            self.results = results
        return self.results

    def reserved_bytes(self) -> int:
        return self.holds_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError(f"{func} while a stream is captured")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_state_is_read() -> Iterator[None]:
    """Raise if code other than that of planned random ops reads the state of a generator."""

    def called(frame: Any, event: str, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        reads = event == "c_call" and isinstance(owner, torch.Generator) and function.__name__ == "get_state"
        if reads and frame.f_globals["__name__"] != "checkmate.torch._compat.aot":
            raise RuntimeError("get_state while a stream is captured")

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(before)


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[AsIfCaptured]:
    monkeypatch.setattr(AsIfCaptured, "made", [], raising=False)
    monkeypatch.setitem(cuda_graph.GRAPHS, "cpu", AsIfCaptured)
    return AsIfCaptured.made


def network() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.3)) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(32, 5))


def batch(seed: int, rows: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 32, generator=generator), torch.randint(0, 5, (rows,), generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    rate = torch.tensor(1e-2)
    return torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> checkmate.torch.Step:
    given: dict[str, Any] = {"example": batch(0), "mode": "reduce-overhead", "time_limit_s": 0.3, "costs": "estimated", **options}
    return checkmate.torch.compile(model, LOSS, optimizer, **given)


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    prediction = model(x)
    loss = LOSS(prediction, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return torch.cat([prediction.detach().flatten(), loss.detach()[None]])


def four_steps(step: checkmate.torch.Step) -> None:
    """Three op by op, and a replayed one."""
    for seed in range(4):
        step(*batch(seed))


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


class Pair:
    """A model that is trained by our steps, and one by eager steps on the same batches."""

    def __init__(self, optimizer: Callable[[nn.Module], torch.optim.Optimizer], **options: Any) -> None:
        self.ours, self.theirs = network(), network()
        self.mine, self.other = optimizer(self.ours), optimizer(self.theirs)
        self.step = compiled(self.ours, self.mine, **options)

    def train(self, seed: int, rows: int = 64) -> None:
        """One step of each: results, parameters, buffers, state and generators are equal to the bit."""
        torch.manual_seed(seed)
        prediction, loss = self.step(*batch(seed, rows))
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        expected = eager_step(self.theirs, self.other, *batch(seed, rows))
        assert torch.equal(torch.cat([prediction.flatten(), loss[None]]), expected)
        assert torch.equal(state, torch.get_rng_state())
        assert all(map(torch.equal, self.ours.state_dict().values(), self.theirs.state_dict().values()))
        for a, b in zip(self.ours.parameters(), self.theirs.parameters(), strict=True):
            assert all(torch.equal(self.mine.state[a][name], self.other.state[b][name]) for name in self.other.state[b])


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("budget", [None, "45%"])
def test_replayed_steps_train_the_same(optimizer: Any, budget: str | None, graphs: list[AsIfCaptured]) -> None:
    """Three steps run op by op, and all that follow are replayed; a learning rate that is a tensor may follow a schedule."""
    pair = Pair(optimizer, budget=budget)
    assert budget is None or pair.step.result.overhead > 1
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (pair.mine, pair.other) if optimizer is adamw]
    for seed in range(7):
        pair.train(seed)
        for schedule in schedules:
            schedule.step()
    assert [graph.replays for graph in graphs] == [4]


def test_results_are_copies_of_which_the_plan_knows() -> None:
    """The next replay overwrites its own results, and not those that a caller still holds; nothing else is allocated."""

    def resident(mode: Any) -> tuple[int, checkmate.torch.Step]:
        model = network()
        step = compiled(model, sgd(model), mode=mode, budget="45%")
        return step.graph.resident_bytes, step

    before = resident("default")[0]
    now, step = resident("reduce-overhead")
    found = [step(*batch(seed)) for seed in range(6)]
    kept = [(p.clone(), loss.clone()) for p, loss in found]
    x, y = batch(9)
    assert measure_peak(lambda: step(x, y)) <= step.result.peak_bytes - now
    assert all(torch.equal(a, b) for before, now in zip(kept, found, strict=True) for a, b in zip(before, now, strict=True))
    assert now - before == x.nbytes + y.nbytes + sum(t.nbytes for t in found[0])


def test_a_first_step_that_fails_leaves_steps_that_run(graphs: list[AsIfCaptured], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stopped it, such as Ctrl-C or a full device: nothing is known yet of what a graph would take for constant."""
    pair = Pair(sgd)

    def full(graph: AsIfCaptured) -> Any:
        raise MemoryError

    with monkeypatch.context() as device:
        device.setattr(AsIfCaptured, "around", full)
        with pytest.raises(MemoryError):
            pair.step(*batch(0))
    for seed in range(5):
        pair.train(seed)
    assert graphs[-1].replays == 2


def test_a_batch_may_be_of_inference_mode(graphs: list[AsIfCaptured]) -> None:
    """Its tensors have no versions, and no step overwrites them."""
    model = network()
    step = compiled(model, sgd(model))
    with torch.inference_mode():
        x, y = batch(0)
    for _ in range(5):
        step(x, y)
    assert graphs[-1].replays == 2


def test_a_number_that_changes_is_not_replayed(graphs: list[AsIfCaptured], caplog: pytest.LogCaptureFixture) -> None:
    """Steps run op by op for as long as a schedule changes it, and it is told once what to write."""
    pair = Pair(sgd)
    schedule = [torch.optim.lr_scheduler.StepLR(o, 5, 0.5) for o in (pair.mine, pair.other)]
    for seed in range(12):
        pair.train(seed)
        for each in schedule:
            each.step()
    assert [graph.replays for graph in graphs] == [2, 2, 0]
    (message,) = warnings_in(caplog)
    assert message.startswith("lr changed: steps run op by op") and "lr=torch.tensor(1e-3, device='cpu')" in message


def test_what_is_replaced_is_captured_again(graphs: list[AsIfCaptured], caplog: pytest.LogCaptureFixture) -> None:
    """A graph would go on with the old memory of a parameter, of a buffer and of the state of an optimizer."""
    pair = Pair(adamw)
    for seed in range(4):
        pair.train(seed)
    for optimizer in (pair.mine, pair.other):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in range(4, 8):
        pair.train(seed)
    pair.ours[0][0].weight.data = pair.ours[0][0].weight.data.clone()  # type: ignore[index, union-attr]
    pair.ours[0][1].running_mean = pair.ours[0][1].running_mean.clone()  # type: ignore[index, union-attr]
    for seed in range(8, 12):
        pair.train(seed)
    assert [graph.replays for graph in graphs] == [1, 1, 1]
    told = ["lr", "the memory of a parameter, a buffer or the optimizer's state"]
    assert [m.partition(" changed")[0] for m in warnings_in(caplog)] == told


def test_each_shape_has_its_graph(graphs: list[AsIfCaptured]) -> None:
    """As it has its plan; the graphs do not disturb each other."""
    pair = Pair(sgd)
    for seed in range(10):
        pair.train(seed, rows=64 if seed % 2 else 16)
    assert [graph.replays for graph in graphs] == [2, 2]


def test_what_the_step_does_to_its_inputs_is_seen(graphs: list[AsIfCaptured]) -> None:
    """A batch that the model overwrites, and parameters, which an eager graph may have saved."""

    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.mul_(2))

    model = Doubling()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.ones(3, 4), torch.zeros(3, dtype=torch.int64)
    step = compiled(model, optimizer, example=(x, y))
    for n in range(1, 6):
        step(x, y)
        assert torch.equal(x, torch.full((3, 4), 2.0**n))
    assert graphs[0].replays == 2
    held = nn.functional.linear(x.requires_grad_(), model.inner.weight).sum()
    step(torch.ones(3, 4), y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        held.backward()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda p: torch.optim.AdamW(p),
            r"_dense.* at (adam|optimizer).py.*hint: write torch.optim.AdamW\(..., capturable=True\)",
        ),
        (lambda p: torch.optim.SGD(p, torch.tensor(0.1)), r"of SGD: .* at sgd.py:.*lr=torch.tensor\(1e-3, .*fused=True\)"),
        (lambda p: torch.optim.Adagrad(p), "of Adagrad.*hint: use SGD, or AdamW with capturable=True, in place of Adagrad"),
    ],
)
def test_optimizers_that_read_numbers_back_are_refused(make: Any, words: str) -> None:
    """Before anything is planned or runs; the error has the line of the optimizer, and the line to write."""
    model = network()
    with pytest.raises(OptionError, match=f"(?s){words}"):
        compiled(model, make(model.parameters()))


def test_an_optimizer_that_becomes_unfit_is_refused_before_the_capture() -> None:
    """A learning rate of another kind, for example, long after the step was compiled."""
    model = network()
    step = compiled(model, optimizer := sgd(model))
    step(*batch(0))
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    with pytest.raises(OptionError, match="cannot replay the step of SGD"):
        four_steps(step)


def test_a_graph_beyond_the_budget_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """No step exceeds a budget: steps then run op by op."""
    monkeypatch.setattr(AsIfCaptured, "holds_bytes", 2**40)
    pair = Pair(sgd, budget="100%", budget_of="reserved")
    for seed in range(6):
        pair.train(seed)
    assert [graph.replays for graph in AsIfCaptured.made] == [0, 0]
    (message,) = warnings_in(caplog)
    assert message.startswith("with a CUDA graph the allocator holds 1.00 TiB, more than the budget of ")


@torch.library.custom_op("checkmate_tests::peeks", mutates_args=())
def peeks(x: torch.Tensor) -> torch.Tensor:
    """An op that reads the state of a generator."""
    torch.get_rng_state()
    return x.clone()


peeks.register_fake(torch.empty_like)
peeks.register_autograd(lambda ctx, grad: grad)


def test_the_pretended_graph_refuses_as_a_capture_does() -> None:
    """Otherwise these tests would show nothing."""

    class Peeking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return peeks(super().forward(x))

    model = Peeking(32, 5)
    step = compiled(model, sgd(model))
    with pytest.raises(RuntimeError, match="get_state while a stream is captured"):
        four_steps(step)
    graph = AsIfCaptured(torch.device("cpu"), None)
    graph.capture(lambda args: [args[0].item()], [torch.ones(())])
    with pytest.raises(RuntimeError, match=r"_local_scalar_dense\.default while a stream is captured"):
        graph.replay()


def test_a_mode_without_effect_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """On a CPU, as under `torch.compile`, and for sizes that vary; what can never be replayed is refused."""
    model = network()
    compiled(model, sgd(model), dynamic=True)
    monkeypatch.delitem(cuda_graph.GRAPHS, "cpu")
    compiled(model, sgd(model))
    told = "mode='reduce-overhead' asks for CUDA graphs, which have no effect on {}: the step is compiled without"
    assert [*dict.fromkeys(warnings_in(caplog))] == [told.format("sizes that vary"), told.format("a CPU")]
    with pytest.raises(OptionError, match="needs a whole step"):
        checkmate.torch.compile(model, LOSS, example=batch(0), mode="reduce-overhead")
    with pytest.raises(OptionError, match="no graph has copies"):
        compiled(model, sgd(model), host="1GiB", budget="50%")
    with pytest.raises(OptionError, match="needs a whole step"):
        torch.compile(model, backend="checkmate", options={"budget": "100%", "mode": "reduce-overhead"})(batch(0)[0])


class Philox:
    """A CUDA generator as PyTorch has it: a seed and an offset on the host; in a capture also the numbers drawn so far in it."""

    capturing = False
    device = torch.device("cuda", 0)

    def __init__(self, device: Any = None, state: dict[str, int] | None = None) -> None:
        self.state = state or {"seed": 7, "offset": 0, "drawn": 0}

    def get_state(self) -> torch.Tensor:
        assert not Philox.capturing, "Cannot call CUDAGeneratorImpl::current_seed"
        return torch.tensor([self.state["seed"], self.state["offset"]]).view(torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        self.state["seed"], self.state["offset"] = state.view(torch.int64).tolist()

    def graphsafe_get_state(self) -> Philox:
        return Philox(state=self.state)

    def graphsafe_set_state(self, other: Philox) -> None:
        self.state = other.state

    def draw(self, numbers: int) -> Callable[[], tuple[int, int]]:
        """The seed and the offset of some numbers; in a capture those of each replay."""
        state, at = self.state, self.state["drawn" if Philox.capturing else "offset"]
        state["drawn" if Philox.capturing else "offset"] += numbers
        if Philox.capturing:
            return lambda: (state["seed"], state["offset"] + at)
        seed = state["seed"]
        return lambda: (seed, at)


def test_random_ops_that_are_computed_again_draw_the_numbers_of_a_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after another seed, and whatever else draws between two steps."""
    generator = Philox()
    monkeypatch.setattr(torch, "Generator", Philox)
    monkeypatch.setattr(torch, "default_generator", generator)
    states = aot.GraphSafeStates(generator)  # type: ignore[arg-type]

    def step() -> list[Callable[[], tuple[int, int]]]:
        made: list[Any] = []
        for numbers in (4, 8, 12):
            made.append(aot.run_and_save_rng_state(generator.draw, numbers))
            generator.draw(20)  # an op that is computed once
        again = [aot.run_with_rng_state(state, generator.draw, n) for (state, _), n in zip(made[::-1], (12, 8, 4), strict=True)]
        return [each for _, each in made] + again

    with states.measuring():
        first = [numbers() for numbers in step()]
    assert first == [(7, 0), (7, 24), (7, 52), (7, 52), (7, 24), (7, 0)] and generator.state["offset"] == 84
    monkeypatch.setattr(Philox, "capturing", True)
    with states.capturing():
        captured = step()
    monkeypatch.setattr(Philox, "capturing", False)
    for seed, offset in ((7, 84), (9, 400)):
        generator.state.update(seed=seed, offset=offset)
        states.set()
        assert [numbers() for numbers in captured] == [(seed, offset + at) for _, at in first]


def test_a_cuda_graph_is_captured_in_the_pool_and_on_the_stream_of_its_steps(seeming_gpu: Callable[..., None]) -> None:
    """The allocator gives a block to one stream only: what the first steps left free is there for the capture."""
    told: list[Any] = []

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name = name if isinstance(name, str) else "side"

        def wait_stream(self, other: Stream) -> None:
            told.append(f"{self.name} waits for {other.name}")

    class Captured:
        def register_generator_state(self, generator: object) -> None:
            told.append("a generator")

        def replay(self) -> None:
            told.append("replayed")

    @contextmanager
    def entered(*what: Any, **how: Any) -> Iterator[None]:
        told.append([getattr(what[0], "name", "capture"), *how.values()])
        yield

    pool, main = types.SimpleNamespace(id=(0, 7), name="pool"), Stream("main")
    memory: Any = types.SimpleNamespace(pool=pool, running=lambda: entered(pool))
    seeming_gpu(Stream=Stream, current_stream=lambda _: main, stream=entered, graph=entered, CUDAGraph=Captured)
    seeming_gpu(default_generators=[Philox()], memory_reserved=lambda device: 5)
    copies.side_stream.cache_clear()
    try:
        graph = cuda_graph.CudaGraph(torch.device("cuda", 0), memory)
        with graph.around():
            told.append("step")
        graph.capture(lambda args: [*args], ["result"])
        side = copies.side_stream(torch.device("cuda", 0), "capture")
    finally:
        copies.side_stream.cache_clear()
    assert told == [
        "side waits for main", ["side"], ["pool"], "step", "main waits for side",
        ["capture", (0, 7), side, "thread_local"],
    ]  # fmt: skip
    assert graph.replay() == ["result"] and told[-1] == "replayed" and graph.reserved_bytes() == 5


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_a_gpu_replays_the_same_steps(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit beside the same plan without a graph, with dropout that is computed again, and within the budget."""
    monkeypatch.delitem(cuda_graph.GRAPHS, "cpu")
    found: dict[str, list[torch.Tensor]] = {}
    for mode in ("default", "reduce-overhead"):
        monkeypatch.setattr(allocator, "_RESERVED", {})
        torch.cuda.empty_cache()
        model = network().cuda()
        made = optimizer(model)
        for group in made.param_groups:
            group["lr"] = group["lr"].cuda() if isinstance(group["lr"], torch.Tensor) else group["lr"]
        given = [tuple(t.cuda() for t in batch(seed, rows=4096)) for seed in range(7)]
        step = compiled(model, made, example=given[0], budget="60%", budget_of="reserved", mode=mode)
        assert step.result.overhead > 1
        torch.cuda.manual_seed(1)
        results = [t for each in given for t in step(*each)]
        found[mode] = [*results, *model.state_dict().values(), torch.cuda.get_rng_state()]
        torch.cuda.synchronize()
        assert torch.cuda.memory_reserved() <= step.result.budget_bytes
        if mode == "reduce-overhead":
            replayed = torch.cuda.memory_allocated()
            step(*given[0])
            assert torch.cuda.memory_allocated() == replayed
    assert all(map(torch.equal, *found.values()))
