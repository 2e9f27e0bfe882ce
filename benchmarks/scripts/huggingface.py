"""Training scripts of transformers, accelerate, PEFT and TRL, in the shape of their sources; models are small and random."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .loop import STEPS, compiled, log, script, steps


def tiny_gpt2(**changed: float) -> nn.Module:
    """A GPT-2 of three layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {"vocab_size": 384, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**{**settings, "eos_token_id": 1, "pad_token_id": 2, **changed}))


def trained(make: Callable[..., Any], config: Callable[..., Any], **settings: Any) -> Any:
    """Make a trainer of transformers or TRL, train, and return it."""
    from transformers import TrainerCallback

    class Progress(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            next(marks)

        def on_log(self, _arguments: object, _state: object, _control: object, logs: dict[str, float], **_: object) -> None:
            log(*(logs[key] for key in ("loss", "eval_loss") if key in logs))

    marks = iter(steps(range(STEPS)))
    settings |= {"max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
    with tempfile.TemporaryDirectory() as folder:
        arguments = config(output_dir=folder, use_cpu=True, disable_tqdm=True, seed=0, **settings)
        trainer = make(args=arguments, callbacks=[Progress()])
        trainer.train()
    return trainer


@script("huggingface/transformers: a LLaMA in a plain loop", "gradient_checkpointing_enable, clipping")
def llama_checkpointing() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

    config = LlamaConfig(
        vocab_size=512, hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, attention_dropout=0.1
    )
    model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    model = compiled(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, STEPS)
    model.train()
    for input_ids in steps(torch.randint(512, (8, 128)) for _ in range(STEPS)):
        outputs = model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), labels=input_ids)
        loss = outputs.loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        log(loss)


@script("huggingface/transformers: run_glue_no_trainer", "accelerate, accumulation, batches padded to other lengths, evaluation")
def glue_accelerate() -> None:
    from accelerate import Accelerator
    from transformers import BertConfig, BertForSequenceClassification, get_scheduler

    config = BertConfig(
        vocab_size=400, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_labels=2
    )
    model = BertForSequenceClassification(config)

    def make_batch(length: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 400, (16, length))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(2, (16,))}

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    lr_scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=STEPS)
    model, optimizer, lr_scheduler = accelerator.prepare(model, optimizer, lr_scheduler)
    model = compiled(model, in_place=True)
    model.train()
    for batch in steps(make_batch(n) for n in (96, 96, 80, 80, 96, 96)):
        with accelerator.accumulate(model):
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            log(loss)
    model.eval()
    with torch.no_grad():
        log(model(**make_batch(96)).loss)


@script("huggingface/transformers: run_clm", "transformers.Trainer, accumulation, evaluation at the end")
def clm_trainer() -> None:
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 384, (8 * 2 * STEPS, 96))]
    model = compiled(tiny_gpt2(), in_place=True)
    trainer = trained(
        lambda **named: Trainer(model=model, train_dataset=data, eval_dataset=data[:16], **named),
        TrainingArguments,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
    )
    trainer.evaluate()


@script("huggingface/transformers: T5 for summarization", "Adafactor, labels padded to other lengths, clipping")
def t5_summarization() -> None:
    from transformers import T5Config, T5ForConditionalGeneration
    from transformers.optimization import Adafactor

    config = T5Config(
        vocab_size=400, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_decoder_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = compiled(T5ForConditionalGeneration(config))
    optimizer = Adafactor(model.parameters(), lr=1e-3, scale_parameter=False, relative_step=False)
    model.train()
    for length in steps((48, 48, 32, 48, 32, 48)):
        ids, labels = torch.randint(3, 400, (8, 2 * length)), torch.randint(3, 400, (8, length))
        labels[:, -4:] = -100
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        log(loss)


@script(
    "huggingface/peft: LoRA in a plain loop", "PEFT: frozen weights and adapters, gradient_checkpointing_enable, accumulation"
)
def peft_lora() -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny_gpt2()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    config = LoraConfig(
        task_type="CAUSAL_LM", r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["c_attn"], fan_in_fan_out=True
    )
    model = compiled(get_peft_model(model, config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for input_ids in steps(torch.randint(3, 384, (16, 96)) for _ in range(STEPS)):
        for part in input_ids.chunk(2):
            loss = model(input_ids=part, attention_mask=torch.ones_like(part), labels=part, use_cache=False).loss
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        log(loss)


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
