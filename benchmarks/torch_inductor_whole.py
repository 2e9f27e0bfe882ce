"""Whole steps compiled by Inductor: peak, time and bits beside stock Inductor with a compiled optimizer.

GPT-2 small (4 sequences of 256 tokens), a GPT-2 of width 256 (8 sequences) and ResNet-50 (16 images of 64 x 64), with AdamW, in
one process for each model. Stock: `torch.compile` of the model, and of the optimizer's ``step``. Ours: one graph of forward,
backward and updates, keeping everything and at budgets of 75 and 45 % of what stock was measured to take, with whole ops and with
``chunking="auto"``, which runs a language model's head with its loss in pieces. Rounds are interleaved and the fastest counts, in
time of the process on one thread. As in training, a timed step follows one of the same variant: after that of another variant,
which leaves other free memory, a step of GPT-2 small takes up to a second more for new pages of the system. The promises checked:
measured peaks keep their budgets, of which the smallest is 0.45 of stock's peak; with ``chunking="auto"`` a step there takes at
most 1.05 of stock's time; losses, parameters, buffers and the optimizer's state after three steps are equal to the bit at all
budgets. Exit status 1 if one breaks.

    python benchmarks/torch_inductor_whole.py [--models gpt2_small resnet50] [--time-limit 30] [--rounds 5]
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from fresh import by_model, digest, mib, ran_on
from models import build
from steps import CLOCK, compiled_by_torch

MODELS = ("gpt2_small", "gpt2", "resnet50")
SHARES = (75, 45)
"""Budgets of ours, as per cent of stock's peak."""

TIME = 1.05
"""Step time at the smallest budget with ``chunking="auto"``, as a share of stock's."""


def main() -> int:
    """Run the benchmark, or one child of it."""
    return by_model(__file__, str(__doc__), MODELS, run=run, table=table, verdict=verdict, own_cache=True)


def run(name: str, time_limit_s: float, rounds: int) -> dict[str, Any]:
    """Child: all variants of a model."""
    import torch

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    steps = [stock(name)]
    rows = [{"name": "stock", **first(name, "stock", steps[0])}]
    peak = rows[0]["measured_bytes"]
    for chunking in ("exact", "auto"):
        reference = None
        for share in (None, *SHARES):
            limit = None if share is None else share * peak // 100
            step, row = ours(name, limit, time_limit_s, chunking)
            if chunking == "auto" and not row["in_pieces"]:
                break  # nothing of the model runs in pieces
            label = "keep everything" if share is None else f"{share} %"
            label += ", in pieces" if row["in_pieces"] else ""
            found = first(name, label, step)
            reference = reference or found["digest"]
            rows.append({"name": label, **row, **found, "identical": found["digest"] == reference})
            steps.append(step)
    times = [min(column) for column in zip(*[[seconds(step) for step, _, _ in steps] for _ in range(rounds)], strict=True)]
    for row, took in zip(rows, times, strict=True):
        row["time_s"] = took
    return {"points": rows}


Trained = tuple[Callable[[], Any], Any, Any]
"""A step, its model and its optimizer."""


def optimizer_of(model: Any) -> Any:
    """The optimizer, with the learning rate of the benchmark."""
    import torch

    return torch.optim.AdamW(model.parameters(), 1e-3)


def stock(name: str) -> Trained:
    """Model and optimizer compiled by torch."""
    import torch

    case = build(name)
    optimizer = optimizer_of(case.model)
    forward = torch.compile(compiled_by_torch(case.model), dynamic=False)
    update = torch.compile(optimizer.step, dynamic=False)

    def step() -> Any:
        loss = forward((), case.batch)[1]
        loss.backward()
        update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, case.model, optimizer


def ours(name: str, limit_bytes: int | None, time_limit_s: float, chunking: Any) -> tuple[Trained, dict[str, Any]]:
    """A whole step of ours.

    Args:
        name: The model.
        limit_bytes: Bytes that its budget leaves above the resident ones, or None.
        time_limit_s: Seconds for each search.
        chunking: Whether ops may run in pieces.
    """
    import checkmate.torch

    case = build(name)
    optimizer = optimizer_of(case.model)
    graph = checkmate.torch.capture(case.model, None, example=case.batch, optimizer=optimizer, costs="estimated")
    budget = None if limit_bytes is None else graph.resident_bytes + limit_bytes
    began = time.perf_counter()
    step = checkmate.torch.compile(
        case.model,
        None,
        optimizer,
        example=case.batch,
        budget=budget,
        time_limit_s=time_limit_s,
        compiler="inductor",
        whole=True,
        chunking=chunking,
    )
    row = {"limit_bytes": limit_bytes, "planned_bytes": step.result.peak_bytes - step.graph.resident_bytes}
    row |= {"in_pieces": any("pieces" in op.kind for op in step.graph.ops)}
    row |= {"compile_s": time.perf_counter() - began, "remark": "; ".join(step.result.remarks[-1:])}
    return (lambda: step(**case.batch)[1], case.model, optimizer), row


def first(name: str, label: str, trained: Trained) -> dict[str, Any]:
    """What three steps leave, and the peak of one more."""
    import torch

    from checkmate.torch import measure_peak

    step, model, optimizer = trained
    torch.manual_seed(1)
    losses = [step() for _ in range(3)]
    state = [v for _, s in sorted(optimizer.state_dict()["state"].items()) for v in s.values()]
    found = digest(*losses, *model.state_dict().values(), *state)
    measured = measure_peak(step)
    print(name, label, mib(measured), float(losses[-1]), file=sys.stderr, flush=True)
    return {"digest": found, "measured_bytes": measured, "loss": float(losses[-1])}


def seconds(step: Callable[[], Any]) -> float:
    """Processor time of a step that follows one of the same variant."""
    step()
    began = time.process_time()
    step()
    return time.process_time() - began


def verdict(name: str, row: dict[str, Any]) -> list[str]:
    """Promises that a model breaks, in words."""
    base, *mine = row["points"]
    broken = []
    for p in mine:
        if p["limit_bytes"] is not None and p["measured_bytes"] > p["limit_bytes"]:
            broken.append(f"{name}, {p['name']}: {mib(p['measured_bytes'])} is over the budget, {mib(p['limit_bytes'])}")
        if not p["identical"]:
            broken.append(f"{name}, {p['name']}: not equal to the bit to keeping everything")
    if mine[-1]["time_s"] > TIME * CLOCK * base["time_s"]:
        broken.append(f"{name}, {mine[-1]['name']}: {mine[-1]['time_s'] / base['time_s']:.3f} of stock's time")
    return broken


def table(report: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "# Whole steps compiled by Inductor",
        "",
        "Made by `benchmarks/torch_inductor_whole.py`. Peaks are MiB above the resident memory, which includes",
        "parameters and optimizer state; times are process times on one thread, the fastest of interleaved rounds, of a step",
        "that follows one of the same variant; the time to compile is that of the clock. *Stock* is `torch.compile` of the",
        "model and of AdamW's step; the budgets are shares of its peak. *Bits* compares losses, parameters, buffers and",
        "optimizer state after three steps with keeping everything. *In pieces*: with `chunking=` set to `auto`, by which a",
        "language model's head with its loss runs in pieces.",
        "",
        ran_on(report),
        "",
        "| model | variant | budget | measured | of stock | step, s | of stock | compile, s | bits |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name, row in report["models"].items():
        base = row["points"][0]
        for p in row["points"]:
            peak, took = p["measured_bytes"] / base["measured_bytes"], p["time_s"] / base["time_s"]
            budget = mib(p["limit_bytes"]) if p.get("limit_bytes") else "none"
            bits = "" if "identical" not in p else "equal" if p["identical"] else "NOT equal"
            compiled = f"{p['compile_s']:.0f}" if "compile_s" in p else ""
            lines.append(
                f"| {name} | {p['name']} | {budget} | {mib(p['measured_bytes'])} | {peak:.3f} | {p['time_s']:.3f} | {took:.3f} | "
                f"{compiled} | {bits} |"
            )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
