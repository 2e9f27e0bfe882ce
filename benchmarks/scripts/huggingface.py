"""Training scripts of transformers, accelerate and PEFT, in the shape of their sources; models are small and random."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
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
