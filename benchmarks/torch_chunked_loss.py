"""A large vocabulary: chunks that the planner chooses, beside every way that people chunk a loss by hand or by option.

A Llama with a vocabulary of 128,256 on 4,096 tokens (transformers' model, random weights, width 256). In the suite `step` the
step is forward, loss and backward, and the gradients are kept; in `whole_step` SGD updates the parameters in it. Every row has a
fresh process on one thread, in which a way and ours at the peak of that way take turns, and the fastest of the rounds counts, in
time of the process. The ways: plain PyTorch; head and loss chunk by chunk, as they are and with `torch.utils.checkpoint` around
each chunk; an `autograd.Function` that computes the gradients in the forward, as Liger Kernel's does; `F.linear_cross_entropy`;
Inductor, and its `auto_chunker`; `torch.utils.checkpoint` on layers, with and without chunks. Other rows have ours beside our own
step that keeps everything.

The promises checked: our measured peaks keep their budgets; with chunks the smallest is a fifth of that without; at half of the
peak of keeping everything the step takes at most 10 % longer; at no other way's peak is ours more than 2 % slower, and at most of
them it is faster; each gradient is as close to float64 as plain PyTorch's (5 % is left). Exit status 1 if one breaks.

    python benchmarks/torch_chunked_loss.py [--suites step] [--rows eager inductor] [--time-limit 30] [--rounds 3] [--quick]
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))
import pairs
from fresh import mib
from pairs import Ask, Case, Suite, Way

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""The mean cross entropy of hidden states (tokens, width), a head's weight (vocabulary, width) and targets."""

IGNORED = -100
FULL = {"vocabulary": 128_256, "sequences": 4, "length": 1024, "width": 256, "layers": 4, "heads": 8}
QUICK = {"vocabulary": 512, "sequences": 2, "length": 64, "width": 32, "layers": 1, "heads": 2}
LEAST_GAIN, MOST_TIME, MOST_ERROR = 5.0, 1.10, 1.05


def main() -> int:
    """Run the benchmark, or one child of it."""
    return pairs.main(__file__, str(__doc__), suites, sizes=sizes, table=table, verdict=verdict)


def sizes(quick: bool) -> dict[str, Any]:
    """Sizes of the model."""
    return QUICK if quick else FULL


def plain(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """All logits at once."""
    return F.cross_entropy(x @ weight.t(), targets)


def by_hand(chunks: int, recomputed: bool) -> Loss:
    """Head and loss chunk by chunk, as in torchtune; where ``recomputed``, the backward computes a chunk's logits again."""

    def summed(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x @ weight.t(), targets, reduction="sum")

    def loss(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        part = functools.partial(checkpoint, summed, use_reentrant=False) if recomputed else summed
        parts = zip(x.tensor_split(chunks), targets.tensor_split(chunks), strict=True)
        return sum(part(xs, weight, ys) for xs, ys in parts) / (targets != IGNORED).sum()

    return loss


class GradientAhead(torch.autograd.Function):
    """The loss whose forward computes the gradients too, chunk by chunk, as in Liger Kernel; the backward only scales them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunks: int) -> torch.Tensor:
        count, total = (targets != IGNORED).sum(), x.new_zeros(())
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight)
        parts = zip(x.tensor_split(chunks), targets.tensor_split(chunks), dx.tensor_split(chunks), strict=True)
        for xs, ys, dxs in parts:
            logs = torch.log_softmax(xs @ weight.t(), 1)
            total += F.nll_loss(logs, ys, reduction="sum")
            gradient = logs.exp_()
            gradient[torch.arange(len(ys)), ys.clamp(min=0)] -= 1
            gradient *= (ys != IGNORED).to(x.dtype).unsqueeze(1) / count
            torch.mm(gradient, weight, out=dxs)
            dweight.addmm_(gradient.t(), xs)
        ctx.save_for_backward(dx, dweight)
        return total / count

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        dx, dweight = ctx.saved_tensors
        return dx.mul_(tangent), dweight.mul_(tangent), None, None


def ahead(chunks: int) -> Loss:
    """`GradientAhead` in a number of chunks."""
    return lambda x, weight, targets: GradientAhead.apply(x, weight, targets, chunks)


def built_in(**options: Any) -> Loss:
    """torch's own."""

    def loss(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.linear_cross_entropy(x, weight, targets, options=torch.nn.LinearCrossEntropyOptions(**options))

    return loss


class Causal(torch.nn.Module):
    """A language model of transformers that returns its loss; how it is computed from the hidden states can be replaced."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self.loss: Loss = plain

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.net.model(input_ids=ids, use_cache=False).last_hidden_state
        targets = F.pad(ids[:, 1:], (0, 1), value=IGNORED)
        return self.loss(hidden.flatten(0, 1), self.net.lm_head.weight, targets.flatten())


def model_of(size: dict[str, int], optimizer: bool, dtype: torch.dtype) -> Case:
    """The model, the same each time."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # Under "sdpa" transformers makes an explicit mask where it is traced, and none in eager mode: other programs with other bits.
    AttentionInterface.register("unmasked_sdpa", sdpa_attention_forward)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size["vocabulary"], hidden_size=size["width"], num_hidden_layers=size["layers"], use_cache=False,
        num_attention_heads=size["heads"], num_key_value_heads=size["heads"], intermediate_size=size["width"] * 8 // 3,
        max_position_embeddings=size["length"], attn_implementation="unmasked_sdpa",
    )  # fmt: skip
    model = Causal(LlamaForCausalLM(config)).train().to(dtype)
    ids = torch.randint(0, size["vocabulary"], (size["sequences"], size["length"]))
    return Case(model, {"ids": ids}, torch.optim.SGD(model.parameters(), 0.01) if optimizer else None)


def way(loss: Loss = plain, *, layers: bool = False, inductor: dict[str, Any] | None = None) -> Way:
    """A way to run a step.

    Args:
        loss: How the loss is computed.
        layers: Whether layers are checkpointed.
        inductor: Options of Inductor, if that compiles it.
    """

    def prepare(case: Case) -> Callable[[], torch.Tensor]:
        case.model.loss = loss
        for layer in case.model.net.model.layers if layers else ():
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        run = case.model if inductor is None else torch.compile(case.model, dynamic=False, options=inductor)
        return functools.partial(step, case, run)

    return Way(prepare, compiled=inductor is not None)


def step(case: Case, run: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Forward, backward and, with an optimizer, the update."""
    loss = run(**case.batch)
    loss.backward()
    if case.optimizer is not None:
        case.optimizer.step()
        case.optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def whole_loss_again(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Head and loss under one checkpoint."""
    return checkpoint(plain, x, weight, targets, use_reentrant=False)


def ways(tokens: int) -> Iterator[tuple[str, Way]]:
    """All ways by name."""
    yield "eager", way()
    yield "by hand, 8 chunks", way(by_hand(8, recomputed=False))
    for chunks in (2, 8, 32):
        yield f"by hand, {chunks} chunks, checkpoint", way(by_hand(chunks, recomputed=True))
    for chunks in (8, 32, 256):  # Liger Kernel chooses 256 for these sizes
        yield f"gradient ahead, {chunks} chunks", way(ahead(chunks))
    yield "F.linear_cross_entropy", way(built_in())
    for chunks in (8, 64):
        rows = tokens // chunks
        yield f"F.linear_cross_entropy, {chunks} chunks", way(built_in(batch_chunk_size=rows))
    yield "checkpoint per layer and loss", way(whole_loss_again, layers=True)
    yield "checkpoint per layer, by hand, 32 chunks, checkpoint", way(by_hand(32, recomputed=True), layers=True)
    yield "checkpoint per layer, gradient ahead, 32 chunks", way(ahead(32), layers=True)
    yield "inductor", way(inductor={})
    for chunks in (2, 8, 32):
        # With the default ratio of 8 it does nothing: weights count among what the logits are computed from.
        chunked = {"auto_chunker.enable": True, "auto_chunker.amplify_ratio_threshold": 2, "auto_chunker.num_chunk": chunks}
        yield f"inductor, auto_chunker, {chunks} chunks", way(inductor=chunked)


WITH_OPTIMIZER = (
    *("eager", "by hand, 8 chunks, checkpoint", "gradient ahead, 8 chunks", "gradient ahead, 32 chunks"),
    *("F.linear_cross_entropy, 8 chunks", "checkpoint per layer, gradient ahead, 32 chunks"),
    *("inductor", "inductor, auto_chunker, 8 chunks"),
)
"""Ways of the suite `whole_step`."""

OWN = (
    *(Ask("off", "50%"), Ask("exact", "50%"), Ask("auto", "50%"), Ask("auto", "25%"), Ask("auto", "10%")),
    *(Ask("off", "smallest"), Ask("exact", "smallest"), Ask("auto", "smallest")),
)


def suites(quick: bool) -> dict[str, Suite]:
    """Both suites."""
    size = QUICK if quick else FULL
    found = dict(ways(size["sequences"] * size["length"]))
    eager = [name for name, way in found.items() if not way.compiled]
    fused = [name for name, way in found.items() if way.compiled]
    kept = pairs.beside(eager, Ask()) | pairs.beside(fused, Ask(), Ask("off", compiler="inductor"))
    # Inductor has no whole steps of ours.
    updated = pairs.beside([name for name in found if name in WITH_OPTIMIZER], Ask())
    exact = "by hand, 32 chunks, checkpoint"
    return {
        "step": Suite(functools.partial(model_of, size, False), found, pairs.alone(*OWN) | kept, exact),
        "whole_step": Suite(functools.partial(model_of, size, True), found, pairs.alone(*OWN) | updated, exact),
    }


def verdict(report: dict[str, Any]) -> list[str]:
    """Promises that a report breaks, in words."""
    found = suites(False)
    broken = pairs.unmet(report, found)
    for name in found:
        rows = report["suites"].get(name, {})
        smallest = [rows.get(str(Ask(chunking, "smallest")), [{}])[-1].get("peak_bytes") for chunking in ("off", "auto")]
        if None in smallest or smallest[0] < LEAST_GAIN * smallest[1]:
            broken.append(f"{name}: smallest peaks without and with chunks: {[p and mib(p) for p in smallest]}")
        half = rows.get(str(Ask("auto", "50%")), [])
        if len(half) < 2 or half[1].get("time_s", float("inf")) > MOST_TIME * half[0]["time_s"]:
            broken.append(f"{name}: at half of the peak: {[pairs.line(row) for row in half]}")
        peers = [row for row in rows.values() if row[0]["name"] != pairs.KEEP_ALL and "time_s" in row[0]]
        faster = sum((pairs.ours_of(row) or row[0])["time_s"] < row[0]["time_s"] for row in peers)
        if 2 * faster <= len(peers):
            broken.append(f"{name}: faster than {faster} of {len(peers)} ways")
        for row in rows.values():
            for mine in row[1:]:
                if mine.get("error", {}).get("of_plain", 0) > MOST_ERROR:
                    broken.append(f"{name}, {mine['name']}: {mine['error']['of_plain']:.2f} times the error of plain PyTorch")
    return broken


def table(report: dict[str, Any]) -> str:
    """The results as Markdown."""
    size = report["sizes"]
    model = [
        "Made by `benchmarks/torch_chunked_loss.py`. A Llama of transformers with a vocabulary of",
        f"{size['vocabulary']:,}, {size['sequences']} sequences of {size['length']:,} tokens, width {size['width']},"
        f" {size['layers']} layers.",
    ]
    about = {
        "step": "Forward, loss and backward; the gradients are kept.",
        "whole_step": "With an update by SGD. *Bits* compares the loss and the updated parameters.",
    }
    return pairs.page("A large vocabulary, in chunks", model, about, report)


if __name__ == "__main__":
    sys.exit(main())
