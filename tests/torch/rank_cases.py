"""What one rank of a distributed job does in a test: ``python -m tests.torch.rank_cases CASE RANK COUNT PORT``.

Prints what it found as JSON in its last line. What it is killed for, or raises, its test sees.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import hashlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import checkmate.torch
from checkmate import CheckmateError, OptionError, Result
from checkmate.torch import backend
from checkmate.torch._compat.profiler import memory_trace
from checkmate.torch.compilation.resident_account import Hooks
from checkmate.torch.distributed.consensus import RankError, job_ranks
from checkmate.torch.partition import split as partition
from checkmate.torch.steps.coordinator import coordinator
from checkmate.torch.steps.program import GraphInterface
from tests.torch.networks import mlp

WIDTH, ROWS = 256, 512
COMPILE_GRAPH = backend.compile_graph


class Net(nn.Module):
    """Layers with dropout, each a module of its own; what comes out is a loss."""

    def __init__(self, depth: int = 6, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = mlp(2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


class Plans:
    """The backend as users name it, with its options, and what it planned since."""

    def __init__(self, **options: Any) -> None:
        self.found: list[tuple[GraphInterface, Result]] = []
        hooks = Hooks(planned=lambda interface, result: self.found.append((interface, result)))
        backend.compile_graph = functools.partial(COMPILE_GRAPH, hooks=hooks)
        self.backend = functools.partial(backend.checkmate, options=options)

    @property
    def digests(self) -> list[str]:
        return [interface.graph.digest for interface, _ in self.found]

    @property
    def orders(self) -> list[list[int]]:
        return [list(result.plan.order) for _, result in self.found if result.plan is not None]

    @property
    def recomputes(self) -> int:
        return sum(len(order) - len(set(order)) for order in self.orders)


Wrap = Callable[[nn.Module, Any], tuple[Callable[..., Any], nn.Module]]


def trained(wrap: Wrap, rank: int, steps: int = 4, **options: Any) -> tuple[list[torch.Tensor], int, int, Plans]:
    """Everything that a few steps leave, bytes held when nothing runs, the peak of one more step above that, and the plans."""
    torch._dynamo.reset()
    gc.collect()  # what an earlier model holds would count
    torch.manual_seed(0)
    plans = Plans(**options)
    with memory_trace() as trace:
        net = Net()
        run, parameters = wrap(net, plans.backend)
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(30 + rank))
    held = sum(size for what, size in trace.events if what == "alloc")
    optimizer = torch.optim.SGD(parameters.parameters(), 1e-2)
    torch.manual_seed(20 + rank)
    left = []

    def step() -> None:
        loss = run(x)
        loss.backward()
        left.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(steps):
        step()
    with memory_trace() as trace:
        step()
    left += [_local(p).detach().clone() for p in parameters.parameters()]
    return [*left, torch.get_rng_state()], held, trace.peak(), plans


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def data_parallel(optimize: bool | str = True, inner: bool = False, **options: Any) -> Wrap:
    """A model in `DistributedDataParallel`, compiled as a whole or within.

    Parameters are equal already: what sends them lets its buffer go in a thread of its own, at any time, where no trace sees it.
    """
    options = {"init_sync": False, **options}

    def wrap(net: nn.Module, backend: Any) -> tuple[Callable[..., Any], nn.Module]:
        torch._dynamo.config.optimize_ddp = optimize
        if inner:
            net.compile(backend=backend)
            return DistributedDataParallel(net, **options), net
        return torch.compile(DistributedDataParallel(net, **options), backend=backend), net

    return wrap


def sharded(per_layer: bool = True, inner: bool = False, **options: Any) -> Wrap:
    """A model under `fully_shard`."""

    def wrap(net: nn.Module, backend: Any) -> tuple[Callable[..., Any], nn.Module]:
        if per_layer:
            for layer in net.layers:  # type: ignore[attr-defined]
                if inner:
                    layer.compile(backend=backend)
                fully_shard(layer, **options)
        fully_shard(net, **options)
        return net if inner else torch.compile(net, backend=backend), net

    return wrap


WRAPS: dict[str, Wrap] = {
    "ddp": data_parallel(optimize=False),
    "ddp-one-bucket": data_parallel(),
    "ddp-buckets": data_parallel(bucket_cap_mb=1),
    "ddp-inner": data_parallel(inner=True, optimize=False),
    "ddp-python-reducer": data_parallel("python_reducer"),
    "ddp-python-reducer-inner": data_parallel("python_reducer_without_compiled_forward"),
    "ddp-static": data_parallel(static_graph=True, optimize=False),
    "ddp-views": data_parallel(gradient_as_bucket_view=True, optimize=False),
    "ddp-unused": data_parallel(find_unused_parameters=True, optimize=False),
    "fsdp-layers": sharded(),
    "fsdp-layers-inner": sharded(inner=True),
    "fsdp-whole": sharded(per_layer=False),
    "fsdp-kept": sharded(reshard_after_forward=False),
}

# What comes and goes between graphs is counted at its most throughout: it takes room from the plans.
SHARES = {"fsdp-whole": 0.95, "fsdp-layers-inner": 0.85, "fsdp-layers": 0.85, "fsdp-kept": 0.85}


def equal(rank: int, *names: str) -> dict[str, Any]:
    """Training with a plan beside the same without one, for each way of wrapping the model."""
    found = {}
    for name in names:
        found[name] = _equal(rank, name)
        logging.getLogger(__name__).info("%s: %s", name, found[name])
    return found


def _equal(rank: int, name: str) -> dict[str, Any]:
    kept, held, most, _ = trained(WRAPS[name], rank)
    shared = torch.tensor(held + int(SHARES.get(name, 0.7) * most))
    dist.all_reduce(shared, op=dist.ReduceOp.MIN)  # gloo's threads free buffers late on one rank or the other
    budget = int(shared)
    left, held, peak, plans = trained(WRAPS[name], rank, budget=budget, time_limit_s=3)
    return {
        "same": len(kept) == len(left) and all(map(torch.equal, kept, left)),
        "budget": budget,
        "kept": held + most,
        "held": held,
        "peak": held + peak,
        "planned": [result.peak_bytes for _, result in plans.found],
        "resident": [interface.graph.resident_bytes for interface, _ in plans.found],
        "digests": plans.digests,
        "orders": hashlib.sha256(json.dumps(plans.orders).encode()).hexdigest(),
        "recomputes": plans.recomputes,
    }


def accumulating(rank: int) -> dict[str, Any]:
    """Four micro batches, of which the last exchanges gradients, beside ``aot_eager``, for ways of wrapping the model."""
    return {name: _accumulating(rank, name) for name in ("ddp", "ddp-views", "fsdp-layers")}


def _accumulating(rank: int, name: str) -> dict[str, Any]:
    found, added = [], 0
    for used, options in (("aot_eager", {}), ("checkmate", {"options": {"budget": "90%", "time_limit_s": 1}})):
        torch._dynamo.reset()
        coordinator().forget_steps()
        torch.manual_seed(0)
        wrapped: list[Any] = []

        def compile_with(model: Any, backend: str = used, options: dict[str, Any] = options) -> Any:
            return torch.compile(model, backend=backend, **options)  # type: ignore[call-overload]

        net = Net(2, 64)
        if name.startswith("ddp"):
            torch._dynamo.config.optimize_ddp = False
            wrapped.append(DistributedDataParallel(net, gradient_as_bucket_view=name == "ddp-views"))
        else:
            for layer in net.layers:
                fully_shard(layer)
            wrapped.append(fully_shard(net))
        run = compile_with(wrapped[0])
        for i in range(12):
            last = i % 4 == 3
            sync = contextlib.nullcontext() if last or not name.startswith("ddp") else wrapped[0].no_sync()
            if not name.startswith("ddp"):
                wrapped[0].set_requires_gradient_sync(last)
            with sync:
                run(torch.randn(32, 64, generator=torch.Generator().manual_seed(10 * rank + i))).backward()
            if last:
                found.append([_local(p.grad).clone() for p in net.parameters()])
                net.zero_grad(set_to_none=name != "ddp-views")
        plan = coordinator().step
        added = 0 if plan is None else sum(len(p.accumulated) for p in plan.programs)
    return {"same": all(torch.equal(a, b) for k in range(3) for a, b in zip(found[k], found[k + 3], strict=True)), "added": added}


def fused(rank: int) -> dict[str, Any]:
    """Compiled by Inductor, with a plan that every rank measured, beside the same without one."""
    torch._inductor.config.compile_threads = 1
    kept, held, most, _ = trained(WRAPS["ddp"], rank, compiler="inductor")
    budget = held + int(0.9 * most)
    left, held, peak, plans = trained(WRAPS["ddp"], rank, budget=budget, time_limit_s=3, compiler="inductor")
    (_, result), *_ = plans.found
    return {
        "same": len(kept) == len(left) and all(map(torch.equal, kept, left)),
        "budget": budget,
        "peak": held + peak,
        "orders": plans.orders,
        "recomputes": plans.recomputes,
        "remarks": result.remarks,
    }


def failing(rank: int) -> dict[str, Any]:
    """Ways in which one rank cannot plan, one after the other in one job."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        found["infeasible"] = _stopped(rank, budget="10KiB")
        found["other budget"] = _stopped(rank, budget="1GiB" if rank else "2GiB")
        found["other shape"] = _stopped(rank, rows=64 + rank)
        for name, broken in (("before", "prepare"), ("after", "apply_plan")):
            if rank == 1:
                patch.setattr(partition, broken, _out_of_order)
            found[name] = _stopped(rank)
            patch.undo()
        found["then"] = _stopped(rank)
    return found


def _out_of_order(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("out of order")


def _stopped(rank: int, rows: int = 64, **options: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    net = Net(1, 32)
    run = torch.compile(net, backend="checkmate", options={"budget": "90%", "time_limit_s": 3, **options})
    began = time.monotonic()
    try:
        run(torch.randn(rows, 32)).backward()
    except (CheckmateError, RuntimeError) as error:
        return {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - began}
    return {"error": "", "message": "", "seconds": time.monotonic() - began}


def lone(rank: int) -> dict[str, Any]:
    """After two steps one rank gets a batch of another shape: nobody else compiles."""
    net = Net(1, 32)
    torch._dynamo.config.optimize_ddp = False
    run = torch.compile(
        DistributedDataParallel(net), backend="checkmate", dynamic=False, options={"budget": "90%", "time_limit_s": 3}
    )
    for _ in range(2):
        run(torch.randn(64, 32)).backward()
        net.zero_grad(set_to_none=True)
    began = time.monotonic()
    try:
        run(torch.randn(64 + rank, 32)).backward()
    except RuntimeError as error:
        return {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - began}
    return {"error": "", "message": "", "seconds": time.monotonic() - began}


def alone(rank: int) -> dict[str, Any]:
    """Ranks with batches of different shapes, each with a plan of its own."""
    net, plans = Net(), Plans(budget="75%", time_limit_s=3, ranks="alone")
    torch._dynamo.config.optimize_ddp = False
    run = torch.compile(DistributedDataParallel(net), backend=plans.backend)
    run(torch.randn(ROWS + 64 * rank, WIDTH)).backward()
    assert net.layers[0].body[0].weight.grad is not None
    return {"recomputes": plans.recomputes, "gradient": net.layers[0].body[0].weight.grad.double().sum().item()}


class Head(nn.Module):
    """A network for a step with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(Layer(WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body:
            x = layer(x)
        return x


def step(rank: int) -> dict[str, Any]:
    """`checkmate.torch.compile` of models whose wrappers work between graphs."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(30 + rank))
    sharded = Head()
    fully_shard(sharded)
    for model in (DistributedDataParallel(Head(), init_sync=False), sharded):
        with pytest.raises(OptionError, match="exchange gradients and parameters between graphs"):
            checkmate.torch.compile(model, nn.functional.mse_loss, example=(x, x))
    return {"refused": True}


def stopped(rank: int) -> dict[str, Any]:
    """Rank 0, which holds the store, is stopped while it decides; what the others say after the timeout of the process group."""
    distributed_c10d._get_default_store().set_timeout(datetime.timedelta(seconds=3))
    began, ranks = time.monotonic(), job_ranks()
    assert ranks is not None
    with pytest.raises(RankError) as raised:
        ranks.decide("a plan", b"", lambda said: os.kill(os.getpid(), signal.SIGSTOP) or b"")
    sys.stdout.write(json.dumps({"message": str(raised.value), "seconds": time.monotonic() - began}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # gloo waits for rank 0


def main() -> None:
    """Run a case."""
    case, rank, count, port, *rest = sys.argv[1:]
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=int(rank),
        world_size=int(count),
        timeout=datetime.timedelta(seconds=120),
    )
    sys.stdout.write(json.dumps(CASES[case](int(rank), *rest)) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    each.__name__: each for each in (equal, accumulating, fused, failing, lone, alone, step, stopped)
}

if __name__ == "__main__":
    main()
