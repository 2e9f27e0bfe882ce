"""Gradients and buffers of a step under tools that save memory, beside those of the plain step, to the last bit.

    python benchmarks/torch_gradients.py                        # all tools and models, in fresh processes
    python benchmarks/torch_gradients.py --show TOOL MODEL  # print one reproduction

Every reproduction is a short program that is put together from the text of a model and the text of a tool, and runs without the
rest of this file. Exit status 1 if a step of Checkmate differs from the plain step in a bit.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from fresh import hardware, publish, ran_on, versions

MODELS = {
    "dropout": """
block = lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.2))
blocks, x, around = nn.Sequential(*[block() for _ in range(4)]), torch.randn(256, 64), contextlib.nullcontext
""",
    "batchnorm": """
block = lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
blocks, x, around = nn.Sequential(*[block() for _ in range(4)]), torch.randn(16, 8, 16, 16), contextlib.nullcontext
""",
    "autocast": """
block = lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64))
blocks, x = nn.Sequential(*[block() for _ in range(4)]), torch.randn(256, 64)
around = lambda: torch.autocast("cpu", torch.bfloat16)
""",
}
TOOLS = {
    "checkpoint": """
from torch.utils.checkpoint import checkpoint
def run(blocks, x):
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x
""",
    "checkpoint, no RNG state": """
from torch.utils.checkpoint import checkpoint
def run(blocks, x):
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    return x
""",
    "checkpoint, reentrant": """
from torch.utils.checkpoint import checkpoint
def run(blocks, x):
    x = blocks[0](x)  # a reentrant checkpoint whose inputs need no gradient has no backward
    for block in blocks[1:]:
        x = checkpoint(block, x, use_reentrant=True)
    return x
""",
    "selective checkpoint": """
from functools import partial
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
save = [torch.ops.aten.addmm.default, torch.ops.aten.convolution.default]
contexts = partial(create_selective_checkpoint_contexts, save)
def run(blocks, x):
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return x
""",
    "memory budget": """
import torch._functorch.config as config
def compiled(blocks, x, budget):
    torch._dynamo.reset()
    with config.patch(activation_memory_budget=budget):
        return torch.compile(blocks, backend="aot_eager_decomp_partition")(x)
plain = lambda blocks, x: compiled(blocks, x, 1.0)
run = lambda blocks, x: compiled(blocks, x, 0.5)
""",
    "checkmate": """
def run(blocks, x):
    return torch.compile(blocks, backend="checkmate", options={"budget": "60%", "time_limit_s": 2})(x)
""",
}
SETTINGS = {
    "checkpoint": "`torch.utils.checkpoint`, `use_reentrant=False`, other settings as they are",
    "checkpoint, no RNG state": "the same with `preserve_rng_state=False`",
    "checkpoint, reentrant": "`use_reentrant=True`, from the second block on",
    "selective checkpoint": "`create_selective_checkpoint_contexts`, which saves products and convolutions",
    "memory budget": "`torch._functorch.config.activation_memory_budget = 0.5` under `torch.compile`, compared with 1.0 under "
    "the same backend, whose random numbers and roundings differ from those of the plain step",
    "checkmate": '`torch.compile(..., backend="checkmate")` with a budget of 60 %',
}
OURS = "checkmate"
PROGRAM = """
import contextlib, copy, torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
plain = lambda blocks, x: blocks(x)
{model}{tool}
def step(blocks, run):
    torch.manual_seed(1)
    with around():
        y = run(blocks, x).float()
    loss = (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).square().mean()
    loss.backward()
    return {{"loss": [loss.detach()], "gradients": [p.grad for p in blocks.parameters()], "buffers": [*blocks.buffers()]}}
def error(a, b):
    return 1.0 if b is None else ((a - b).abs().max() / a.abs().max()).item()
expected, found = step(copy.deepcopy(blocks), plain), step(copy.deepcopy(blocks), run)
for kind in expected:
    pairs = list(zip(expected[kind], found[kind]))
    print(kind, all(b is not None and torch.equal(a, b) for a, b in pairs), max([error(a, b) for a, b in pairs], default=0.0))
"""
IMPORTS = ("import ", "from ")
KINDS = ("loss", "gradients", "buffers")


def main() -> int:
    """Run the benchmark, or print one reproduction."""
    if sys.argv[1:2] == ["--show"]:
        print(program(*sys.argv[2:4]))
        return 0
    found = {tool: {model: outcome(tool, model) for model in MODELS} for tool in TOOLS}
    report = {"hardware": hardware(), "versions": versions("torch"), "tools": found}
    page = table(report)
    publish(__file__, report, page)
    broken = [f"{OURS}, {model}: {kind}" for model in MODELS for kind in KINDS if not found[OURS][model][kind]["equal"]]
    print(page, *broken or ["all promises hold"], sep="\n")
    return bool(broken)


def program(tool: str, model: str) -> str:
    """The reproduction of a tool with a model."""
    return spaced(PROGRAM.format(model=MODELS[model].lstrip(), tool=TOOLS[tool].lstrip()).strip())


def spaced(text: str) -> str:
    """A program with the blank lines around its functions and after its imports that the formatter of this repository wants."""
    lines: list[str] = []
    for line in filter(None, text.splitlines()):
        before = lines[-1] if lines else ""
        if before and not line.startswith(" "):
            if line.startswith("def ") or before.startswith(" "):
                lines += ["", ""]
            elif before.startswith(IMPORTS) and not line.startswith(IMPORTS):
                lines.append("")
        lines.append(line)
    return "\n".join(lines)


def outcome(tool: str, model: str) -> dict[str, Any]:
    """Run a reproduction in a fresh process: for each kind of result, whether all bits are equal, and the largest error."""
    command = [sys.executable, "-W", "ignore", "-c", program(tool, model)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(KINDS)]
    return {kind: {"equal": equal == "True", "error": float(error)} for kind, equal, error in lines}


def cell(found: dict[str, Any]) -> str:
    """What differs from the plain step, and by how much of the largest entry."""
    wrong = [f"{kind} {found[kind]['error']:.1e}" for kind in KINDS if not found[kind]["equal"]]
    return ", ".join(wrong) if wrong else "equal"


def table(report: dict[str, Any]) -> str:
    """The results as Markdown, with a reproduction of each difference."""
    lines = [
        "# Wrong gradients, by tool",
        "",
        "Made by `benchmarks/torch_gradients.py`; do not edit. A tool that computes activations again must leave the step as it",
        "is. Loss, gradients and buffers of one step are compared with those of the plain step, run with the same seed. *equal*",
        "means every bit. Otherwise the largest absolute difference is given, divided by the largest entry of the tensor.",
        "",
        ran_on(report),
        "",
        "| tool | " + " | ".join(MODELS) + " |",
        "|---|" + "---|" * len(MODELS),
    ]
    lines += [f"| {tool} | " + " | ".join(cell(row[model]) for model in MODELS) + " |" for tool, row in report["tools"].items()]
    lines += ["", *(f"- **{tool}**: {words}." for tool, words in SETTINGS.items()), "", *EXPLAINED, ""]
    for tool, row in report["tools"].items():
        for model in MODELS:
            if cell(row[model]) != "equal":
                lines += [
                    f"## {tool}, {model}",
                    "",
                    f"Differs: {cell(row[model])}.",
                    "",
                    "```python",
                    program(tool, model),
                    "```",
                    "",
                ]
    lines += [
        "## Pairs that are equal",
        "",
        "`python benchmarks/torch_gradients.py --show TOOL MODEL` prints the program of any pair: `--show checkpoint dropout`.",
    ]
    return "\n".join([*lines, ""])


EXPLAINED = (
    "Where dropout is computed again without the state of the random generator, the backward sees another mask than the loss.",
    "BatchNorm updates its running statistics whenever it runs, so that a checkpoint counts each batch twice: the gradients are",
    "right, and evaluation and saved models are not. 1.0e+00 is `num_batches_tracked`, 2 instead of 1. Checkpoints keep the",
    "state of autocast, so that pair is equal.",
)
"""Causes of the differences, with torch 2.13."""

if __name__ == "__main__":
    sys.exit(main())
