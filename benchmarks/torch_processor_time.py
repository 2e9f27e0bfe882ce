"""Processor time of a compiled step on tiny models: what a planned step takes beside its ops, against PyTorch's own compilers.

Each pair is measured in a process of its own, step by step in turn, by the time of the thread (the backward runs on it too). The
least time of each counts, without collections of garbage, so that load on the machine changes little of it. The promises checked:
with a budget of 100 % a step takes at most 1.1 of the time under ``aot_eager``, and at most 1.2 of it under stock Inductor. A
whole step with AdamW takes at most 1.1 of eager mode's with the same implementation, ``foreach`` or ``fused``. Exit status 1 if
one breaks, or if a row "inductor" ran op by op.

    python benchmarks/torch_processor_time.py [--models gpt2] [--rounds 300]
"""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import models
from fresh import by_model, pass_warnings_to

LIMITS = {"eager": 1.1, "inductor": 1.2, "foreach": 1.1, "fused": 1.1}
STOCK = {"eager": "aot_eager", "inductor": "inductor"}
TINY = {
    "gpt2": functools.partial(models.gpt2, 12, 16, 32, 1, 8, n_head=2),
    "resnet50": functools.partial(models.resnet50, 2, 32, embedding_size=4, hidden_sizes=[16, 32, 64, 128]),
}


def main() -> int:
    """Run the benchmark, or one child of it."""
    return by_model(__file__, __doc__, tuple(TINY), run=run, verdict=verdict, rounds=300, time_limit_s=3.0, row=row)


def row(name: str, ask: Callable[..., Any]) -> dict[str, Any]:
    """All pairs of a model."""
    kinds = [(compiler, way) for compiler in STOCK for way in ("backend", "step")]
    kinds += [(implementation, "whole step") for implementation in ("foreach", "fused")]
    return {f"{way}, {compiler}": ask(name, compiler, way) for compiler, way in kinds}


def run(name: str, time_limit_s: float, rounds: int, compiler: str, way: str) -> dict[str, Any]:
    """Child: a step of ours and of PyTorch's own compiler."""
    import torch

    warnings = list[str]()
    pass_warnings_to(warnings.append)
    if way == "whole step":
        return ratio(updated(TINY[name](), compiler), whole_step(TINY[name](), compiler, time_limit_s), rounds)
    options = {"budget": "100%", "compiler": compiler, "time_limit_s": time_limit_s}
    stock = loop(TINY[name](), lambda model: torch.compile(model, backend=STOCK[compiler], dynamic=False))
    found = ratio(stock, step(TINY[name](), options) if way == "step" else planned(TINY[name](), options), rounds)
    return {**found, "op_by_op": any("compiled by 'eager'" in each for each in warnings)}


def planned(case: Any, options: dict[str, Any]) -> Callable[[], object]:
    """A step of a plain loop with a budget."""
    import torch

    import checkmate.torch  # noqa: F401 - registers the backend

    return loop(case, lambda model: torch.compile(model, backend="checkmate", options=options, dynamic=False))


def loop(case: Any, compiled: Callable[[Any], Callable[..., Any]]) -> Callable[[], object]:
    """A step of a plain loop."""
    run = compiled(case.model)

    def step() -> None:
        case.model.zero_grad(set_to_none=True)
        run(**case.batch).backward()

    return step


def step(case: Any, options: dict[str, Any]) -> Callable[[], object]:
    """A step of `checkmate.torch.compile`, without an optimizer."""
    import checkmate.torch

    run = checkmate.torch.compile(case.model, example=case.batch, **options)

    def step() -> None:
        case.model.zero_grad(set_to_none=True)
        run(**case.batch)

    return step


def updated(case: Any, implementation: str) -> Callable[[], object]:
    """A step in eager mode, with the optimizer's."""
    import torch

    asked: dict[str, Any] = {implementation: True}
    optimizer = torch.optim.AdamW(case.model.parameters(), **asked)

    def step() -> None:
        case.model(**case.batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def whole_step(case: Any, implementation: str, time_limit_s: float) -> Callable[[], object]:
    """A whole step with a budget."""
    import torch

    import checkmate.torch

    asked: dict[str, Any] = {implementation: True}
    optimizer = torch.optim.AdamW(case.model.parameters(), **asked)
    options = {"budget": "100%", "time_limit_s": time_limit_s}
    run = checkmate.torch.compile(case.model, None, optimizer, example=case.batch, **options)
    return lambda: run(**case.batch)


def ratio(stock: Callable[[], object], ours: Callable[[], object], rounds: int) -> dict[str, Any]:
    """Least microseconds of the thread for each of two steps that run in turn, and their ratio."""
    for each in (stock, ours) * 8:
        each()
    gc.collect()
    gc.disable()
    its, mine = map(min, zip(*((_time(stock), _time(ours)) for _ in range(rounds)), strict=True))
    gc.enable()
    return {"stock_us": round(its), "ours_us": round(mine), "ratio": round(mine / its, 3)}


def _time(step: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    step()
    return (time.thread_time_ns() - began) / 1e3


def verdict(name: str, row: dict[str, Any]) -> list[str]:
    """Promises that a model's rows break, in words."""
    broken = [f"{name}: {way}: ran op by op" for way, found in row.items() if found.get("op_by_op")]
    slow = ((way, found["ratio"]) for way, found in row.items() if found["ratio"] > LIMITS[way.rpartition(" ")[2]])
    return broken + [f"{name}: {way}: {ratio} of the processor time of PyTorch's own compiler" for way, ratio in slow]


if __name__ == "__main__":
    sys.exit(main())
