"""A long sequence: chunks that the planner chooses, beside an MLP that is tiled by hand.

One transformer block (width 512, gated MLP of 2,048) on 8,192 tokens; in the suite `sdpa` with PyTorch's fused attention (8
heads, causal), in `math` with products and a softmax (4 heads, each with a score matrix of 256 MiB). The ways: plain PyTorch; an
MLP that runs tile by tile in the forward, keeps nothing, and runs again in the backward, as in ALST (Arctic Long Sequence
Training), in 2 to 16 tiles; where attention is not fused, also with `torch.utils.checkpoint` around each head. Every row has a
fresh process on one thread, in which a way and ours at the peak of that way take turns, and the fastest of the rounds counts, in
time of the process. The suite `short` is `sdpa` on 256 tokens, where chunks would save nothing that matters.

The promises checked: our measured peaks keep their budgets; at no other way's peak is ours more than 2 % slower; on a short
sequence nothing is chunked. Exit status 1 if one breaks.

    python benchmarks/torch_tiled_mlp.py [--suites math] [--rows eager] [--time-limit 30] [--rounds 3] [--quick]
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))
import pairs
from pairs import Ask, Case, Suite, Way

FULL = {"length": 8192, "short": 256, "width": 512, "inner": 2048}
QUICK = {"length": 128, "short": 32, "width": 32, "inner": 64}
HEADS = {"sdpa": 8, "math": 4, "short": 8}
TILES = (2, 4, 8, 16)


def main() -> int:
    """Run the benchmark, or one child of it."""
    return pairs.main(__file__, str(__doc__), suites, sizes=sizes, table=table, verdict=verdict)


def sizes(quick: bool) -> dict[str, Any]:
    """Sizes of the block."""
    return QUICK if quick else FULL


class GatedMlp(nn.Module):
    """The MLP of Llama."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Tiled(torch.autograd.Function):
    """A module that is applied to some tokens at a time, as ALST's TiledMLP."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: torch.Tensor, tiles: int) -> torch.Tensor:
        ctx.module, ctx.tiles = module, tiles
        ctx.save_for_backward(x)
        return torch.cat([module(part) for part in x.chunk(tiles, 1)], 1)

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        gradient = torch.empty_like(x)
        parts = zip(x.detach().chunk(ctx.tiles, 1), tangent.chunk(ctx.tiles, 1), gradient.chunk(ctx.tiles, 1), strict=True)
        for part, tangents, gradients in parts:
            with torch.enable_grad():
                part.requires_grad_()
                output = ctx.module(part)
            torch.autograd.backward(output, tangents)  # weight gradients are added in place
            gradients.copy_(part.grad)
        return None, gradient, None


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def explicit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention with a score matrix."""
    return torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, -1) @ v


def by_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`explicit`, one head at a time, each computed again in the backward."""
    heads = zip(q.split(1, 1), k.split(1, 1), v.split(1, 1), strict=True)
    return torch.cat([checkpoint(explicit, *head, use_reentrant=False) for head in heads], 1)


class Block(nn.Module):
    """A transformer block and the mean squared error of what it returns."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attend: Callable[..., torch.Tensor] = fused
        self.tiles = 0
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = GatedMlp(width, inner)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        attended = self.attend(*qkv.permute(2, 0, 3, 1, 4).unbind(0))
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        within = self.before_mlp(x)
        added = Tiled.apply(self.mlp, within, self.tiles) if self.tiles else self.mlp(within)
        return F.mse_loss(x + added, y)


def block_of(name: str, quick: bool, dtype: torch.dtype) -> Case:
    """The block of a suite, the same each time."""
    size = sizes(quick)
    torch.manual_seed(0)
    block = Block(size["width"], size["inner"], HEADS[name]).to(dtype)
    block.attend = explicit if name == "math" else fused
    shape = (1, size["short" if name == "short" else "length"], size["width"])
    return Case(block, {"x": torch.randn(shape).to(dtype), "y": torch.randn(shape).to(dtype)})


def way(tiles: int = 0, attend: Callable[..., torch.Tensor] | None = None) -> Way:
    """A way to run a step.

    Args:
        tiles: Tiles of the MLP; 0 leaves it whole.
        attend: Attention in place of the suite's.
    """

    def prepare(case: Case) -> Callable[[], torch.Tensor]:
        case.model.tiles = tiles
        case.model.attend = attend or case.model.attend
        return functools.partial(step, case)

    return Way(prepare)


def step(case: Case) -> torch.Tensor:
    """Forward and backward."""
    loss = case.model(**case.batch)
    loss.backward()
    return loss.detach()


OWN = (
    *(Ask("off", "50%"), Ask("exact", "50%"), Ask("auto", "50%")),
    *(Ask("off", "smallest"), Ask("exact", "smallest"), Ask("auto", "smallest")),
)


def suites(quick: bool) -> dict[str, Suite]:
    """All suites."""
    tiled = {"eager": way(), **{f"{tiles} tiles": way(tiles) for tiles in TILES}}
    heads = {f"checkpoint per head, {tiles} tiles": way(tiles, by_heads) for tiles in (2, 16)}
    short = {"eager": way(), "2 tiles": way(2)}
    own, equal = pairs.alone(*OWN), Ask()
    return {
        "sdpa": Suite(functools.partial(block_of, "sdpa", quick), tiled, own | pairs.beside(tuple(tiled), equal), "eager"),
        "math": Suite(
            functools.partial(block_of, "math", quick),
            tiled | heads,
            own | pairs.beside((*tiled, *heads), equal),
            "checkpoint per head, 16 tiles",
        ),
        "short": Suite(
            functools.partial(block_of, "short", quick),
            short,
            pairs.alone(Ask("auto", None), Ask("auto", "75%")) | pairs.beside(tuple(short), equal),
            "eager",
        ),
    }


def verdict(report: dict[str, Any]) -> list[str]:
    """Promises that a report breaks, in words."""
    broken = pairs.unmet(report, suites(False))
    for row in report["suites"].get("short", {}).values():
        broken += [f"short, {mine['name']}: {'; '.join(mine['chunks'])}" for mine in row[1:] if mine.get("chunks")]
    return broken


def table(report: dict[str, Any]) -> str:
    """The results as Markdown."""
    size = report["sizes"]
    model = [
        "Made by `benchmarks/torch_tiled_mlp.py`. One transformer block of width",
        f"{size['width']} with a gated MLP of {size['inner']:,}; forward, loss and backward.",
    ]
    about = {
        "sdpa": f"{size['length']:,} tokens, fused causal attention with {HEADS['sdpa']} heads.",
        "math": f"{size['length']:,} tokens, attention with a score matrix for each of {HEADS['math']} heads.",
        "short": f"{size['short']:,} tokens, fused attention: chunks would save nothing that matters, and none are chosen.",
    }
    return pairs.page("A long sequence, in chunks", model, about, report)


if __name__ == "__main__":
    sys.exit(main())
