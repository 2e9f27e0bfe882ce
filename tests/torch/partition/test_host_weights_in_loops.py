"""Frozen weights on the host in plain loops: each graph fetches its own, as the plan of the step says."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import checkmate
import checkmate.torch
from checkmate import Fetch, OptionError, simulate
from checkmate.torch._compat.dispatch import FakeTensorMode, traced_on
from checkmate.torch.graph.host_weights import frozen_weights, is_frozen
from checkmate.torch.measure.device_memory import device_memory
from checkmate.torch.partition.copies import RESIDENTS
from checkmate.torch.steps.coordinator import coordinator
from tests.torch.partition.test_host_weights import LOSS, Packed, X, Y, all_equal, network

STEPS = 6


class Gelu(nn.Module):
    """A layer of a network under activation checkpointing."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class WithLoss(nn.Module):
    """A network that returns its prediction and its loss, as those of Hugging Face do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        prediction = self.inner(x)
        return prediction, LOSS(prediction, y)


class Broken(nn.Module):
    """A network in two graphs: Dynamo breaks between the halves."""

    def __init__(self, inner: nn.Sequential) -> None:
        super().__init__()
        self.first, self.second = inner[:2], inner[2:]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


class Block(nn.Module):
    """A block of a diffusion transformer: attention and MLP, each scaled and shifted by the time, with adapters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.time, self.qkv, self.out = nn.Linear(width, 6 * width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, 3 * width, bias=False)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.time(nn.functional.silu(time))[:, None].chunk(6, -1)
        normed = nn.functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        query, key, value = (self.qkv(normed) + self.up(self.down(normed))).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate * self.out(nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(nn.functional.layer_norm(x, x.shape[-1:]) * (1 + scale2) + shift2)


class Diffusion(nn.Module):
    """Blocks between the patches of a noisy image and the prediction of its noise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.blocks = nn.Linear(8, 32).requires_grad_(False), nn.ModuleList(Block(32) for _ in range(3))
        self.noise = nn.Linear(32, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        x = self.patches(x)
        for block in self.blocks:
            x = block(x, time)
        return self.noise(x)


IMAGE, TIME, NOISE = (
    torch.randn(*shape, generator=torch.Generator().manual_seed(0)) for shape in [(2, 16, 8), (2, 32), (2, 16, 8)]
)

Run = Callable[[Callable[..., torch.Tensor]], torch.Tensor]
LOOPS: dict[str, tuple[Callable[[], nn.Module], Run]] = {
    "loss outside": (network, lambda run: LOSS(run(X), Y)),
    "loss inside": (lambda: WithLoss(network()), lambda run: run(X, Y)[1]),
    "4 bit": (lambda: network(Packed), lambda run: LOSS(run(X), Y)),
    "checkpointed": (lambda: nn.Sequential(*map(Gelu, network())), lambda run: LOSS(run(X), Y)),
    "two graphs": (lambda: Broken(network()), lambda run: LOSS(run(X), Y)),
    "two runs": (network, lambda run: LOSS(run(X), Y) + LOSS(run(-X), Y)),
    "diffusion": (Diffusion, lambda run: nn.functional.mse_loss(run(IMAGE, TIME), NOISE)),
}


pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # from Dynamo

SLOW = ("loss outside", "4 bit", "two runs")


def frozen(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if not p.requires_grad]


def held_bytes(model: nn.Module) -> int:
    """Bytes of all tensors of the process but the frozen weights, which are on the host."""
    storages = device_memory(torch.device("cpu")).storages
    assert storages is not None
    apart = {p.untyped_storage()._cdata for p in frozen(model)}
    return sum(size for key, size in storages.items() if key not in apart)


def trained(
    model: nn.Module, loss_of: Run, peaks: list[int] | None = None, *, steps: int = STEPS, **options: object
) -> list[torch.Tensor]:
    """Losses and parameters of a plain loop with AdamW; the bytes on the device in each step from the third on."""
    torch._dynamo.reset()
    coordinator().forget_steps()
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    run = torch.compile(model, backend="checkmate", options={"budget": "100%", **options})
    losses: list[torch.Tensor] = []

    def forward_and_backward() -> None:
        loss = loss_of(run)
        loss.backward()
        losses.append(loss.detach().clone())

    for step in range(steps):
        if peaks is None or step < 2:
            forward_and_backward()
        else:
            RESIDENTS.forget(frozen(model))  # the profiler does not see frees of what was there before: the step copies them anew
            peaks.append(held_bytes(model) + checkmate.torch.measure_peak(forward_and_backward))
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def fetches() -> int:
    result = coordinator().result
    assert result is not None
    return sum(isinstance(step, Fetch) for step in result.plan.steps)


@pytest.mark.parametrize("loop", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LOOPS])
def test_each_step_has_the_bits_of_keeping_everything_within_the_budget(loop: str) -> None:
    """Losses and parameters of six steps; an honest count of all bytes in every planned step; and those of the host."""
    build, loss_of = LOOPS[loop]
    reference = trained(build(), loss_of)
    model, peaks = build(), list[int]()
    assert all_equal(reference, trained(model, loss_of, peaks, budget="50%", host="1GiB", time_limit_s=1.5))
    planned, step = coordinator().result, coordinator().planned
    assert planned is not None and step is not None
    assert fetches() > 2
    assert len(peaks) == STEPS - 2
    assert max(peaks) <= planned.budget_bytes + 64  # of losses that the loop keeps
    timeline = simulate(step[0], planned.plan)
    fetched = {step.value for step in planned.plan.steps if isinstance(step, Fetch)}
    assert timeline.host_peak_bytes == sum(step[0].values[v].size_bytes for v in fetched)


@pytest.mark.parametrize("loop", ["loss outside", "loss inside"])
def test_nothing_is_copied_where_everything_fits(loop: str) -> None:
    """Frozen weights are then on the device when a step begins and ends."""
    build, loss_of = LOOPS[loop]
    reference = trained(build(), loss_of)
    model = build()
    assert all_equal(reference, trained(model, loss_of, host="1GiB"))
    assert fetches() == 0
    assert sum(copy.nbytes for copy in RESIDENTS.of(frozen(model))) == sum(p.nbytes for p in frozen(model))


def test_evaluations_between_steps_read_the_weights_too() -> None:
    """Their graphs fetch them, or find them on the device; the next steps have the same bits."""
    build, loss_of = LOOPS["loss outside"]
    predictions: list[torch.Tensor] = []
    for options in ({}, {"budget": "50%", "host": "1GiB", "time_limit_s": 1.5}):
        model = build()
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
        run = torch.compile(model, backend="checkmate", options={"budget": "100%", **options})
        for _ in range(4):
            model.eval()
            with torch.no_grad():
                predictions.append(run(X))
            model.train()
            loss_of(run).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all_equal(predictions[:4], predictions[4:])


def test_weights_that_change_are_those_of_the_next_step() -> None:
    """If they are overwritten, also where a copy is on the device; and if they are made trainable."""
    losses: list[torch.Tensor] = []
    for options in ({}, {"host": "1GiB"}, {"host": "1GiB", "budget": "50%", "time_limit_s": 1.5}):
        model = network()
        trained(model, LOOPS["loss outside"][1], steps=3, **options)
        run = torch.compile(model, backend="checkmate", options={"budget": "100%", **options})
        changes: tuple[Callable[[], object], ...] = (
            lambda model=model: model.load_state_dict(network().state_dict()),
            lambda model=model: model[1].base.weight.requires_grad_(True),
            lambda: None,
        )
        for change in changes:
            change()
            torch.manual_seed(2)
            loss = LOSS(run(X), Y)
            loss.backward()
            losses += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            model.zero_grad()
    third = len(losses) // 3
    assert all_equal(losses[:third], losses[third : 2 * third])
    assert all_equal(losses[:third], losses[2 * third :])


def test_a_step_that_fails_leaves_the_weights_as_they_were() -> None:
    """The next step has the bits of a step that nothing preceded."""
    build, loss_of = LOOPS["loss inside"]
    reference = trained(build(), loss_of)
    model, failed = build(), list[bool]()

    def failing(run: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        if not failed:
            failed.append(True)
            with pytest.raises(IndexError, match="out of bounds"):
                run(X, Y + 5)
            torch.manual_seed(1)
        return loss_of(run)

    assert all_equal(reference, trained(model, failing, budget="50%", host="1GiB", time_limit_s=1.5))


def test_a_host_that_does_not_hold_all_weights_has_some_of_them() -> None:
    """The others are on the device throughout."""
    build, loss_of = LOOPS["loss outside"]
    reference = trained(build(), loss_of)
    model = build()
    assert all_equal(reference, trained(model, loss_of, budget="70%", host="40KiB", time_limit_s=1.5))
    step, result = coordinator().planned, coordinator().result
    assert step is not None and result is not None
    assert 0 < simulate(step[0], result.plan).host_peak_bytes <= 40 * 1024


def test_frozen_weights_on_the_device_are_told_about(caplog: pytest.LogCaptureFixture) -> None:
    """They are not fetched, and the user is told what to do; here the device is the meta device."""
    there = nn.Parameter(torch.empty(1024, device="meta"), requires_grad=False)
    here = nn.Parameter(torch.empty(8), requires_grad=False)
    assert frozen_weights([there, here], torch.device("meta"))[1] is here
    assert "4.00 KiB of frozen parameters are on meta already" in caplog.text and "on the CPU" in caplog.text


def test_a_weight_that_the_graph_returns_cannot_be_on_the_host_of_another_device() -> None:
    """No op may meet a tensor of the host; the error names what to do."""
    from checkmate.torch.graph.host_weights import read_on_device

    with FakeTensorMode() as mode:
        graph = torch.fx.Graph()
        weight = graph.placeholder("weight")
        weight.meta["val"] = mode.from_tensor(torch.empty(3))
        output = graph.output((weight,))
    with pytest.raises(OptionError, match="returns or overwrites it"):
        read_on_device({weight: torch.empty(3)}, output, torch.device("meta"))


def parts(tensors: Iterable[torch.Tensor]) -> set[str]:
    return {t.device.type for t in tensors}


def test_the_parts_of_a_weight_are_traced_with_it() -> None:
    """A view is traced with its base, and a quantized weight with its packed numbers; here the device is the meta device."""
    weight = nn.Parameter(torch.empty(4, 4)[:2], requires_grad=False)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, traced_on(torch.device("meta"), is_frozen):
        fake = mode.from_tensor(weight)
        assert parts([fake, mode.from_tensor(torch.empty(3))]) == {"meta", "cpu"}


class Adapter(nn.Module):
    """A frozen linear layer with a low-rank adapter, as in QLoRA."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def llama(*, peft: bool) -> nn.Module:
    """A small Llama with adapters on the projections of its attention."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=128, num_key_value_heads=2, use_cache=False, **sizes)
    )
    if peft:
        library = pytest.importorskip("peft", reason="needs peft")
        return library.get_peft_model(model, library.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = Adapter(layer.self_attn.q_proj), Adapter(layer.self_attn.v_proj)
    return model


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("peft", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_trainer_keeps_the_budget_and_its_losses(peft: bool, checkpointing: bool, tmp_path: Path) -> None:
    """Of Hugging Face, with our callback; the peak of a step is measured from its first forward to its last backward."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    from checkmate.torch.integrations import BudgetCallback
    from checkmate.torch.integrations.transformers import PeakCallback

    data = [{name: torch.arange(k, k + 32) for name in ("input_ids", "labels")} for k in range(12)]
    losses: list[list[float]] = []
    for options in ({"budget": "100%"}, {"budget": "50%", "host": "1GiB", "time_limit_s": 1.5}):
        torch._dynamo.reset()
        coordinator().forget_steps()
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=STEPS,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            gradient_checkpointing=checkpointing,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        peak = PeakCallback(step=5)

        class Forgetting(transformers.TrainerCallback):
            """The profiler does not see frees of what was there before: the step copies them anew."""

            def on_step_begin(self, *_: object, model: nn.Module, **rest: object) -> None:
                RESIDENTS.forget(frozen(model))

        trainer = transformers.Trainer(
            llama(peft=peft), arguments, train_dataset=data, callbacks=[BudgetCallback(**options), Forgetting(), peak]
        )
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1] and len(losses[0]) == STEPS
    result = coordinator().result
    assert result is not None and peak.measured_bytes is not None
    assert fetches() > 2
    assert peak.measured_bytes <= result.budget_bytes


def test_a_trainer_leaves_frozen_weights_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate moves a model to the device, and the callback what is trained; tensors without memory stand for those there."""
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    pytest.importorskip("transformers", reason="needs transformers")
    from checkmate.torch.integrations import BudgetCallback

    meta = torch.device("meta")
    monkeypatch.setattr(accelerate.Accelerator, "device", meta)
    for host, expected in (("1GiB", {"cpu"}), (None, {"meta"})):
        model, callback = Adapter(nn.Linear(4, 4).requires_grad_(False)), BudgetCallback("1MiB", host=host)
        arguments = types.SimpleNamespace(device=meta)
        callback.on_init_end(arguments, None, None, model=model)
        assert accelerate.Accelerator().prepare_model(model) is model
        callback.on_train_begin(arguments, None, None, model=model)
        assert {p.device.type for p in model.parameters() if p.requires_grad} == {"meta"}
        assert {p.device.type for p in model.parameters() if not p.requires_grad} == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bitsandbytes", "torchao"])
def test_quantized_weights_are_fetched_as_packed(kind: str) -> None:
    """Of a 4-bit weight of bitsandbytes its bytes, of an int8 weight of torchao the numbers and the scales."""
    library = pytest.importorskip(kind, reason=f"needs {kind}")

    def base(width: int) -> nn.Module:
        if kind == "bitsandbytes":
            return library.nn.Linear4bit(width, width, bias=False, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
        layer = nn.Linear(width, width, bias=False)
        library.quantization.quantize_(layer, library.quantization.Int8WeightOnlyConfig())
        return layer

    def loss_of(run: Callable[..., torch.Tensor]) -> torch.Tensor:
        losses.append(LOSS(run(X), Y))
        return losses[-1]

    losses: list[torch.Tensor] = []
    trained(network(base), loss_of)
    trained(network(base), loss_of, budget="40%", host="1GiB", time_limit_s=1.5)
    assert all_equal(losses[:STEPS], losses[STEPS:])
    planned = coordinator().planned
    assert planned is not None and fetches() > 2
    sizes = {value.size_bytes for value in planned[0].values if value.on_host}
    assert sizes == ({2048} if kind == "bitsandbytes" else {4096, 256})
