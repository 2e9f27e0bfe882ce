"""TRL's trainers within a budget: against a stub of the shape of TRL 1.16, and, where TRL is installed, its own trainers."""

from __future__ import annotations

import functools
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from checkmate.core.errors import MissingExtraError
from checkmate.torch import measure_peak
from checkmate.torch._compat.profiler import memory_trace
from checkmate.torch.integrations import train_within
from checkmate.torch.integrations.transformers import _resident_bytes

pytestmark = pytest.mark.filterwarnings("ignore")  # what TRL and Dynamo warn of is not ours
VOCABULARY = 4096
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embedding(ids)))


def with_fused_head(model: Model, utils: Any, temperature: float, softcap: float | None) -> Model:
    """As ``add_fused_lm_head`` in ``trl/trainer/utils.py``: the head is a method of the instance, and looks its kernel up."""
    original = model.forward

    @functools.wraps(original)
    def forward(ids: torch.Tensor, labels: Any = None, fused_lm_head: bool = False) -> Any:
        if not fused_lm_head:
            return original(ids)
        hidden = torch.tanh(model.embedding(ids))
        assert not utils._use_triton(hidden.device)
        rows, targets = hidden.reshape(-1, hidden.size(-1)), labels.reshape(-1)
        weight, bias = model.head.weight, model.head.bias
        return utils._ChunkedLogProbFunction.apply(rows, weight, bias, targets, temperature, 512, softcap, 0.5, OUTPUTS)

    model.forward = forward
    return model


def _by_formulas(
    model: Model, ids: torch.Tensor, labels: torch.Tensor, temperature: float, softcap: float | None
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    """The values of `OUTPUTS`, and the gradients of a loss of the first two; logits are multiplied by 0.5."""
    logits = 0.5 * model(ids).flatten(0, 1)
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    logs = logits.log_softmax(-1)
    picked, entropy = logs.gather(-1, labels.reshape(-1, 1)).squeeze(-1), -(logs.exp() * logs).sum(-1)
    values = [picked, entropy, (2 * logs).logsumexp(-1), logits.mean(-1), logits.argmax(-1) == labels.flatten()]
    gradients = torch.autograd.grad((picked + 0.1 * entropy).sum(), list(model.parameters()))
    return [value.detach() for value in values], gradients


def stub_of_trainer(model: Any, **more: Any) -> Any:
    args, accelerator = SimpleNamespace(gradient_checkpointing=False), SimpleNamespace(unwrap_model=lambda m: m)
    return SimpleNamespace(model=model, args=args, accelerator=accelerator, **more)


@pytest.mark.parametrize(("respected", "hooks"), [(False, 1), (True, 3)])
def test_generations_add_no_hooks(monkeypatch: pytest.MonkeyPatch, respected: bool, hooks: int) -> None:
    """TRL turns checkpointing off and on around each; transformers adds a hook each time, and Dynamo would compile again."""
    monkeypatch.setitem(sys.modules, "trl.trainer.utils", SimpleNamespace(_use_triton=None, _ChunkedLogProbFunction=None))
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 9}
    config = transformers.LlamaConfig(**sizes)
    trainer = stub_of_trainer(transformers.LlamaForCausalLM(config))
    trainer.args.gradient_checkpointing = True
    trainer.model.gradient_checkpointing_enable()
    train_within(trainer, "1GiB", **{"checkpoints": "respected"} if respected else {})
    for _ in range(2):  # `_unwrap_model_for_generation` in trl/models/utils.py
        if trainer.model.is_gradient_checkpointing:
            trainer.model.gradient_checkpointing_disable()
            trainer.model.gradient_checkpointing_enable()
    assert trainer.args.gradient_checkpointing == trainer.model.is_gradient_checkpointing == respected
    assert len(trainer.model.get_input_embeddings()._forward_hooks) == hooks


@pytest.mark.parametrize(("temperature", "softcap"), [pytest.param(1.0, None, marks=pytest.mark.slow), (0.5, 3.0)])
def test_a_forward_that_returns_log_probabilities_runs_in_pieces(
    monkeypatch: pytest.MonkeyPatch, temperature: float, softcap: float | None
) -> None:
    """Values and gradients are those of the formulas, the logits never exist whole, and generation is not compiled."""
    utils = SimpleNamespace(_use_triton=lambda device: pytest.fail("rows by labels"), _ChunkedLogProbFunction=None)
    monkeypatch.setitem(sys.modules, "trl.trainer.utils", utils)
    torch.manual_seed(0)
    model, reference = (with_fused_head(Model(), utils, temperature, softcap) for _ in range(2))
    ids, labels = torch.randint(VOCABULARY, (2, 8, 128))
    expected, gradients = _by_formulas(model, ids, labels, temperature, softcap)
    trainer = stub_of_trainer(model, ref_model=reference)
    train_within(trainer, "6MiB", time_limit_s=1)
    for value, wanted in zip(model(ids, labels, fused_lm_head=True), expected, strict=True):
        torch.testing.assert_close(value, wanted)

    def step() -> None:
        log_probs, entropy, *_ = model(ids, labels, fused_lm_head=True)
        with torch.no_grad():
            reference(ids, labels, fused_lm_head=True)
        model.zero_grad()
        (log_probs + 0.1 * entropy).sum().backward()

    step()
    assert measure_peak(step) < 4 * ids.numel() * VOCABULARY / 2
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)
    assert torch.equal(model(ids), model.head(torch.tanh(model.embedding(ids))))
    assert utils._ChunkedLogProbFunction is None


def test_without_trl_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for every other extra."""
    monkeypatch.setitem(sys.modules, "trl.trainer.utils", None)
    with pytest.raises(MissingExtraError, match="pip install trl"):
        train_within(SimpleNamespace(), "1GiB")


TOKENS = 32_000


def _trainer(kind: str, folder: str) -> Any:
    """A trainer of TRL with a tiny random model; ``adapters`` is SFT with LoRA."""
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*special.values(), *map(str, range(TOKENS - 3))])}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOKENS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    draw = random.Random(0)
    text = lambda n: " ".join(str(draw.randrange(3000)) for _ in range(n))  # noqa: E731
    settings: dict[str, Any] = {
        "output_dir": folder, "report_to": [], "max_steps": 3, "logging_steps": 1, "use_cpu": True, "save_strategy": "no",
        "bf16": False, "learning_rate": 1e-3, "per_device_train_batch_size": 4,
    }  # fmt: skip
    given: dict[str, Any] = {
        "model": LlamaForCausalLM.from_pretrained(folder),
        "processing_class": PreTrainedTokenizerFast(tokenizer_object=words, **special),
    }
    if kind == "dpo":
        rows = [{"prompt": text(128), "chosen": text(127), "rejected": text(127)} for _ in range(8)]
        settings["per_device_train_batch_size"] = 2
        return trl.DPOTrainer(args=trl.DPOConfig(**settings), train_dataset=Dataset.from_list(rows), **given)
    if kind == "grpo":
        settings |= {
            "num_generations": 4,
            "max_completion_length": 128,
            "generation_kwargs": {"min_new_tokens": 128},
            "beta": 0.1,
            "gradient_checkpointing": True,
        }
        reward = lambda completions, **_: [float(len(set(text.split())) % 7) for text in completions]  # noqa: E731
        data = Dataset.from_list([{"prompt": text(128)} for _ in range(8)])
        return trl.GRPOTrainer(reward_funcs=reward, args=trl.GRPOConfig(**settings), train_dataset=data, **given)
    if kind == "adapters":
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(r=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    data = Dataset.from_list([{"text": text(256)} for _ in range(16)])
    return trl.SFTTrainer(args=trl.SFTConfig(max_length=256, **settings), train_dataset=data, **given)


def _trained(trainer: Any) -> tuple[torch.Tensor, int]:
    """The losses of three steps, and the peak of the third with all that is held."""
    peaks: list[int] = []
    step = trainer.training_step

    def measured(*args: Any, **kwargs: Any) -> Any:
        with memory_trace() as trace:
            held = _resident_bytes(trainer.model, trainer.optimizer)
            loss = step(*args, **kwargs)
        peaks.append(held + trace.peak())
        return loss

    trainer.training_step = measured
    trainer.train()
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]), peaks[2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "adapters", "dpo", "grpo"])
def test_trainers_of_trl(kind: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line more: a third of the memory at most, and the losses up to rounding."""
    pytest.importorskip("trl", reason="needs trl: pip install trl peft")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    losses, peak = _trained(_trainer(kind, str(tmp_path)))
    trainer = _trainer(kind, str(tmp_path))
    train_within(trainer, "110MB", time_limit_s=5)
    planned_losses, planned_peak = _trained(trainer)
    torch.testing.assert_close(planned_losses, losses, rtol=1e-5, atol=1e-5)
    assert planned_peak <= min(0.1 * peak, 110e6)
