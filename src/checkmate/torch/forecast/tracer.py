"""Trace a step for an emulated device or the current one, at the size of its example or another, within a time limit."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from checkmate.core.budget import keep_all_bytes
from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.plan import HostMemory
from checkmate.torch._compat.dispatch import FakeTensorMode
from checkmate.torch.emulate.device import EmulatedDevice, fake_inputs
from checkmate.torch.graph.host_weights import is_frozen
from checkmate.torch.graph.storages import storage_key
from checkmate.torch.measure.device_memory import missing_state_bytes, state_bytes, step_temporary_bytes
from checkmate.torch.options import Options
from checkmate.torch.step.recipe import StepRecipe
from checkmate.torch.step.tracing import trace_step

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
"""Optimizers by name. Learning rates do not matter for memory; momentum does, since it is state."""


def optimizer_class(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    """The optimizer class of a name, in any case of letters; call it with parameters."""
    if name.lower() not in OPTIMIZERS:
        raise OptionError(f"no optimizer {name!r} is known by name", hint=f"give one of {', '.join(OPTIMIZERS)}, or an optimizer")
    return OPTIMIZERS[name.lower()]


@dataclass(frozen=True, slots=True)
class Growing:
    """Dimensions of the tensors of an example that grow together, in proportion."""

    name: str
    size: int  # in the example, of the first
    dims: tuple[tuple[int, ...], ...]  # of each tensor

    @classmethod
    def along(cls, example: Any, name: str, dim: int) -> Growing | None:
        """One dimension of all tensors that have it; None if their sizes differ."""
        leaves = [t for t in pytree.tree_leaves(example) if isinstance(t, torch.Tensor)]
        sizes = {t.shape[dim] for t in leaves if t.ndim > dim}
        return cls(name, sizes.pop(), tuple((dim,) if t.ndim > dim else () for t in leaves)) if len(sizes) == 1 else None

    @classmethod
    def named(cls, example: Any, dynamic_shapes: Any) -> Growing:
        """The dimensions that ``dynamic_shapes`` names, as `torch.export.export` takes it; a name may be a string, too."""
        leaves, structure = pytree.tree_flatten(example)
        hint = 'give for each element of the example None or a mapping, such as dynamic_shapes=(None, {0: "edges"})'
        try:
            given = structure.flatten_up_to(type(example)(dynamic_shapes))
        except (TypeError, ValueError) as error:
            raise OptionError(f"dynamic_shapes={dynamic_shapes!r} is not like the example", hint=hint) from error
        sizes: dict[str, int] = {}
        dims = list[tuple[int, ...]]()
        for leaf, names in zip(leaves, given, strict=True):
            if not isinstance(leaf, torch.Tensor):
                continue
            named = {d: n for d, n in (names.items() if isinstance(names, Mapping) else enumerate(names or ())) if n is not None}
            for d, n in named.items():
                name = n if isinstance(n, str) else getattr(n, "__name__", "")
                if not name or d not in range(leaf.ndim):
                    raise OptionError(
                        f"dynamic_shapes: a tensor {tuple(leaf.shape)} has no dimension {d} to name {n!r}", hint=hint
                    )
                if sizes.setdefault(name, leaf.shape[d]) != leaf.shape[d]:
                    shown = f"{name!r} has the sizes {sizes[name]} and {leaf.shape[d]}"
                    raise OptionError(f"dynamic_shapes: {shown}", hint="give each size another name")
            dims.append(tuple(named))
        if not sizes:
            raise OptionError("dynamic_shapes names no dimension", hint=hint)
        name, size = next(iter(sizes.items()))
        return cls(name, size, tuple(dims))

    def resized(self, example: Any, size: int) -> Any:
        """An example of another size, or of the same, in new storages: the storage of a slice may be a whole data set."""
        mode, each = FakeTensorMode(), iter(self.dims)

        def resized(tensor: torch.Tensor) -> torch.Tensor:
            grows = next(each, ())
            shape = [-(-n * size // self.size) if d in grows else n for d, n in enumerate(tensor.shape)]
            order = sorted(range(tensor.ndim), key=lambda d: -tensor.stride(d))  # for example channels last
            with contextlib.nullcontext() if tensor.device.type == "meta" else mode:
                return torch.empty_permuted(shape, order, dtype=tensor.dtype, device=tensor.device)

        return pytree.tree_map_only(torch.Tensor, resized, example)


_NOTHING = Growing("", 1, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A step traced for a device."""

    graph: Graph
    whole: bool  # whether the optimizer's updates are in the graph
    resident_sizes: tuple[int, ...]  # bytes of each parameter and buffer, then of each tensor of the optimizer's state
    parameter_bytes: int  # buffers included
    state_bytes: int
    update_bytes: int  # peak of ``optimizer.step()`` after the backward, resident bytes included; 0 in a whole step
    stateless: str  # name of the optimizer if its state is unknown and not counted

    @property
    def keep_all_bytes(self) -> int:
        """Peak of the step if nothing is recomputed."""
        return max(keep_all_bytes(self.graph), self.update_bytes)


@dataclass(slots=True)
class DeviceTracer:
    """Traces one step for one device within a time limit."""

    recipe: StepRecipe
    until: float  # value of ``time.perf_counter()`` at the end of the time limit
    target: EmulatedDevice | None = None  # None for the current device, on which costs and workspace are measured
    host: HostMemory | None = None  # from which frozen weights may be fetched
    trace_s: float = 0.0  # seconds of the newest trace

    def share_s(self, share: float) -> float:
        """Seconds for a search: a share of the remaining time, at least the second without which it would find nothing.

        If tracing took all of the time, it is a quarter of the trace's seconds: the total stays in proportion.
        """
        return max(1.0, share * (self.until - time.perf_counter()), min(10.0, 0.25 * self.trace_s))

    def has_time_for(self, seconds: float) -> bool:
        """Whether that much time is left."""
        return time.perf_counter() + seconds <= self.until

    def traced(self, growing: Growing = _NOTHING, size: int = 1) -> TracedStep:
        """The step at the size of its example, or at another size of some dimensions."""
        began = time.perf_counter()
        recipe, target = self.recipe, self.target
        granule = 1 if target is None else target.device.granule_bytes
        if target is not None:
            target.unknown_workspace.clear()
            target.cpu_only.clear()
        example = growing.resized(recipe.example, size)
        modules, optimizers = recipe.owners()
        with fake_inputs(example, *modules, *optimizers) as batch:
            there = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}.values()
            trained = [p for p in there if p.requires_grad]
            sizes = {storage_key(t): _rounded(t, granule) for t in there}
            on_host = {storage_key(t) for t in there if self.host is not None and is_frozen(t)}
            moved = [_rounded(p, granule) for p in trained]
            state = sum(state_bytes(optimizer, granule) for optimizer in optimizers)
            spec = replace(recipe, example=batch).spec()
            options = Options(reserve=state, costs="measured" if target is None else "estimated")
            if self.host is not None:
                options = replace(options, budget="100%", host=self.host.bytes)
            graph = trace_step(spec, batch, options, target).whole.graph
            update = 0
            if optimizers and not spec.whole:
                kind = trained[0].device.type if target is None else target.device.kind
                update = graph.resident_bytes + sum(moved) + step_temporary_bytes(optimizers[0], kind)
            unknown = [type(o).__name__ for o in optimizers if not o.state and missing_state_bytes(o) is None]
        self.trace_s = time.perf_counter() - began
        return TracedStep(
            graph=graph,
            whole=spec.whole,
            resident_sizes=(*(size for key, size in sizes.items() if key not in on_host), *moved * (state // max(1, sum(moved)))),
            parameter_bytes=sum(sizes.values()),
            state_bytes=state,
            update_bytes=update,
            stateless=", ".join(unknown),
        )


def _rounded(tensor: torch.Tensor, granule: int) -> int:
    return -(-tensor.untyped_storage().nbytes() // granule) * granule
