"""Training scripts of preference learning, in the shape of their sources; models are small and random."""

from __future__ import annotations

import copy
import tempfile

import torch
import torch.nn.functional as F
from torch import nn

from .huggingface import tiny_gpt2, trained
from .loop import STEPS, compiled, log, script, steps


@script("eric-mitchell/direct-preference-optimization", "reference network under no_grad, two forwards in one, RMSprop, clipping")
def dpo_by_hand() -> None:
    policy = tiny_gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    reference_model = copy.deepcopy(policy).eval().requires_grad_(False)
    policy, reference_model = compiled(policy), compiled(reference_model)
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=5e-7)

    def get_batch_logps(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        labels, logits = labels[:, 1:].clone(), logits[:, :-1, :]
        loss_mask = labels != -100
        labels[labels == -100] = 0
        per_token_logps = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
        return (per_token_logps * loss_mask).sum(-1)

    def concatenated_forward(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.cat([batch["chosen_input_ids"], batch["rejected_input_ids"]], dim=0)
        labels = torch.cat([batch["chosen_labels"], batch["rejected_labels"]], dim=0)
        all_logits = model(ids, attention_mask=torch.ones_like(ids)).logits.to(torch.float32)
        all_logps = get_batch_logps(all_logits, labels)
        half = batch["chosen_input_ids"].shape[0]
        return all_logps[:half], all_logps[half:]

    def make_batch() -> dict[str, torch.Tensor]:
        batch = {}
        for kind in ("chosen", "rejected"):
            ids = torch.randint(3, 384, (4, 96))
            labels = ids.clone()
            labels[:, :32] = -100
            batch |= {f"{kind}_input_ids": ids, f"{kind}_labels": labels}
        return batch

    policy.train()
    for batch in steps(make_batch() for _ in range(STEPS)):
        policy_chosen, policy_rejected = concatenated_forward(policy, batch)
        with torch.no_grad():
            reference_chosen, reference_rejected = concatenated_forward(reference_model, batch)
        logits = (policy_chosen - policy_rejected) - (reference_chosen - reference_rejected)
        losses = -F.logsigmoid(0.1 * logits)
        loss = losses.mean()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        log(loss)


def tiny_tokenizer() -> object:
    """A tokenizer of words `w0` to `w379`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<bos>", "<eos>", "<pad>", "<unk>", *(f"w{i}" for i in range(380))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


def sentence(length: int) -> str:
    """Random words."""
    return " ".join(f"w{i}" for i in torch.randint(380, (length,)).tolist())


@script("huggingface/trl: SFTTrainer", "TRL SFT: its default gradient checkpointing, batches padded to other lengths")
def trl_sft() -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{"text": sentence(96 if i < 8 or i % 8 else 80)} for i in range(4 * STEPS)])
    model = compiled(tiny_gpt2(), in_place=True)
    trained(
        lambda **named: SFTTrainer(model=model, train_dataset=data, processing_class=tiny_tokenizer(), **named),
        SFTConfig,
        bf16=False,
        per_device_train_batch_size=4,
        max_length=96,
    )


@script("huggingface/trl: DPOTrainer", "TRL DPO: reference model under no_grad, accumulation")
def trl_dpo() -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = [{"prompt": sentence(16), "chosen": " " + sentence(48), "rejected": " " + sentence(48)} for _ in range(4 * STEPS)]
    model, reference = compiled(tiny_gpt2(), in_place=True), compiled(tiny_gpt2(), in_place=True)
    trained(
        lambda **named: DPOTrainer(
            model=model, ref_model=reference, train_dataset=Dataset.from_list(rows), processing_class=tiny_tokenizer(), **named
        ),
        DPOConfig,
        bf16=False,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_length=64,
    )


@script("huggingface/trl: GRPOTrainer", "TRL GRPO: generation in each step, several completions, a reward function")
def trl_grpo() -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **_: object) -> list[float]:
        return [float(len(set(completion.split()))) for completion in completions]

    rows = [{"prompt": sentence(16)} for _ in range(4 * STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        tiny_gpt2().save_pretrained(folder)
        model = compiled(AutoModelForCausalLM.from_pretrained(folder), in_place=True)
        trained(
            lambda **named: GRPOTrainer(
                model=model,
                reward_funcs=reward,
                train_dataset=Dataset.from_list(rows),
                processing_class=tiny_tokenizer(),
                **named,
            ),
            GRPOConfig,
            bf16=False,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=32,
            beta=0.04,
        )
