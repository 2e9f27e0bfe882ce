"""Ways to run a step of a PyTorch model, and what is measured of each; for benchmarks that compare several in one process."""

from __future__ import annotations

import copy
import functools
import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fresh import digest, mib
from models import Case, build

CLOCK = 1.03
"""How much slower ours may seem at another's peak: times of one step differ by as much from run to run."""


@dataclass
class Variant:
    """One way to run a step."""

    name: str
    kind: str  # "ours", or the family of another way
    step: Callable[[], Any]  # runs forward and backward, returns the loss
    model: Any
    row: dict[str, Any] = field(default_factory=dict)  # what is measured


def compiled_by_torch(model: Any) -> Callable[..., Any]:
    """What `torch.compile` is given: a function of its own for every variant, or Dynamo would count them as one."""
    from checkmate.torch.step.recipe import forward_program, with_unique_code

    def whole(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[None, Any]:
        return None, model(*args, **kwargs)

    return with_unique_code(whole) if getattr(model, "whole", False) else forward_program(model, None)


def returned(program: Callable[..., Any], case: Any) -> Any:
    """What a compiled program returns: the loss, and what is held beside it."""
    return program((), case.batch)[1]


def backward(forward: Callable[[], Any]) -> Any:
    """Run a step; what the forward returns is held until the backward is over."""
    output = forward()
    loss = output[0] if isinstance(output, tuple) else output
    loss.backward()
    return loss.detach()


def eager(case: Any) -> Callable[[], Any]:
    """A step of plain PyTorch."""
    return lambda: backward(lambda: case.model(**case.batch))


def checkpointed(case: Any, *, selective: bool = False) -> Callable[[], Any]:
    """A step with a checkpoint around every block; if selective, the outputs of expensive ops in it are kept."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    dear = ("mm.", "addmm.", "bmm.", "convolution.", "_scaled_dot_product")

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE if op.__name__.startswith(dear) else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    for block in case.blocks:
        block.forward = functools.partial(checkpoint, block.forward, **options)
    return eager(case)


def stock(case: Any, backend: str, fraction: float | None = None, mode: str | None = None) -> Callable[[], Any]:
    """A step compiled by torch, with its own ``activation_memory_budget`` if one is given."""
    import torch
    import torch._functorch.config as functorch_config

    program = torch.compile(compiled_by_torch(case.model), backend=backend, dynamic=False, mode=mode)
    settings: dict[str, Any] = {"enable_autograd_cache": False}
    settings |= {} if fraction is None else {"activation_memory_budget": fraction}

    def step() -> Any:
        # The backward is compiled at its first run, under the same setting.
        with functorch_config.patch(settings):
            return backward(lambda: returned(program, case))

    return step


def by_backend(case: Any, plan: Any = None) -> tuple[Callable[[], Any], Any]:
    """A step of a model compiled by our backend alone, and its graph; the forward is run once, and the buffers put back."""
    import torch

    from checkmate.torch.backend import compile_graph
    from checkmate.torch.compilation.resident_account import Hooks
    from checkmate.torch.options import Options

    found: list[Any] = []
    hooks = Hooks(planned=lambda interface, result: found.append(interface.graph))
    backend = functools.partial(compile_graph, options=Options(plan=plan), hooks=hooks)
    program = torch.compile(compiled_by_torch(case.model), backend=backend, dynamic=False)
    with buffers_put_back(case.model):
        returned(program, case)
    return lambda: backward(lambda: returned(program, case)), found[0]


_first = functools.cache(build)


def with_shared_tensors(name: str) -> Case:
    """A model whose parameters, buffers and batch are those of all others of its name.

    A step leaves room for what the other steps of its process hold; the parameters of other models would be counted.
    """
    case, first = build(name), _first(name)
    for of in ("parameters", "buffers"):
        for mine, shared in zip(getattr(case.model, of)(), getattr(first.model, of)(), strict=True):
            mine.data = shared.data
    return Case(case.model, first.batch, case.blocks)


@contextmanager
def buffers_put_back(model: Any) -> Iterator[None]:
    """Give a model its buffers back after steps that change them."""
    before = copy.deepcopy(dict(model.named_buffers()))
    yield
    for key, buffer in model.named_buffers():
        buffer.copy_(before[key])


def observe(variant: Variant) -> None:
    """What it computes from a fixed seed, and its peak above what is resident."""
    import torch

    from checkmate.torch import measure_peak

    torch.manual_seed(1)
    with buffers_put_back(variant.model):
        loss = variant.step()
        gradients = [p.grad for p in variant.model.parameters()]
        variant.row["bits"] = variant.row["own_bits"] = digest(loss, *gradients, *variant.model.buffers())
        del loss, gradients  # held until the next step is over they would count there
        variant.model.zero_grad(set_to_none=True)
        variant.step()
        variant.model.zero_grad(set_to_none=True)
        variant.row["peak_bytes"] = measure_peak(variant.step)
    variant.model.zero_grad(set_to_none=True)
    gc.collect()


def timed(variants: list[Variant], rounds: int) -> None:
    """Seconds of a step: the fastest of some rounds, each variant once a round."""
    took: dict[str, list[float]] = {v.name: [] for v in variants}
    for _ in range(rounds):
        for variant in variants:
            began = time.process_time()
            variant.step()
            took[variant.name].append(time.process_time() - began)
            variant.model.zero_grad(set_to_none=True)
    for variant in variants:
        variant.row["time_s"] = min(took[variant.name])


def say(name: str, variant: Variant) -> None:
    """Tell a peak, and how long compiling took if that is known."""
    took = f", compiled in {variant.row['compile_s']:.0f} s" if "compile_s" in variant.row else ""
    print(f"{name}: {variant.name}: {mib(variant.row['peak_bytes'])} MiB{took}", file=sys.stderr, flush=True)


def rows_of(variants: Iterable[Variant]) -> list[dict[str, Any]]:
    """What is kept of variants."""
    return [
        {"name": v.name, "kind": v.kind, **{k: x for k, x in v.row.items() if k not in ("bits", "own_bits")}} for v in variants
    ]


def unkept(name: str, row: dict[str, Any]) -> list[str]:
    """In words, budgets, planned peaks, bits and an order of peaks that ours do not keep."""
    ours = sorted((v for v in row["variants"] if v["kind"] == "ours"), key=lambda v: v["budget_bytes"])
    broken, peaks = [], [v["peak_bytes"] for v in ours]
    for v, peak in zip(ours, peaks, strict=True):
        planned = v.get("planned_bytes", peak)
        if peak > v["budget_bytes"] + 64 or abs(peak - planned) > 0.01 * planned:
            sizes = f"measured {mib(peak)}, planned {mib(planned)}, budget {mib(v['budget_bytes'])}"
            broken.append(f"{name}: {v['name']}: {sizes}")
        # Eager code rounds otherwise than fused code: where it took over, bits are equal among its own kind only.
        if not v["identical"] and v.get("compiler") != "eager":
            broken.append(f"{name}: {v['name']}: not equal to the bit to keeping everything")
    return broken + [f"{name}: peaks are not monotone in the budget"] * (peaks != sorted(peaks))


def best_at(row: dict[str, Any], peak_bytes: int) -> dict[str, Any] | None:
    """Our fastest variant that takes no more than a peak."""
    fitting = [v for v in row["variants"] if v["kind"] == "ours" and v["peak_bytes"] <= peak_bytes]
    return min(fitting, key=lambda v: v["time_s"], default=None)


def beaten(name: str, row: dict[str, Any], variant: dict[str, Any], *, in_time: bool = True) -> list[str]:
    """In words, whether another variant takes less memory than any of ours, or less time than ours at its peak."""
    mine, peak = best_at(row, variant["peak_bytes"]), mib(variant["peak_bytes"])
    if mine is None:
        smallest = min(v["peak_bytes"] for v in row["variants"] if v["kind"] == "ours")
        return [f"{name}: {variant['name']} reaches {peak}, ours only {mib(smallest)}"]
    if in_time and mine["time_s"] > CLOCK * variant["time_s"]:
        return [f"{name}: at {peak} {variant['name']} takes {variant['time_s']:.3f} s, ours {mine['time_s']:.3f} s"]
    return []
