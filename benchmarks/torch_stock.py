"""Unmodified models under a budget, in the call that their own documentation shows; each run in a fresh process.

    pip install timm diffusers peft torchvision torch_geometric
    python benchmarks/torch_stock.py [--models gpt2 detr] [--time-limit 5]

For every model of `stock_models.py`: "100%", "60%" and "40%", four steps each, with an update by SGD after each step. What the
model returns is held until the next step assigns its own. The promises checked are: no exception; the measured peak of steps 2
to 4 keeps the budget, and that of step 1 too, or a warning has announced it; loss, gradients, buffers and random state after
every step are equal to the bit to those of "100%"; or the budget is refused with a proof. A peak is of everything that a step
takes: parameters, buffers, data, gradients, activations, the loss, and what eager code between the graphs allocates. Exit
status 1 if one breaks.

Models that are not named keep their rows of the last run.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from fresh import ChildError, answer, child, digest, earlier, mib, parser, pass_warnings_to, ran, save

BUDGETS = ("100%", "60%", "40%")
STEPS = 4
PACKAGES = ("torch", "transformers", "timm", "diffusers", "peft", "torchvision", "torch_geometric")


def main() -> int:
    """Run the benchmark, or one child of it."""
    command = parser(__doc__)
    command.add_argument("--models", nargs="+", default=None)
    command.add_argument("--time-limit", type=float, default=5.0, help="seconds that planning may take")
    command.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = command.parse_args()
    if options.child:
        name, budget, limit = options.child
        answer(run(name, budget, float(limit)))
        return 0
    from stock_models import MODELS

    rows = earlier(__file__)
    cache = tempfile.mkdtemp()
    for name in options.models or MODELS:
        rows[name] = {budget: _child(name, budget, options.time_limit, cache) for budget in BUDGETS}
        print(name, {budget: broken_promises(rows[name], budget) or "holds" for budget in BUDGETS}, flush=True)
        report = {
            **ran(*PACKAGES),
            "time_limit_s": options.time_limit,
            "models": {n: rows[n] for n in MODELS if n in rows},
        }
        save(__file__, report)
    broken = [f"{n}: not run" for n in MODELS if n not in rows]
    broken += [f"{n} at {b}: {why}" for n in MODELS if n in rows for b in BUDGETS for why in broken_promises(rows[n], b)]
    print("\n".join(broken) or "all promises hold")
    return bool(broken)


def _child(name: str, budget: str, limit: float, cache: str) -> dict[str, Any]:
    try:
        return child(__file__, name, budget, str(limit), CHECKMATE_CACHE=cache, HF_HUB_OFFLINE="1")
    except ChildError as error:
        return {"error": str(error)}


def run(name: str, budget: str, time_limit_s: float) -> dict[str, Any]:
    """Child: four steps under a budget, with the peak and digests of each; then a first step once more, for its peak."""
    import numpy
    import torch
    from stock_models import MODELS, Loop

    import checkmate.torch
    from checkmate.core.errors import CheckmateError, InfeasibleBudgetError
    from checkmate.torch.measure.peak import ProfilerBusyError
    from checkmate.torch.steps.coordinator import coordinator

    torch.set_num_threads(1)
    for seed in (torch.manual_seed, numpy.random.seed, random.seed):
        seed(0)
    case = MODELS[name]()
    messages: list[str] = []
    pass_warnings_to(messages.append)
    options = {"budget": budget, "time_limit_s": time_limit_s}
    compiled = [torch.compile(module, backend="checkmate", options=options) for module in case.modules]
    optimizers = [torch.optim.SGD(module.parameters(), lr=1e-3) for module in case.modules]
    loop = Loop()
    data = [t for t in torch.utils._pytree.tree_leaves(list(case.data)) if isinstance(t, torch.Tensor)]
    given = _storages([*data, *(t for m in case.modules for t in (*m.parameters(), *m.buffers()))])
    constants = _existing().keys() - given.keys()  # of libraries
    row: dict[str, Any] = {"outside": case.outside, "steps": []}

    def step() -> None:
        case.step(compiled, loop)
        loop.loss.backward()

    def observed(measured: bool) -> dict[str, Any]:
        for optimizer in optimizers:
            optimizer.zero_grad()
        held = {key: size for key, size in _existing().items() if key not in constants}
        found: dict[str, Any] = {"resident_bytes": sum((given | held).values())}
        began = time.perf_counter()
        if measured:
            restore = _state(case.modules)
            try:
                found["measured_bytes"] = found["resident_bytes"] + checkmate.torch.measure_peak(step)
            except ProfilerBusyError:  # a second step with other graphs, whose ops have to be measured first
                restore()
                step()
        else:
            step()
        found["time_s"] = time.perf_counter() - began
        found.update(_promised(coordinator()))
        found["digests"] = {
            "loss": digest(loop.loss),
            "gradients": digest(*(p.grad for m in case.modules for p in m.parameters())),
            "buffers": digest(*(b for m in case.modules for b in m.buffers())),
            "random_state": digest(torch.get_rng_state()),
        }
        for optimizer in optimizers:
            optimizer.step()
        return found

    try:
        for i in range(STEPS):
            if i == 1:
                del loop.outputs, loop.loss  # the profiler does not see that a tensor is freed which it did not see allocated
            row["steps"].append(observed(measured=i > 0))
        for _ in range(2):  # the first may have to measure ops, and then its peak is not
            coordinator().forget_steps()
            del loop.outputs, loop.loss
            row["first"] = observed(measured=True)
            if "measured_bytes" in row["first"]:
                break
    except InfeasibleBudgetError as error:
        row["refused"] = str(error)
    except CheckmateError as error:
        row["error"] = f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - whatever a model or Dynamo raises is a row of the table
        traceback.print_exc()
        row["error"] = f"{type(error).__name__}: {str(error)[:400]}"
    row["messages"] = messages
    return row


def _state(modules: Sequence[Any]) -> Callable[[], None]:
    """A function that restores the present buffers and random states, and clears gradients."""
    import numpy
    import torch

    buffers = [(b, b.clone()) for m in modules for b in m.buffers()]
    states = torch.get_rng_state(), numpy.random.get_state(), random.getstate()  # noqa: NPY002 - what models use

    def restore() -> None:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        torch.set_rng_state(states[0])
        numpy.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])
        for module in modules:
            module.zero_grad()

    return restore


def _promised(coordinator: Any) -> dict[str, Any]:
    """What the plan of the newest step promises."""
    result, plan = coordinator.result, coordinator.step
    if result is None:
        return {}
    return {
        "budget_bytes": result.budget_bytes,
        "planned_bytes": result.peak_bytes,
        "overhead": result.overhead,
        "gap": result.gap,
        "graphs": 1 if plan is None else len(plan.graphs),
        "whole": plan is not None,
    }


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Bytes of each storage of tensors that are no scalars, of which traced graphs hold some as constants."""
    found = {}
    for tensor in tensors:
        if tensor.dim():
            # Tensors of tracers and of `vmap` have no storage, or one that may not be asked.
            with contextlib.suppress(NotImplementedError, RuntimeError):
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return found


def _existing() -> dict[int, int]:
    """Bytes of the storages of all tensors that exist."""
    import torch

    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)
    return _storages(t for t in gc.get_objects() if type(t) in kinds and t.device.type == "cpu")


def broken_promises(row: dict[str, Any], budget: str) -> list[str]:
    """Promises that a run breaks, in words."""
    point, reference = row[budget], row["100%"]
    if "error" in point:
        return [point["error"]]
    if "refused" in point:
        return []
    broken = []
    if not all("budget_bytes" in found for found in point["steps"]):
        return ["nothing is planned: " + " ".join(point["messages"])[:300]]
    for i, found in enumerate(point["steps"]):
        peak = found.get("measured_bytes", 0) if i else point["first"]["measured_bytes"]
        announced = not i and any("first step may take" in m for m in point["messages"])
        # A step that is seen for the first time runs on plans of the smallest peak of each graph; its budget is known later.
        known = found if i and found["whole"] else point["steps"][-1]
        limit = known["budget_bytes"]
        if peak > limit and not announced and budget != "100%":  # that one is the reference, and leaves nothing free
            broken.append(f"step {i + 1} takes {mib(peak)} of {mib(limit)} MiB ({peak - limit} bytes more)")
        if "steps" in reference and len(reference["steps"]) > i:
            other = reference["steps"][i]["digests"]
            unequal = [key for key, value in found["digests"].items() if other[key] != value]
            if unequal:
                broken.append(f"step {i + 1}: {', '.join(unequal)} differ from '100%'")
    return broken


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
