"""Trace a step for an emulated device or the one at hand, at the size of its example or another, within a time limit."""

from __future__ import annotations

import contextlib
import difflib
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from checkmate.core.budget import keep_all_bytes
from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.torch._compat.dispatch import FakeTensorMode
from checkmate.torch.chunking.choose import ChunkableStep
from checkmate.torch.emulate.device import EmulatedDevice, fake_inputs
from checkmate.torch.graph.storages import storage_key
from checkmate.torch.joint.capture import Capture
from checkmate.torch.measure.optimizer_state import state_bytes, state_is_known, step_temporary_bytes
from checkmate.torch.options import Options
from checkmate.torch.step.batch import Example
from checkmate.torch.step.programs import Loss
from checkmate.torch.step.recipe import StepSpec, spec_of_step
from checkmate.torch.step.tracing import trace_step


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShares:
    """How the time limit of `fits` is divided. Shares are of the seconds left when a search begins.

    Attributes:
        smallest_budget: Share of the search for the smallest budget: it has to prove, and rarely needs more.
        plan: Share of the search for the cheapest plan, the main result.
        largest_size: Share of the search for the largest batch or sequence; the rest is for a trace that confirms it.
        least_s: Seconds that every search gets even if the limit is over: without them it would find nothing.
        overtime_of_trace: Where tracing took all of the time, a search gets this share of the trace's seconds, so that the
            total stays in proportion.
        overtime_s: Most seconds of such overtime.
    """

    smallest_budget: float = 0.2
    plan: float = 0.5
    largest_size: float = 0.6
    least_s: float = 1.0
    overtime_of_trace: float = 0.25
    overtime_s: float = 10.0


SHARES = TimeShares()

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
"""Optimizers by name. Learning rates do not matter for memory; momentum does, since it is state."""


def optimizer_class(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    """The optimizer of a name, to be called with parameters.

    Args:
        name: Its name, in letters of any case.

    Raises:
        OptionError: No optimizer of that name is known.
    """
    known = OPTIMIZERS.get(name.lower())
    if known is None:
        near = difflib.get_close_matches(name.lower(), OPTIMIZERS, n=1, cutoff=0.0)[0]
        raise OptionError(
            f"no optimizer {name!r} is known by name; the nearest known one is {near!r}",
            hint=f"give one of {', '.join(OPTIMIZERS)}, or an optimizer",
        )
    return known


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A step traced for a device.

    Attributes:
        captured: The step, whose regions can be run piece by piece.
        spec: Its program, to which the updates in it refer: it has to exist as long as the step is captured again.
        whole: Whether the optimizer's updates are in the graph.
        resident_sizes: Bytes of each parameter and buffer, then of each tensor of the optimizer's state.
        parameter_bytes: Bytes of parameters and buffers.
        state_bytes: Bytes of the optimizer's state.
        update_bytes: Peak of ``optimizer.step()`` after the backward, resident bytes included; 0 in a whole step.
        stateless: Name of the optimizer if its state is unknown and not counted; "" if it is known.
    """

    captured: ChunkableStep[Capture]
    spec: StepSpec
    whole: bool
    resident_sizes: tuple[int, ...]
    parameter_bytes: int
    state_bytes: int
    update_bytes: int
    stateless: str

    @property
    def graph(self) -> Graph:
        """The graph of the step, in which nothing runs piece by piece."""
        return self.captured.whole.graph

    @property
    def keep_all_bytes(self) -> int:
        """Peak of the step if nothing is recomputed."""
        return max(keep_all_bytes(self.graph), self.update_bytes)


class DeviceTracer:
    """Traces one step for one device, and keeps the time.

    Args:
        model: As in `fits`, like ``loss``, ``example``, ``optimizer``, ``whole`` and ``autocast``.
        loss: The loss.
        example: A batch.
        optimizer: An optimizer, its name, or None.
        whole: Whether the optimizer's updates are planned with the rest.
        autocast: Type of `torch.autocast`, or None.
        target: The device; None for the one at hand, where costs and workspace are measured.
        until: Value of ``time.perf_counter()`` at which the time limit is over.
        clip_norm: As in `compile`.

    Attributes:
        trace_s: Seconds that the newest trace took.

    Raises:
        OptionError: No optimizer of that name is known.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss | None,
        example: Example,
        optimizer: torch.optim.Optimizer | str | None,
        whole: bool | None,
        autocast: torch.dtype | None,
        target: EmulatedDevice | None,
        until: float,
        clip_norm: float | None = None,
    ) -> None:
        if isinstance(optimizer, str):
            optimizer_class(optimizer)
        self.model, self.loss, self.example = model, loss, example
        self.optimizer, self.whole, self.autocast, self.target = optimizer, whole, autocast, target
        self.clip_norm, self.until = clip_norm, until
        self.trace_s = 0.0

    def share_s(self, share: float) -> float:
        """A share of the seconds left, or the overtime of `TimeShares` where that is more."""
        overtime = min(SHARES.overtime_s, SHARES.overtime_of_trace * self.trace_s)
        return max(SHARES.least_s, share * (self.until - time.perf_counter()), overtime)

    def has_time_for(self, seconds: float) -> bool:
        """Whether at least so many seconds are left."""
        return time.perf_counter() + seconds <= self.until

    def size(self, dim: int) -> int | None:
        """Size of a dimension of the example's tensors, or None if those that have the dimension differ."""
        sizes = {t.shape[dim] for t in _tensors(self.example) if t.ndim > dim}
        return sizes.pop() if len(sizes) == 1 else None

    def traced(self, dim: int = 0, size: int | None = None) -> TracedStep:
        """Trace the step for the device.

        Args:
            dim: A dimension of the example's tensors.
            size: Size of that dimension to trace with; that of the example by default.
        """
        began = time.perf_counter()
        given = self.optimizer if isinstance(self.optimizer, torch.optim.Optimizer) else None
        target = self.target
        granule = 1 if target is None else target.device.granule_bytes
        if target is not None:
            target.unknown_workspace.clear()
            target.cpu_only.clear()
        example = _resized(self.example, dim, size)
        with fake_inputs(example, self.model, self.loss, given) as batch:
            there = [*self.model.parameters(), *self.model.buffers()]
            trained = [p for p in there if p.requires_grad]
            sizes = {storage_key(t): _rounded(t, granule) for t in there}
            moved = [_rounded(p, granule) for p in trained]
            optimizer = optimizer_class(self.optimizer)(trained) if isinstance(self.optimizer, str) else given
            state = 0 if optimizer is None else state_bytes(optimizer, granule)
            spec = spec_of_step(self.model, self.loss, optimizer, batch, self.whole, 1, self.clip_norm, self.autocast)
            options = Options(reserve=state, costs="measured" if target is None else "estimated")
            captured = trace_step(spec, batch, options, target)
            update = 0
            if optimizer is not None and not spec.whole:
                kind = trained[0].device.type if target is None else target.device.kind
                update = captured.whole.graph.resident_bytes + sum(moved) + step_temporary_bytes(optimizer, kind)
            stateless = "" if optimizer is None or state_is_known(optimizer) else type(optimizer).__name__
        self.trace_s = time.perf_counter() - began
        return TracedStep(
            captured=captured,
            spec=spec,
            whole=spec.whole,
            resident_sizes=(*sizes.values(), *moved * (state // max(1, sum(moved)))),
            parameter_bytes=sum(sizes.values()),
            state_bytes=state,
            update_bytes=update,
            stateless=stateless,
        )


def _tensors(example: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor) and leaf.ndim]


def _resized(example: Any, dim: int, size: int | None) -> Any:
    """An example of another size, or of the same, in new storages: those of a slice of a data set are larger than it."""
    mode = FakeTensorMode()

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        shape = [size if d == dim and size is not None else n for d, n in enumerate(tensor.shape)]
        order = sorted(range(tensor.ndim), key=lambda d: -tensor.stride(d))  # such as channels last
        with contextlib.nullcontext() if tensor.device.type == "meta" else mode:
            return torch.empty_permuted(shape, order, dtype=tensor.dtype, device=tensor.device)

    return pytree.tree_map_only(torch.Tensor, resized, example)


def _rounded(tensor: torch.Tensor, granule: int) -> int:
    return -(-tensor.untyped_storage().nbytes() // granule) * granule
