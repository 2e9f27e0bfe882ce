"""Peak against step time in PyTorch: ours beside every other way to spend less memory, in one run.

For every model one process that has all variants in it: keeping everything, `torch.utils.checkpoint` on every block,
selective checkpointing that saves matrix products, convolutions and attention, torch's `activation_memory_budget` from
0.1 to 1 under `aot_eager`, and ours at each peak that one of them reaches, at 50 % and 25 % of keeping everything and at
the smallest peak found. Rounds of one step each are interleaved and the fastest counts, in time of the process on one
thread. The promises checked: our measured peaks keep their budgets, are as planned within 1 % and monotone in the
budget; loss, gradients and buffers are equal to the bit to keeping everything; at the peak of every other variant ours is
not slower (3 % is left for the clock), and our smallest peak is the smallest of all. Exit status 1 if one breaks.

`llama_4`, `llama_6` and `llama_8` are those of pytorch#197838: LlamaModel(hidden 256, intermediate 688, 8 heads, 4 s
layers) on 2 sequences of 128 s tokens, the loss the sum of the last hidden state, for s = 4, 6, 8. Here times are compared with
torch's fractions alone: traced, transformers' Llama has an explicit mask where eager mode has none, and takes longer.

`gpt2_whole` and so on return their logits beside the loss, and these are held until the backward is over, as in a loop
around a model of transformers. AOTAutograd then makes gradients for them, zeros that nobody asked for, which no plan can do
without: another variant may there be smaller than ours by as much.

    python benchmarks/torch_front.py [--models gpt2 unet] [--time-limit 30] [--rounds 5]
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import steps
from fresh import by_model, mib
from models import WHOLE, Case, build
from steps import Variant, beaten, by_backend, observe, rows_of, say, timed, unkept

MODELS = (
    *("gpt2", "bert", "vit", "resnet50", "unet", "llama_4", "llama_6", "llama_8"),
    *(name + WHOLE for name in ("gpt2", "bert", "vit", "resnet50", "unet")),
)
FRACTIONS = {"llama": (0.05, 0.1, 0.15, 0.2, 0.3), "": tuple(f / 10 for f in range(1, 11))}


def main() -> int:
    """Run the benchmark, or one child of it."""
    return by_model(__file__, str(__doc__), MODELS, run=run, verdict=verdict)


def run(name: str, time_limit_s: float, rounds: int) -> dict[str, Any]:
    """Child: all variants of a model."""
    logging.disable(logging.WARNING)
    variants = list(others(name))
    for variant in variants:
        observe(variant)
        say(name, variant)
    mine, facts = planned(name, [v.row["peak_bytes"] for v in variants], time_limit_s)
    for variant in mine:
        observe(variant)
        say(name, variant)
    variants += mine
    keep = next(v for v in variants if v.name == "keep all")
    for variant in variants:
        reference = keep if variant.kind == "ours" else next(v for v in variants if v.name == "eager")
        variant.row["identical"] = variant.row.pop("bits") == (reference.row.get("bits") or reference.row["own_bits"])
    timed(variants, rounds)
    return {**facts, "variants": rows_of(variants)}


def others(name: str) -> Iterator[Variant]:
    """Every other way, each with a model of its own."""

    def variant(label: str, kind: str, make: Callable[[Case], Callable[[], Any]]) -> Variant:
        case = build(name)
        return Variant(label, kind, make(case), case.model)

    yield variant("eager", "eager", steps.eager)
    yield variant("checkpoint per block", "checkpoint", steps.checkpointed)
    yield variant("selective per block", "selective", functools.partial(steps.checkpointed, selective=True))
    for f in next(f for prefix, f in FRACTIONS.items() if name.startswith(prefix)):
        knob = functools.partial(steps.stock, backend="aot_eager", fraction=f)
        yield variant(f"activation_memory_budget={f}", "knob", knob)


def planned(name: str, peaks: list[int], time_limit_s: float) -> tuple[list[Variant], dict[str, Any]]:
    """Ours at given peaks, at shares of keeping everything, and at the smallest peak."""
    from checkmate import Limits, PlanNotFoundError, Problem, Result, min_budget, solve
    from checkmate.core.budget import keep_all_bytes

    graph = captured(name)
    top = keep_all_bytes(graph) - graph.resident_bytes
    smallest = min_budget(graph, limits=Limits(time_s=2 * time_limit_s))
    floor = smallest.peak_bytes - graph.resident_bytes
    asked = {floor, *[p for p in peaks if floor <= p < top], *[top * s // 100 for s in (50, 40, 25) if top * s // 100 > floor]}
    found: dict[int, Result] = {}
    for peak in sorted(asked):
        with contextlib.suppress(PlanNotFoundError):
            found[peak] = solve(Problem(graph, graph.resident_bytes + peak), limits=Limits(time_s=time_limit_s))
    variants = [
        _ours(name, "keep all", None, {"budget_bytes": top, "planned_bytes": top, "overhead": 1.0, "bound_overhead": 1.0})
    ]
    for peak in sorted(asked):
        # A plan for another budget is one for this if it fits.
        fitting = (r for r in (smallest, *found.values()) if r.peak_bytes - graph.resident_bytes <= peak)
        result = min(fitting, key=lambda r: r.cost)
        row = {
            "budget_bytes": peak,
            "planned_bytes": result.peak_bytes - graph.resident_bytes,
            "overhead": result.overhead,
            "bound_overhead": max(1.0, found[peak].bound / graph.cost) if peak in found else 1.0,
        }
        variants.append(_ours(name, f"ours, {mib(peak)}", result.plan, row))
    tangents = sum(graph.values[v].size_bytes for v in graph.ops[graph.boundary].outputs)
    facts = {"ops": len(graph.ops), "keep_all_bytes": top, "floor_bytes": smallest.floor_bytes - graph.resident_bytes}
    return variants, {**facts, "smallest_bytes": floor, "tangent_bytes": tangents}


def captured(name: str) -> Any:
    """The graph that is planned."""
    import checkmate.torch

    case = build(name)
    return by_backend(case)[1] if name.endswith(WHOLE) else checkmate.torch.capture(case.model, example=case.batch)


def _ours(name: str, label: str, plan: Any, row: dict[str, Any]) -> Variant:
    import checkmate.torch

    case = build(name)
    if name.endswith(WHOLE):
        step, _ = by_backend(case, plan)
        return Variant(label, "ours", step, case.model, row)
    compiled = checkmate.torch.compile(case.model, example=case.batch, plan=plan)
    return Variant(label, "ours", lambda: compiled(**case.batch)[1], case.model, row)


def verdict(name: str, row: dict[str, Any]) -> list[str]:
    """Promises that a model's rows break, in words."""
    broken, smallest = unkept(name, row), min(v["peak_bytes"] for v in row["variants"] if v["kind"] == "ours")
    for v in row["variants"]:
        if v["kind"] in ("ours", "eager"):
            continue
        if name.endswith(WHOLE) and v["peak_bytes"] < smallest <= v["peak_bytes"] + row["tangent_bytes"]:
            continue
        broken += beaten(name, row, v, in_time=v["kind"] == "knob" or not name.startswith("llama_"))
    return broken


if __name__ == "__main__":
    sys.exit(main())
