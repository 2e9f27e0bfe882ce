"""Measured time and workspace of ops on the user's device; each distinct op is measured once and stored."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from checkmate.cost.store import CostStore, OpCost, quantise
from checkmate.frontend import progress
from checkmate.frontend.measured_costs import MeasuredCosts
from checkmate.torch._compat.dispatch import OpOverload, no_dispatch, no_modes, run_and_save_rng_state, run_with_rng_state
from checkmate.torch._compat.profiler import memory_trace, profiler_running
from checkmate.torch._compat.symbolic import value_at_upper_bounds
from checkmate.torch.graph.op_properties import is_collective, makes_views, unused_arguments
from checkmate.torch.graph.optimizer_ops import UPDATE, updates_of
from checkmate.torch.graph.rng import generators_restored
from checkmate.torch.graph.storages import concrete, leaves, storage_bytes, storage_key
from checkmate.torch.measure.errors import ProfilerBusyError
from checkmate.torch.measure.roofline import estimate_ns

_log = logging.getLogger("checkmate.torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingEffort:
    """How many times an op is run to measure its time; the fastest run counts.

    The minimum, because everything else that a machine does only adds time. A run that seems slow is given more chances:
    stored costs live long, and one reading of 50 ms on a busy machine was a tenth of a MobileNet's step (docs/decisions/0012).

    Attributes:
        repeats: Most runs of an op. Readings of one op spread over about a tenth, so one run is not enough.
        limit_ns: No further run once runs took so long together.
        slow_factor: A reading above so many times the roofline estimate is suspected to be disturbed. A slow kernel may be
            suspected wrongly, which costs only the additional runs.
        slow_ns: Ops faster than this are never suspected: in them the fixed cost of a call dominates, which no roofline has.
        agreement: As many readings as `repeats` within this factor of the fastest lift the suspicion: what disturbs runs makes
            them differ, and a slow kernel takes as long each time.
        slow_repeats: Most runs of a suspected op.
        slow_limit_ns: No further run of a suspected op once its runs took so long together.
        once_ns: No further run after one that took longer, unless it is suspected. What disturbs a run is small beside so long a
            time, and each matrix product in the head of a language model takes up to a second.
        block: Random numbers that are drawn for an input. They are repeated to fill it: drawing 200 MB takes 0.2 s, copying a
            quarter of that.
        again_ns: Ops that take longer are measured in several passes over all of them.
        least_passes: How often they are measured at least; the fastest run of all passes counts. A machine can be a fifth slower
            for a second, and all readings of an op that is measured then.
        converged: No further pass after one that made them faster, all together, by less than this share, unless the machine was
            slow meanwhile.
        slow_pace: The machine is slow where a reference op takes so many times the least that it took in this process.
        matters_ns: Ops that take less together have no more than the least number of passes.
        most_s: No further pass once passes took so many seconds: a machine may stay slow.
        later_repeats: Most runs of an op in each pass after the first.
        between_bytes: Bytes that are read between two runs of an op on a CPU, about a last-level cache, as the other ops of a
            step read theirs. What an op reads in a step is partly in the cache and partly not, its code too; an op that runs
            over and over finds all of it there (docs/decisions/0012).
    """

    repeats: int = 5
    limit_ns: int = 50_000_000
    slow_factor: float = 4.0
    slow_ns: int = 1_000_000
    agreement: float = 1.1
    slow_repeats: int = 25
    slow_limit_ns: int = 500_000_000
    once_ns: int = 250_000_000
    block: int = 1 << 18
    again_ns: int = 100_000
    least_passes: int = 3
    converged: float = 0.004
    slow_pace: float = 1.15
    matters_ns: int = 20_000_000
    most_s: float = 4.0
    later_repeats: int = 2
    between_bytes: int = 32 << 20


_EFFORT = TimingEffort()
_METHOD = "cache-shared"
"""How times are measured, as part of an op's signature: times measured otherwise are not mixed with these."""


class Profiler:
    """Costs of FX nodes, measured or read from a store.

    Args:
        store: Where measured costs are kept; the user's cost cache by default.
    """

    def __init__(self, store: CostStore | None = None) -> None:
        self._costs = MeasuredCosts(signature=signature, measure=measure_nodes, estimate=_without_running, store=store)

    def __call__(self, nodes: Sequence[fx.Node]) -> list[OpCost]:
        """Cost of each node; nodes with the same `signature` share one measurement."""
        return self._costs(nodes)


def _without_running(node: fx.Node) -> OpCost:
    """Cost of an op that cannot be run in isolation.

    A collective on the CPU runs in gloo, which copies the result once.
    """
    copied = is_collective(node) and not _on_cuda(node)
    return OpCost(estimate_ns(node), sum(map(storage_bytes, leaves(node.meta.get("val")))) if copied else 0)


def signature(node: fx.Node) -> str | None:
    """Text of all on which the cost of an op depends; None for an op that cannot be run in isolation."""
    target, args, kwargs = _call(node)
    if not isinstance(target, OpOverload) or is_collective(node):
        return None
    if target is UPDATE:
        args = (*args[:2], updates_of(args[2]).describe(args[3]))
    parts = [str(target), _describe(args), _describe(kwargs), f"threads={torch.get_num_threads()}", f"torch={torch.__version__}"]
    devices = {t.device for t in _tensors(node, args, kwargs)}
    parts += [_METHOD] * any(d.type == "cpu" for d in devices)
    parts += sorted(torch.cuda.get_device_name(d) for d in devices if d.type == "cuda")
    return " ".join(parts)


def measure_nodes(nodes: Mapping[str, fx.Node]) -> dict[str, OpCost]:
    """Measure time and workspace of nodes by running them on tensors of the traced shapes.

    Args:
        nodes: Signature to node.

    Returns:
        Signature to cost. Nodes that fail are logged and left out.

    Raises:
        ProfilerBusyError: Another torch profiler is active.
    """
    if profiler_running():
        raise ProfilerBusyError(
            f"the workspace of {len(nodes)} ops has to be measured, and another torch profiler is active",
            hint="call the compiled function once before you start the profiler: measurements are stored",
        )
    with generators_restored(), no_dispatch(), no_modes(), torch.no_grad():
        other = torch.ones(_EFFORT.between_bytes, dtype=torch.uint8, device="cpu")
        costs: dict[str, OpCost | None] = {}
        for key, node in progress.counted([*nodes.items()], "measuring costs"):
            costs[key] = _measured_or_warned(node, other)
        found = {k: cost for k, cost in costs.items() if cost is not None}
        again = {k: nodes[k] for k, cost in found.items() if _is_measured_again(nodes[k], cost)}
        pace, began = _Pace(), time.perf_counter()
        for number in itertools.count(2) if again else ():
            before, slow = sum(found[k].cost_ns for k in again), pace.is_slow()
            for key, node in progress.counted([*again.items()], "measuring costs"):
                found[key] = found[key]._replace(cost_ns=min(found[key].cost_ns, quantise(fastest_run_ns(node, other))))
            gained = before - sum(found[k].cost_ns for k in again)
            converged = gained <= _EFFORT.converged * before and not (pace.is_slow() or slow)
            converged |= before < _EFFORT.matters_ns
            if number >= _EFFORT.least_passes and (converged or time.perf_counter() - began > _EFFORT.most_s):
                break
    return found


class _Pace:
    """How fast a machine is now, by a reference op: a matrix product, and a sum over more than a cache holds."""

    _least_ns: ClassVar[dict[int, int]] = {}  # by the number of threads, in this process

    def __init__(self) -> None:
        self._matrix, self._row = torch.ones(384, 384), torch.ones(4 << 20)

    def is_slow(self) -> bool:
        """Whether the reference op is slower than it was before."""
        now, threads, took = clock(), torch.get_num_threads(), list[int]()
        for _ in range(3):
            began = now()
            torch.mm(self._matrix, self._matrix)
            self._row.sum()
            took.append(now() - began)
        least = self._least_ns[threads] = min(*took, self._least_ns.get(threads, min(took)))
        return min(took) > _EFFORT.slow_pace * least


def _call(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Target, arguments and keyword arguments to measure; ops that save or replay a random state stand for the op inside."""
    if node.target is run_and_save_rng_state:
        return node.args[0], tuple(node.args[1:]), dict(node.kwargs)
    if node.target is run_with_rng_state:
        return node.args[1], tuple(node.args[2:]), dict(node.kwargs)
    skip = unused_arguments(node)
    return node.target, tuple(None if i in skip else a for i, a in enumerate(node.args)), dict(node.kwargs)


def _describe(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val")
        if isinstance(value, torch.Tensor):
            shape, stride = _layout(value)
            return f"{value.dtype}{shape}{stride}@{value.device.type}"
        return f"sym {_materialised(value)}"
    if isinstance(argument, (list, tuple)):
        return "(" + ",".join(_describe(a) for a in argument) + ")"
    if isinstance(argument, dict):
        return "{" + ",".join(f"{k}:{_describe(v)}" for k, v in sorted(argument.items())) + "}"
    return repr(argument)


def _layout(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    return [concrete(s) for s in tensor.shape], [concrete(s) for s in tensor.stride()]


def _tensors(node: fx.Node, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found = leaves(node.meta.get("val"))
    fx.map_arg((args, kwargs), lambda n: found.extend(leaves(n.meta.get("val"))))
    return found


def _on_cuda(node: fx.Node) -> bool:
    return any(t.device.type == "cuda" for t in leaves(node.meta.get("val")))


def _materialised(value: Any, *, fill: bool = True) -> Any:
    """A real tensor with the shape and strides of a traced one (expanded dimensions stay expanded), or a plain number.

    Args:
        value: The traced value.
        fill: Whether the content of a tensor is read.
    """
    if isinstance(value, torch.Tensor):
        shape, stride = _layout(value)
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0
        flat = torch.empty(extent, dtype=value.dtype, device=value.device)
        # Time hardly depends on values, except denormals and NaN, which are slow on CPUs. Integers are 0, so that they are
        # valid indices, and booleans are true, so that a mask masks nothing.
        if not fill:
            pass  # pages that are not written take no time
        elif value.dtype.is_floating_point or value.dtype.is_complex:
            flat.fill_(0.5) if value.dtype.itemsize == 1 or value.dtype.is_complex else _fill(flat)
        else:
            flat.fill_(value.dtype is torch.bool)
        return flat.as_strided(shape, stride)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        largest = value_at_upper_bounds(value)
        return value.node.hint if largest is None else largest
    if isinstance(value, (list, tuple)):
        return type(value)(_materialised(v, fill=fill) for v in value)
    return value


def _fill(flat: torch.Tensor) -> None:
    """Fill a tensor with random numbers that repeat."""
    block = flat[: _EFFORT.block].uniform_(0.1, 0.9)
    for part in flat[block.numel() :].split(block.numel()):
        part.copy_(block[: part.numel()])


def _ready_to_run(node: fx.Node) -> Callable[[], Any]:
    target, args, kwargs = _call(node)
    fill = not makes_views(node)
    real_args, real_kwargs = fx.map_arg((args, kwargs), lambda n: _materialised(n.meta.get("val"), fill=fill))
    if target is UPDATE:
        parameter, gradient, optimizer, which = real_args
        update = updates_of(optimizer).clone_for_measurement(which, parameter)
        update(parameter, gradient)  # the first call allocates the optimizer's state, which is resident and not workspace
        return lambda: update(parameter, gradient)
    return lambda: target(*real_args, **real_kwargs)


def _measured_or_warned(node: fx.Node, other: torch.Tensor) -> OpCost | None:
    try:
        time_ns, workspace_bytes = _cuda_cost(node) if _on_cuda(node) else _cpu_cost(node, other)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError) as error:
        _log.warning(
            "%s (%s) could not be measured; its time is estimated and its workspace taken as 0: %s", node.name, node.target, error
        )
        return None
    return OpCost(quantise(time_ns), workspace_bytes)


def _cpu_cost(node: fx.Node, other: torch.Tensor) -> tuple[float, int]:
    """Nanoseconds of the fastest run and workspace of an op on the CPU; the other tensor is read between runs."""
    run, now = _ready_to_run(node), clock()
    slow = max(_EFFORT.slow_factor * estimate_ns(node), _EFFORT.slow_ns)
    other.max()
    with memory_trace() as trace:
        began = now()
        out = run()
        first = now() - began
    del out
    # Workspace is the peak of the allocator, less the outputs.
    workspace = max(0, trace.peak() - _new_bytes(node))
    took: list[int] = []
    fastest = first
    while not (_EFFORT.once_ns < fastest <= slow):
        other.max()
        began = now()
        out = run()
        took.append(now() - began)
        del out
        fastest = min(first, *took)
        agreeing = sum(t <= _EFFORT.agreement * fastest for t in took)
        suspected = fastest > slow and agreeing < _EFFORT.repeats
        repeats = _EFFORT.slow_repeats if suspected else _EFFORT.repeats
        limit_ns = _EFFORT.slow_limit_ns if suspected else _EFFORT.limit_ns
        agreed = first if first <= _EFFORT.agreement * fastest else 0
        if len(took) >= repeats or agreed + sum(took) > limit_ns:
            break
    return fastest, workspace


def _is_measured_again(node: fx.Node, known: OpCost) -> bool:
    """Whether an op is measured in a later pass: short ones do not count, and one run of the longest is enough."""
    return _EFFORT.again_ns <= known.cost_ns <= _EFFORT.once_ns and not _on_cuda(node)


def fastest_run_ns(node: fx.Node, other: torch.Tensor) -> int:
    """Nanoseconds of the fastest run of an op on the CPU in a later pass.

    Args:
        node: The op.
        other: A tensor that is read before each run.
    """
    run, now = _ready_to_run(node), clock()
    took: list[int] = []
    while len(took) < _EFFORT.later_repeats and sum(took) <= _EFFORT.limit_ns:
        other.max()
        began = now()
        out = run()
        took.append(now() - began)
        del out
    return min(took)


def clock() -> Callable[[], int]:
    """The clock for an op on the CPU.

    On one thread, the process's CPU time excludes other processes. On several threads wall time has to be used, and a run waits
    for any worker thread that the scheduler preempted, tens of milliseconds: a slow reading is repeated.
    """
    return time.process_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns


def _cuda_cost(node: fx.Node) -> tuple[float, int]:
    return _cuda_time_ns(_ready_to_run(node)), int(_cuda_workspace(node))


def _cuda_time_ns(run: Callable[[], Any]) -> float:
    run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best = float("inf")
    for _ in range(_EFFORT.repeats):
        begin.record()
        out = run()
        end.record()
        end.synchronize()
        del out
        best = min(best, begin.elapsed_time(end) * 1e6)
    return best


def _cuda_workspace(node: fx.Node) -> float:
    run = _ready_to_run(node)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del out
    return max(0, peak - _new_bytes(node))


def _new_bytes(node: fx.Node) -> int:
    """Bytes of output storages that are not storages of inputs: the part of an op's peak that is not workspace."""
    _, args, kwargs = _call(node)
    given: set[int] = set()
    fx.map_arg((args, kwargs), lambda n: given.update(storage_key(t) for t in leaves(n.meta.get("val"))))
    made = {storage_key(t): storage_bytes(t) for t in leaves(node.meta.get("val"))}
    return sum(size for key, size in made.items() if key not in given)
