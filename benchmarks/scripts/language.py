"""Training scripts of language models, in the shape of their sources; models are small, weights and data random."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from .loop import STEPS, compiled, log, script, steps


class CausalSelfAttention(nn.Module):
    """Attention over the tokens before."""

    def __init__(self, n_embd: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head, self.dropout = n_head, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class Block(nn.Module):
    """A block of GPT."""

    def __init__(self, n_embd: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A GPT that returns logits and, given targets, the loss."""

    def __init__(self, vocab: int = 256, block: int = 64, n_layer: int = 4, n_embd: int = 64, dropout: float = 0.1) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(vocab, n_embd), nn.Embedding(block, n_embd), nn.Dropout(dropout)
        self.h = nn.ModuleList([Block(n_embd, 4, dropout) for _ in range(n_layer)])
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.size(1))))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


@script("karpathy/nanoGPT", "accumulation, GradScaler, clipping, two groups of AdamW, evaluation in between")
def nanogpt() -> None:
    batch_size, block_size, gradient_accumulation_steps = 16, 64, 2
    data = torch.randint(256, (5000,))

    def get_batch(_split: str) -> tuple[torch.Tensor, torch.Tensor]:
        ix = torch.randint(len(data) - block_size, (batch_size,))
        x = torch.stack([data[i : i + block_size] for i in ix])
        return x, torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])

    @torch.no_grad()
    def estimate_loss() -> dict[str, torch.Tensor]:
        out = {}
        model.eval()
        for split in ("train", "val"):
            losses = torch.zeros(2)
            for k in range(2):
                X, Y = get_batch(split)
                _, loss = model(X, Y)
                losses[k] = loss.item()
            out[split] = losses.mean()
        model.train()
        return out

    def get_lr(it: int) -> float:
        return 6e-5 + 0.5 * (1.0 + math.cos(math.pi * it / STEPS)) * (6e-4 - 6e-5)

    raw_model = GPT(block=block_size)
    params = [p for p in raw_model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model = compiled(raw_model)
    X, Y = get_batch("train")
    for iter_num in steps(range(STEPS)):
        for param_group in optimizer.param_groups:
            param_group["lr"] = get_lr(iter_num)
        if iter_num % 3 == 0:
            log(*estimate_loss().values())
        for _ in range(gradient_accumulation_steps):
            with nullcontext():
                _, loss = model(X, Y)
                loss = loss / gradient_accumulation_steps
            X, Y = get_batch("train")
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        log(loss * gradient_accumulation_steps)


@script("huggingface/transformers: a LLaMA in a plain loop", "gradient_checkpointing_enable, clipping")
def llama_checkpointing() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

    config = LlamaConfig(
        vocab_size=512, hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, attention_dropout=0.1
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
