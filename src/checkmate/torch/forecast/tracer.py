"""Trace a step for an emulated device or the current one, at the size of its example or another, within a time limit."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
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

    def size(self, dim: int) -> int | None:
        """Size of a dimension of the example's tensors, or None if their sizes differ."""
        leaves = pytree.tree_leaves(self.recipe.example)
        sizes = {t.shape[dim] for t in leaves if isinstance(t, torch.Tensor) and t.ndim > dim}
        return sizes.pop() if len(sizes) == 1 else None

    def traced(self, dim: int = 0, size: int | None = None) -> TracedStep:
        """The step at a size of a dimension of the example's tensors, by default the size of the example."""
        began = time.perf_counter()
        recipe, target = self.recipe, self.target
        if not isinstance(recipe.model, torch.nn.Module):
            raise OptionError("a forecast is for a model, and the step is a function", hint="give the model and its loss")
        granule = 1 if target is None else target.device.granule_bytes
        if target is not None:
            target.unknown_workspace.clear()
            target.cpu_only.clear()
        example = _resized(recipe.example, dim, size)
        with fake_inputs(example, recipe.model, recipe.loss, recipe.optimizer) as batch:
            there = [*recipe.model.parameters(), *recipe.model.buffers()]
            trained = [p for p in there if p.requires_grad]
            sizes = {storage_key(t): _rounded(t, granule) for t in there}
            on_host = {storage_key(t) for t in there if self.host is not None and is_frozen(t)}
            moved = [_rounded(p, granule) for p in trained]
            optimizer = recipe.optimizer
            state = 0 if optimizer is None else state_bytes(optimizer, granule)
            spec = replace(recipe, example=batch).spec()
            options = Options(reserve=state, costs="measured" if target is None else "estimated")
            if self.host is not None:
                options = replace(options, budget="100%", host=self.host.bytes)
            graph = trace_step(spec, batch, options, target).whole.graph
            update = 0
            if optimizer is not None and not spec.whole:
                kind = trained[0].device.type if target is None else target.device.kind
                update = graph.resident_bytes + sum(moved) + step_temporary_bytes(optimizer, kind)
            unknown = optimizer is not None and not optimizer.state and missing_state_bytes(optimizer) is None
        self.trace_s = time.perf_counter() - began
        return TracedStep(
            graph=graph,
            whole=spec.whole,
            resident_sizes=(*(size for key, size in sizes.items() if key not in on_host), *moved * (state // max(1, sum(moved)))),
            parameter_bytes=sum(sizes.values()),
            state_bytes=state,
            update_bytes=update,
            stateless=type(optimizer).__name__ if unknown else "",
        )


def _resized(example: Any, dim: int, size: int | None) -> Any:
    """An example of another size, or of the same, in new storages: the storage of a slice may be a whole data set."""
    mode = FakeTensorMode()

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        shape = [size if d == dim and size is not None else n for d, n in enumerate(tensor.shape)]
        order = sorted(range(tensor.ndim), key=lambda d: -tensor.stride(d))  # for example channels last
        with contextlib.nullcontext() if tensor.device.type == "meta" else mode:
            return torch.empty_permuted(shape, order, dtype=tensor.dtype, device=tensor.device)

    return pytree.tree_map_only(torch.Tensor, resized, example)


def _rounded(tensor: torch.Tensor, granule: int) -> int:
    return -(-tensor.untyped_storage().nbytes() // granule) * granule
