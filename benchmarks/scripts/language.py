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
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(dropout))

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


@script("karpathy/minGPT", "trainer with a while loop, gradients set to None before the backward, clipping")
def mingpt() -> None:
    model = GPT(vocab=64, n_layer=3, n_embd=96)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95))
    model = compiled(model)
    model.train()
    batches = iter(steps((torch.randint(64, (16, 64)), torch.randint(64, (16, 64))) for _ in range(STEPS)))
    iter_num = 0
    while iter_num < STEPS:
        x, y = next(batches)
        _, loss = model(x, y)
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        log(loss)
        iter_num += 1


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


@script("pytorch/examples: snli", "bidirectional LSTM, batches of other lengths, accuracy in the loop")
def snli() -> None:
    class SNLIClassifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.projection = nn.Embedding(500, 64), nn.Linear(64, 64)
            self.encoder = nn.LSTM(64, 48, 1, bidirectional=True)
            self.out = nn.Sequential(
                nn.Linear(2 * 96, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3)
            )

        def encode(self, sentence: torch.Tensor) -> torch.Tensor:
            embed = F.relu(self.projection(self.embed(sentence).detach()))
            _, (ht, _) = self.encoder(embed)
            return ht[-2:].transpose(0, 1).contiguous().view(sentence.size(1), -1)

        def forward(self, premise: torch.Tensor, hypothesis: torch.Tensor) -> torch.Tensor:
            return self.out(torch.cat([self.encode(premise), self.encode(hypothesis)], 1))

    model = compiled(SNLIClassifier())
    criterion, opt = nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=0.001)
    batches = (
        (torch.randint(500, (n, 96)), torch.randint(500, (n - 4, 96)), torch.randint(3, (96,))) for n in (28, 24, 28, 20, 24, 28)
    )
    for premise, hypothesis, label in steps(batches):
        model.train()
        opt.zero_grad()
        answer = model(premise, hypothesis)
        loss = criterion(answer, label)
        loss.backward()
        opt.step()
        log(loss, (answer.argmax(1) == label).float().mean())


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


@script("huggingface/transformers: run_glue_no_trainer", "accelerate, accumulation, batches padded to other lengths, evaluation")
def glue_accelerate() -> None:
    from accelerate import Accelerator
    from transformers import BertConfig, BertForSequenceClassification, get_scheduler

    config = BertConfig(
        vocab_size=400, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_labels=2
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
    import tempfile

    from transformers import Trainer, TrainerCallback, TrainingArguments

    from .alignment import tiny_gpt2

    class Progress(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            next(marks)

        def on_log(self, _arguments: object, _state: object, _control: object, logs: dict[str, float], **_: object) -> None:
            log(*(logs[key] for key in ("loss", "eval_loss") if key in logs))

    marks = iter(steps(range(STEPS)))
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 384, (8 * 2 * STEPS, 96))]
    model = compiled(tiny_gpt2(), in_place=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_steps=STEPS,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            seed=0,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:16], callbacks=[Progress()])
        trainer.train()
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
