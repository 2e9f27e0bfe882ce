"""Training scripts on text and speech, in the shape of their sources; models are small and random."""

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
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A GPT that returns logits and, given targets, the loss."""

    def __init__(self, vocab: int = 256, block: int = 64, n_layer: int = 2, n_embd: int = 64, dropout: float = 0.1) -> None:
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


class RNNModel(nn.Module):
    """An LSTM or GRU language model."""

    def __init__(self, kind: str, ntoken: int, ninp: int, nhid: int, nlayers: int, dropout: float) -> None:
        super().__init__()
        self.ntoken, self.nhid, self.nlayers = ntoken, nhid, nlayers
        self.drop, self.encoder = nn.Dropout(dropout), nn.Embedding(ntoken, ninp)
        self.rnn = getattr(nn, kind)(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, tokens: torch.Tensor, hidden: object) -> tuple[torch.Tensor, object]:
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.ntoken)
        return F.log_softmax(decoded, dim=1), hidden


@script(
    "pytorch/examples: word_language_model", "LSTM whose state goes on from step to step, clipping, update by hand, evaluation"
)
def word_language_model() -> None:
    bptt, batch_size, ntokens = 24, 32, 800
    source = torch.randint(ntokens, (bptt * STEPS + 1, batch_size))
    model = compiled(RNNModel("LSTM", ntokens, 64, 64, 2, 0.2))
    criterion = nn.NLLLoss()

    def repackage_hidden(h: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(v.detach() for v in h)

    model.train()
    hidden = (torch.zeros(2, batch_size, 64), torch.zeros(2, batch_size, 64))
    for i in steps(range(0, source.size(0) - 1, bptt)):
        data, targets = source[i : i + bptt], source[i + 1 : i + 1 + bptt].view(-1)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-20.0)
        log(loss)
    model.eval()
    with torch.no_grad():
        output, hidden = model(source[:bptt], repackage_hidden(hidden))
        log(criterion(output, source[1 : bptt + 1].view(-1)))


@script("lucidrains/x-transformers: enwik8", "torch.utils.checkpoint around each block, accumulation, validation in between")
def checkpointed_blocks() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(GPT):
        def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
            x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.size(1))))
            for block in self.h:
                x = checkpoint(block, x, use_reentrant=False)
            logits = self.lm_head(self.ln_f(x))
            return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    model = compiled(Checkpointed(n_embd=96))
    optim = torch.optim.Adam(model.parameters(), lr=1e-4)
    data = torch.randint(256, (2 * STEPS, 16, 65))
    for i in steps(range(STEPS)):
        model.train()
        for part in data[2 * i : 2 * i + 2]:
            _, loss = model(part[:, :-1], part[:, 1:].contiguous())
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optim.step()
        optim.zero_grad()
        log(loss)
        if i % 3 == 2:
            model.eval()
            with torch.no_grad():
                log(model(data[0][:, :-1], data[0][:, 1:].contiguous())[1])


@script("wolfecameron/nanoMoE", "mixture of experts: top-k routing, auxiliary losses, capacity")
def mixture_of_experts() -> None:
    class MoE(nn.Module):
        def __init__(self, dim: int, experts: int, top_k: int = 2) -> None:
            super().__init__()
            self.router, self.top_k, self.experts = nn.Linear(dim, experts, bias=False), top_k, experts
            self.c_fc = nn.Parameter(torch.randn(experts, dim, 4 * dim) * 0.02)
            self.c_proj = nn.Parameter(torch.randn(experts, 4 * dim, dim) * 0.02)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            tokens = x.reshape(-1, x.size(-1))
            logits = self.router(tokens)
            z_loss = torch.logsumexp(logits, dim=-1).square().mean()
            top_logits, top_indices = logits.topk(self.top_k, dim=-1)
            probs = torch.full_like(logits, float("-inf")).scatter_(-1, top_indices, top_logits).softmax(dim=-1)
            capacity = 2 * self.top_k * tokens.size(0) // self.experts
            mask = F.one_hot(top_indices, self.experts).sum(1)
            rank = mask.cumsum(0) * mask - 1
            kept = F.one_hot(rank.clamp(0, capacity - 1), capacity) * ((rank >= 0) & (rank < capacity)).unsqueeze(-1)
            batches = torch.einsum("tec,td->ecd", kept.float(), tokens)
            out = torch.bmm(F.gelu(torch.bmm(batches, self.c_fc)), self.c_proj)
            y = torch.einsum("tec,ecd->td", kept * probs.unsqueeze(-1), out)
            balance = self.experts * (mask.float().mean(0) * logits.softmax(-1).mean(0)).sum()
            return y.view_as(x), 0.01 * balance + 0.001 * z_loss

    class Model(nn.Module):
        def __init__(self, dim: int = 48) -> None:
            super().__init__()
            self.wte, self.head = nn.Embedding(256, dim), nn.Linear(dim, 256)
            self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(4)])
            self.attn = nn.ModuleList([CausalSelfAttention(dim, 4, 0.0) for _ in range(2)])
            self.moe = nn.ModuleList([MoE(dim, 4) for _ in range(2)])

        def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x, aux = self.wte(idx), torch.zeros(())
            for i in range(2):
                x = x + self.attn[i](self.norms[2 * i](x))
                y, loss = self.moe[i](self.norms[2 * i + 1](x))
                x, aux = x + y, aux + loss
            return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten()) + aux

    model = compiled(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    for x, y in steps((torch.randint(256, (8, 64)), torch.randint(256, (8, 64))) for _ in range(STEPS)):
        loss = model(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        log(loss)


@script("PyTorch tutorial: seq2seq translation", "encoder and decoder with attention, teacher forcing at random, two optimizers")
def seq2seq() -> None:
    hidden_size, vocab, length = 64, 300, 10

    class EncoderRNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.gru = nn.Embedding(vocab, hidden_size), nn.GRU(hidden_size, hidden_size, batch_first=True)
            self.dropout = nn.Dropout(0.1)

        def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.gru(self.dropout(self.embedding(tokens)))

    class AttnDecoderRNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocab, hidden_size)
            self.Wa, self.Ua, self.Va = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1)
            self.gru, self.out = nn.GRU(2 * hidden_size, hidden_size, batch_first=True), nn.Linear(hidden_size, vocab)
            self.dropout = nn.Dropout(0.1)

        def forward(self, encoder_outputs: torch.Tensor, hidden: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
            decoder_input = torch.zeros(encoder_outputs.size(0), 1, dtype=torch.long)
            decoder_outputs = []
            for i in range(length):
                embedded = self.dropout(self.embedding(decoder_input))
                scores = self.Va(torch.tanh(self.Wa(hidden.permute(1, 0, 2)) + self.Ua(encoder_outputs)))
                context = torch.bmm(F.softmax(scores.squeeze(2).unsqueeze(1), dim=-1), encoder_outputs)
                output, hidden = self.gru(torch.cat((embedded, context), dim=2), hidden)
                decoded = self.out(output)
                decoder_outputs.append(decoded)
                forced = target is not None
                decoder_input = target[:, i].unsqueeze(1) if forced else decoded.topk(1)[1].squeeze(-1).detach()
            return F.log_softmax(torch.cat(decoder_outputs, dim=1), dim=-1)

    encoder, decoder = compiled(EncoderRNN()), compiled(AttnDecoderRNN())
    encoder_optimizer = torch.optim.Adam(encoder.parameters(), lr=0.001)
    decoder_optimizer = torch.optim.Adam(decoder.parameters(), lr=0.001)
    criterion = nn.NLLLoss()
    batches = ((torch.randint(vocab, (96, length)), torch.randint(vocab, (96, length))) for _ in range(STEPS))
    for i, (input_tensor, target_tensor) in enumerate(steps(batches)):
        encoder_optimizer.zero_grad()
        decoder_optimizer.zero_grad()
        encoder_outputs, encoder_hidden = encoder(input_tensor)
        forced = target_tensor if i % 3 != 1 else None
        decoder_outputs = decoder(encoder_outputs, encoder_hidden, forced)
        loss = criterion(decoder_outputs.view(-1, vocab), target_tensor.view(-1))
        loss.backward()
        encoder_optimizer.step()
        decoder_optimizer.step()
        log(loss)


@script("SeanNaren/deepspeech.pytorch", "convolutions and GRU, CTC loss on lengths, batches of other lengths, SGD with Nesterov")
def speech_ctc() -> None:
    class DeepSpeech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(1, 16, (11, 11), (2, 2), (5, 5)), nn.BatchNorm2d(16), nn.Hardtanh(0, 20, inplace=True)
            )
            self.rnn = nn.GRU(16 * 32, 64, 1, bidirectional=True)
            self.fc = nn.Linear(128, 29, bias=False)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.conv(x)
            x = x.view(x.size(0), -1, x.size(3)).permute(2, 0, 1)
            x, _ = self.rnn(x.contiguous())
            return self.fc(x).log_softmax(-1), (lengths + 1) // 2

    model = compiled(DeepSpeech())
    criterion = nn.CTCLoss(reduction="sum", zero_infinity=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True, weight_decay=1e-5)
    model.train()
    for frames in steps((160, 160, 128, 160, 128, 160)):
        inputs, input_lengths = torch.rand(8, 1, 64, frames), torch.full((8,), frames)
        targets, target_lengths = torch.randint(1, 29, (8, 10)), torch.randint(5, 10, (8,))
        out, output_lengths = model(inputs, input_lengths)
        loss = criterion(out, targets, output_lengths, target_lengths) / inputs.size(0)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 400)
        optimizer.step()
        log(loss)
