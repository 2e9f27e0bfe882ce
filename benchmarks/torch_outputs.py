"""What outputs cost that a loss does not use: stock transformers, their outputs held, beside forms that return less.

    python benchmarks/torch_outputs.py

Stock GPT-2 and BERT return logits beside their loss (GPT-2 also its cache); the other form returns the loss alone. A stock
LlamaModel returns its cache; the other form has `use_cache=False`. For each form: the smallest peak of any plan that was found,
and overhead and measured peak at "50%" and "25%". Exit status 1 if they differ by more than 1 %, the bytes of what is held aside.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from fresh import answer, child, hardware, mib, publish, ran_on, versions

MODELS = ("gpt2", "bert", "llama")
SHARES = ("50%", "25%")
TOLERANCE = 0.01


def main() -> int:
    """Run the benchmark, or one child of it."""
    if sys.argv[1:2] == ["--child"]:
        answer(run(*sys.argv[2:]))
        return 0
    rows = {name: {form: child(__file__, name, form) for form in ("stock", "less")} for name in MODELS}
    report = {"hardware": hardware(), "versions": versions("torch", "transformers"), "models": rows}
    page = table(report)
    publish(__file__, report, page)
    broken = [line for name, row in rows.items() for line in differences(name, row)]
    print(page, *broken or ["all promises hold"], sep="\n")
    return bool(broken)


def build(name: str, form: str) -> tuple[Any, dict[str, Any], Any]:
    """The model, its batch, and the loss of its outputs."""
    import torch
    from stock_models import _ENDS, _KV, _LLAMA
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaModel

    torch.manual_seed(0)
    ids = torch.randint(3, 512, (8, 128))
    if name == "llama":
        batch = {"input_ids": ids} if form == "stock" else {"input_ids": ids, "use_cache": False}
        model = LlamaModel(LlamaConfig(vocab_size=512, **_KV))
        return model, batch, lambda outputs: outputs.last_hidden_state.square().mean()
    if name == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=64, n_layer=3, n_head=4, n_positions=128, **_ENDS))
    else:
        model = BertForMaskedLM(BertConfig(vocab_size=512, **_LLAMA))
    batch = {"input_ids": ids, "labels": ids}
    return model if form == "stock" else LossOnly(model), batch, lambda outputs: outputs.loss


def LossOnly(model: Any) -> Any:
    """A module that returns the loss of another one, and nothing else."""
    import types

    from torch import nn

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **batch: Any) -> Any:
            return types.SimpleNamespace(loss=self.model(**batch).loss)

    return Module()


def run(name: str, form: str) -> dict[str, Any]:
    """Child: smallest budget, then overhead and peak of two budgets above it."""
    import torch

    import checkmate.torch
    from checkmate import Limits, min_budget
    from checkmate.torch.steps.coordinator import COORDINATOR

    torch.set_num_threads(1)
    model, batch, loss_of = build(name, form)
    model.train()
    resident = _bytes([*model.parameters(), *model.buffers(), *(t for t in batch.values() if isinstance(t, torch.Tensor))])
    held: list[Any] = []

    def train(budget: Any) -> int:
        torch._dynamo.reset()
        COORDINATOR.forget_steps()
        compiled = torch.compile(model, backend="checkmate", options={"budget": budget, "time_limit_s": 10, "chunking": "off"})

        def step() -> None:
            torch.manual_seed(1)
            held[:] = [compiled(**batch)]
            loss_of(held[0]).backward()

        for _ in range(2):
            model.zero_grad(set_to_none=True)
            held.clear()
            step()
        model.zero_grad(set_to_none=True)
        held.clear()
        return resident + checkmate.torch.measure_peak(step)

    everything = train("100%")
    outputs = [*_tensors(held[0])]
    graph = COORDINATOR.step.graph if COORDINATOR.step else COORDINATOR._recorder.runs[0].planned.joint.capture.graph
    smallest = min_budget(graph, limits=Limits(time_s=20))
    points = []
    for share in SHARES:
        measured = train(share)
        result = COORDINATOR.result
        points.append({"share": share, "overhead": result.overhead, "gap": result.gap, "measured_bytes": measured})
    return {
        "keep_all_bytes": everything,
        "smallest_bytes": smallest.peak_bytes,
        "held_bytes": _bytes(outputs),
        "points": points,
    }


def _tensors(value: Any) -> Iterator[Any]:
    """Tensors in outputs of transformers, caches among them, that are no scalars."""
    import torch

    if isinstance(value, torch.Tensor):
        yield from [value] if value.dim() else []
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from _tensors(element)
    elif hasattr(value, "__dict__"):
        yield from _tensors([*vars(value).values()])


def _bytes(tensors: Iterable[Any]) -> int:
    return sum({s.data_ptr(): s.nbytes() for t in tensors if (s := t.untyped_storage())}.values())


def differences(name: str, row: dict[str, Any]) -> list[str]:
    """By how much the forms differ, where that is too much."""
    stock, less = row["stock"], row["less"]
    found = []
    if stock["smallest_bytes"] - stock["held_bytes"] > (1 + TOLERANCE) * less["smallest_bytes"]:
        found.append(f"{name}: smallest peak {mib(stock['smallest_bytes'])} MiB, returning less {mib(less['smallest_bytes'])}")
    for a, b in zip(stock["points"], less["points"], strict=True):
        if a["overhead"] > (1 + TOLERANCE) * b["overhead"]:
            found.append(f"{name} at {a['share']}: overhead {a['overhead']:.4f}, returning less {b['overhead']:.4f}")
    return found


def table(report: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "# Outputs beside a loss",
        "",
        "Made by `benchmarks/torch_outputs.py`; do not edit. Stock models of transformers whose outputs are held until the step",
        "is over, beside the same models that return less: the loss alone, or for Llama no cache. MiB of the whole step; the",
        "smallest peak is that of the best plan found in 20 s, overheads are planned.",
        "",
        ran_on(report),
        "",
        "| model | returns | keeping everything | smallest peak | held | 50 %: overhead | measured | 25 %: overhead | measured |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in report["models"].items():
        for form, words in (("stock", "all, held"), ("less", "less")):
            found = row[form]
            cells = [name, words, *(mib(found[key]) for key in ("keep_all_bytes", "smallest_bytes", "held_bytes"))]
            for point in found["points"]:
                cells += [f"{point['overhead']:.4f}", mib(point["measured_bytes"])]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
