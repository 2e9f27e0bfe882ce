"""Every private name of torch that this package uses, in one place.

Seen and tested in 2.13.0; 2.12 is the declared floor. A release that moves one of them breaks here, at
import, and nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from torch._C._dynamo.eval_frame import reset_code
from torch._C._profiler import _ExperimentalConfig
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import ShortenTraceback, TorchDynamoException, Unsupported
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._functorch.partitioners import default_partition, get_default_op_list
from torch._guards import TracingContext, detect_fake_mode
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.graph import _BoxedCodeGen
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

__all__ = [
    "COLLECTIVES",
    "BoxedRun",
    "Carrier",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "MemoryTrace",
    "OpOverload",
    "TorchDynamoException",
    "Unsupported",
    "aot_autograd",
    "as_boxed",
    "bound_by_hint",
    "boxed",
    "default_partition",
    "detect_fake_mode",
    "dynamo_config",
    "fake_on",
    "forgetting_this_frame",
    "functorch_config",
    "fusible_packets",
    "invoke_subgraph",
    "is_guessed",
    "is_tangent",
    "largest_asked",
    "largest_value",
    "memory_trace",
    "no_dispatch",
    "no_modes",
    "overwritten_inputs",
    "profiler_running",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "value_at_largest",
]

COLLECTIVES = ("_c10d_functional", "c10d_functional", "_dtensor")
"""Namespaces of ops that talk to other processes."""

_TRIED = 32  # sizes along a range

no_modes = _disable_current_modes


class Carrier(ShortenTraceback):
    """Takes an exception through Dynamo unwrapped.

    Dynamo turns what a backend raises into ``BackendCompilerFailed``, except a ``ShortenTraceback``: of
    that it raises what ``remove_dynamo_frames`` returns, and this one returns the exception it carries.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error), first_useful_frame=None)
        self.error = error

    def remove_dynamo_frames(self) -> BaseException:  # type: ignore[override]
        """The exception that the user is to see."""
        return self.error


def forgetting_this_frame() -> Callable[[], None] | None:
    """What makes Dynamo compile the frame that it compiles now once more at its next call; None outside of Dynamo."""
    try:
        code = InstructionTranslator.current_tx().output.root_tx.f_code  # type: ignore[union-attr]
    except AttributeError:
        return None
    return lambda: reset_code(code)


def fusible_packets() -> Iterable[Any]:
    """Ops that torch's own partitioner counts on Inductor to fuse."""
    return get_default_op_list().fusible_ops


def overwritten_inputs(count: int) -> frozenset[int] | None:
    """Which of so many inputs the graph that was compiled last overwrites; None if that is not known."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None or len(metadata.input_info) != count:  # inputs that alias were merged
        return None
    return frozenset(i for i, known in enumerate(metadata.input_info) if known.mutates_data or known.mutates_metadata)


BoxedRun = Callable[[list[Any]], Any]
"""What takes its arguments as one list and empties it."""


def boxed(module: torch.fx.GraphModule) -> BoxedRun:
    """The module as a callable that takes one list, empties it, and frees every tensor after its last use."""
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    return as_boxed(module.forward)


def as_boxed(function: BoxedRun) -> BoxedRun:
    """Mark a callable as taking one list that it empties."""

    def run(args: list[Any]) -> Any:
        return function(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def is_tangent(node: torch.fx.Node) -> bool:
    """Whether a placeholder of a joint graph is a tangent: the gradient of a forward output."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def fake_on(tensor: FakeTensor, device: str) -> FakeTensor:
    """The same traced tensor, of the same storage, as if on another device, which need not be there."""
    mode = tensor.fake_mode
    with in_kernel_invocation_manager(mode):
        return FakeTensor(mode, torch.Tensor._make_subclass(torch.Tensor, tensor), torch.device(device))


def profiler_running() -> bool:
    """Whether a torch profiler is on in this process; it cannot be nested."""
    return torch.autograd._profiler_enabled()


@dataclass(slots=True)
class MemoryTrace:
    """What the CPU allocator did, in order.

    Attributes:
        events: ``("alloc", bytes)``, negative where freed; ``("push", name)`` and ``("pop", "")`` of ops and ranges.
    """

    events: list[tuple[str, int | str]] = field(default_factory=list)

    def peak(self) -> int:
        """The most bytes held beyond what was there when the trace began."""
        held = peak = 0
        for what, amount in self.events:
            if what == "alloc":
                held += amount  # type: ignore[operator]
                peak = max(peak, held)
        return peak

    def ranges(self, name: str) -> list[int]:
        """Peak within each range of a name, beyond what was there when it began."""
        peaks: list[int] = []
        depth = held = peak = 0
        for what, detail in self.events:
            if what == "push" and (depth or detail == name):
                if not depth:
                    held = peak = 0
                depth += 1
            elif what == "pop" and depth:
                depth -= 1
                if not depth:
                    peaks.append(peak)
            elif what == "alloc" and depth:
                held += detail  # type: ignore[operator]
                peak = max(peak, held)
        return peaks


@contextmanager
def memory_trace() -> Iterator[MemoryTrace]:
    """Record what the CPU allocator does; the trace is filled on leaving.

    By the older of torch's two profilers: it starts in a millisecond and is silent, where Kineto takes
    more and writes to the terminal.
    """
    state, nothing = torch.autograd.ProfilerState.CPU, _ExperimentalConfig()
    trace = MemoryTrace()
    torch.autograd._enable_profiler_legacy(torch.autograd.ProfilerConfig(state, False, True, False, False, False, nothing))
    try:
        yield trace
    finally:
        threads = torch.autograd._disable_profiler_legacy()
        records = [r for thread in threads for r in thread]
        if len(threads) > 1:
            start = next(r for r in records if r.name() == "__start_profile")
            records.sort(key=start.cpu_elapsed_us)
        for r in records:
            kind = r.kind()
            if kind == "memory_alloc":
                trace.events.append(("alloc", r.cpu_memory_usage()))
            elif kind in ("push", "pop"):
                trace.events.append((kind, r.name()))


def is_guessed(symbol: torch.SymInt) -> bool:
    """Whether a symbolic size is one only because Dynamo saw it change, and not because the user asked for it."""
    if not dynamo_config.assume_static_by_default:  # dynamic=True
        return False
    constraints = _constraints(symbol)
    return not constraints or any(c is not None and c.warn_only for c in constraints)


def largest_asked(symbol: torch.SymInt) -> int | None:
    """The ``max`` that ``mark_dynamic`` was given for a symbolic size, if it was."""
    given = [c.vr.upper for c in _constraints(symbol) if hasattr(c, "vr") and c.vr.upper not in (None, int_oo)]
    return int(min(given)) if given else None


def _constraints(symbol: torch.SymInt) -> list[Any]:
    """What Dynamo noted of every dimension that has a symbolic size; of a number, or a stride, it notes nothing."""
    node = symbol.node
    found: list[Any] = []
    for tracked in node.shape_env.tracked_fakes or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", ())
        for size, constraint in zip(getattr(tracked.fake, "shape", ()), constraints, strict=False):
            if isinstance(size, torch.SymInt) and size.node.expr == node.expr:
                found.append(constraint)
    return found


def bound_by_hint(number: torch.SymInt) -> None:
    """Guard every symbol in a number that has no upper bound to be at most what it is."""
    env = number.node.shape_env
    sizes = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val  # before 2.13
    for symbol in number.node.expr.free_symbols:
        if env.var_to_range[symbol].upper is int_oo:
            env.evaluate_expr(sympy.Le(symbol, sizes[symbol]))


def value_at_largest(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> int | float | bool | None:
    """What a symbolic number is when every symbol in it is at its upper bound; None if one has no bound."""
    node = number.node
    upper = {s: node.shape_env.var_to_range[s].upper for s in node.expr.free_symbols}
    return None if int_oo in upper.values() else node.pytype(node.expr.xreplace(upper))


def largest_value(number: torch.SymInt) -> int | None:
    """The most that a symbolic size can be; None if one of its symbols has no bound.

    Where arithmetic on ranges does not show that a size only grows with its symbols, it is tried along the range of each.
    """
    node = number.node
    ranges = {s: node.shape_env.var_to_range[s] for s in node.expr.free_symbols}
    if any(r.upper is int_oo for r in ranges.values()):
        return None
    return _largest(node.expr, tuple(sorted(((s, int(r.lower), int(r.upper)) for s, r in ranges.items()), key=str)))


@functools.lru_cache(maxsize=4096)
def _largest(expression: Any, ranges: tuple[tuple[Any, int, int], ...]) -> int:
    corner = {s: sympy.Integer(upper) for s, _, upper in ranges}
    most = expression.xreplace(corner)
    if bound_sympy(expression, {s: ValueRanges(lower, upper) for s, lower, upper in ranges}).upper == most:
        return int(most)
    found = [int(most)]
    for symbol, lower, upper in ranges:
        for size in sorted({lower + (upper - lower) * i // _TRIED for i in range(_TRIED)}):
            with suppress(ZeroDivisionError):  # a size that no tensor can have
                value = expression.xreplace({**corner, symbol: sympy.Integer(size)})
                found += [int(value)] if value.is_Integer else []
    return max(found)
