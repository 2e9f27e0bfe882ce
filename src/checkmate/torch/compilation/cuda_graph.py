"""Whole steps that a CUDA graph replays: no launch of a kernel and no Python takes time.

The first steps run op by op: libraries choose kernels, and optimizers make their state. Then a step is captured, without running
a kernel, and replayed at once. A graph has the addresses and numbers of the captured step: inputs that change are copied to
buffers, and results are copied from the memory that the next replay overwrites. If a parameter, or the state or an option of an
optimizer, is not what it was, the steps begin again.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx

from checkmate.core.errors import OptionError
from checkmate.core.units import format_bytes
from checkmate.torch._compat.aot import BoxedRun, GraphSafeStates, default_generator
from checkmate.torch.graph.capturable import refuse_uncapturable, refuse_update
from checkmate.torch.graph.optimizer_ops import updates_of
from checkmate.torch.graph.storages import extent
from checkmate.torch.graph.symbolic import has_dynamic_sizes
from checkmate.torch.measure.allocator import ReservedMemory
from checkmate.torch.options import Options
from checkmate.torch.partition.copies import side_stream
from checkmate.torch.steps.program import version_of

_log = logging.getLogger("checkmate.torch")


class CudaGraph:
    """A CUDA graph, whose memory comes from the pool that was reserved for its plan."""

    def __init__(self, device: torch.device, memory: ReservedMemory | None) -> None:
        self._device, self._memory, self._stream = device, memory, side_stream(device, "capture")
        self._graph, self._results = torch.cuda.CUDAGraph(), list[Any]()
        self._states = GraphSafeStates(default_generator(device))

    @contextmanager
    def around(self) -> Iterator[None]:
        """Context of a step on the stream of the capture."""
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        pooled = nullcontext() if self._memory is None else self._memory.running()
        with torch.cuda.stream(self._stream), pooled, self._states.measuring():
            try:
                yield
            finally:  # after an exception too: kernels may still write parameters
                caller.wait_stream(self._stream)

    def capture(self, run: BoxedRun, args: list[Any]) -> None:
        """Capture a step."""
        for generator in self._states.generators:
            self._graph.register_generator_state(generator)
        pool = None if self._memory is None or self._memory.pool is None else self._memory.pool.id
        mode = "thread_local"  # other threads may pin the memory of batches meanwhile
        with self._states.capturing(), torch.cuda.graph(self._graph, pool=pool, stream=self._stream, capture_error_mode=mode):
            self._results = list(run(args))

    def replay(self) -> Sequence[Any]:
        """Run the step on the stream of the caller."""
        self._states.set()
        self._graph.replay()
        return self._results

    def reserved_bytes(self) -> int:
        """Bytes that the device's allocator holds."""
        return torch.cuda.memory_reserved(self._device)


GRAPHS = {"cuda": CudaGraph}
"""Type of device -> class of its graphs."""


class ReplayedStep:
    """A whole step that a graph replays. It exists before the step is planned: its buffers are resident memory."""

    def __init__(self, inputs: Sequence[Any], device: torch.device) -> None:
        self._device = device
        self.memory: ReservedMemory | None = None  # that was reserved for the plan
        self.budget_bytes: int | None = None
        self._buffers = [_like(t) for t in inputs if not _stays(t)]
        self._changing: list[int] | None = None  # positions of the arguments that are copied to them
        self._written: list[int] = []  # positions of the arguments that the step overwrites
        self._updates: list[tuple[int, int]] = []  # one of each optimizer and group
        self._graph: CudaGraph | None = None
        self._steps = 0  # that ran op by op since something changed
        self._fixed: tuple[Any, ...] = ()  # what the graph takes for constant, as the last step left it; empty before one is over
        self._told: set[str] = set()
        self._captured = self._over_budget = False

    def check(self, graph: fx.Graph) -> None:
        """Refuse a traced step that no graph can replay."""
        self._updates = refuse_uncapturable(graph, self._device)

    def __call__(self, run: BoxedRun, args: list[Any]) -> list[Any]:
        """Run a step; its results are copies."""
        given = [*args]
        args.clear()
        if self._changing is None:
            self._changing = [k for k, t in enumerate(given) if not _stays(t)]
            if len(self._changing) != len(self._buffers):  # AOTAutograd merged inputs
                self._buffers = [_like(given[k]) for k in self._changing]
        if not self._fixed or self._is_other(given):
            self._begin()
        if self._steps >= 3 and not self._over_budget:
            results = self._replayed(run, given)
            if results is not None:
                return results
        self._steps += 1
        before = [version_of(t) for t in given]
        assert self._graph is not None
        with self._graph.around():
            results = run([*given])
        self._written = [k for k, (t, version) in enumerate(zip(given, before, strict=True)) if version_of(t) != version]
        self._fixed = self._state(given)
        return copy.deepcopy(list(results))

    def _begin(self) -> None:
        self._graph, self._steps, self._captured = GRAPHS[self._device.type](self._device, self.memory), 0, False

    def _replayed(self, run: BoxedRun, given: list[torch.Tensor]) -> list[Any] | None:
        """The results of a replay, after a capture if there was none; None if it would exceed the budget."""
        graph, fixed = self._graph, dict(zip(self._changing or (), self._buffers, strict=True))
        assert graph is not None
        with torch.no_grad():
            for k, buffer in fixed.items():
                _flat(buffer).copy_(_flat(given[k]))
        if not self._captured and not self._capture(graph, run, [fixed.get(k, t) for k, t in enumerate(given)]):
            return None
        results = copy.deepcopy(list(graph.replay()))
        with torch.no_grad():
            for k in self._written:
                if k in fixed:
                    given[k].copy_(fixed[k])
                else:
                    torch.autograd.graph.increment_version(given[k])  # the backward of an eager graph that saved it is refused
        return results

    def _capture(self, graph: CudaGraph, run: BoxedRun, args: list[Any]) -> bool:
        for key, which in self._updates:
            refuse_update(updates_of(key), which, self._device)
        graph.capture(run, args)
        held = graph.reserved_bytes()
        self._captured = self.budget_bytes is None or held <= self.budget_bytes
        if not self._captured:
            self._over_budget = True
            self._begin()
            _log.warning(
                "with a CUDA graph the allocator holds %s, more than the budget of %s: all steps run op by op\nhint: raise the "
                "budget, or leave out mode='reduce-overhead'",
                *map(format_bytes, (held, self.budget_bytes or 0)),
            )
        return self._captured

    def _state(self, args: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Constants of a graph: addresses of arguments that stay, the state of optimizers, and their options."""
        optimizers = [updates_of(key).optimizer for key in {key: None for key, _ in self._updates}]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        return (
            [t.data_ptr() for k, t in enumerate(args) if k not in (self._changing or ())],
            [_constant(v) for optimizer in optimizers for state in optimizer.state.values() for v in state.values()],
            [{k: _constant(v) for k, v in group.items() if k not in ("params", "initial_lr")} for group in groups],
        )

    def _is_other(self, args: Sequence[torch.Tensor]) -> bool:
        """Whether the graph would run another step than this one; if so, it is told once what changed."""
        fixed, state = self._fixed, self._state(args)
        if fixed == state:
            return False
        pairs = zip(fixed[2], state[2], strict=False)
        names = {k for old, new in pairs for k in {*old, *new} if old.get(k) != new.get(k)}
        what = ", ".join(sorted(names)) or "the memory of a parameter, a buffer or the optimizer's state"
        if what not in self._told:
            self._told.add(what)
            _log.warning(
                "%s changed: steps run op by op until three of them had the same\nhint: change memory in place; a learning rate "
                "can change if it is a tensor: lr=torch.tensor(1e-3, device='%s'), fused=True",
                what,
                self._device,
            )
        return True


def replayed_step(inputs: Sequence[Any], options: Options, *, whole: bool) -> ReplayedStep | None:
    """The step that a graph is to replay, by the options; None if there is none."""
    if not options.replays:
        return None
    if not whole:
        raise OptionError(
            "mode='reduce-overhead' with compiler='eager' needs a whole step: a CUDA graph replays all of it",
            hint="use checkmate.torch.compile(model, loss, optimizer, example=(x, y)), or set compiler='inductor'",
        )
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    device = next((t.device for t in tensors if t.device.type in GRAPHS), None)
    if device is None or has_dynamic_sizes(inputs):
        why = "a CPU" if device is None else "sizes that vary"
        _log.warning("mode='reduce-overhead' asks for CUDA graphs, which have no effect on %s: the step is compiled without", why)
        return None
    return ReplayedStep(tensors, device)


def _constant(value: Any) -> Any:
    """The address of a tensor, and any other value itself, as they are in a graph."""
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def _stays(tensor: torch.Tensor) -> bool:
    """Whether Dynamo takes a tensor for one whose memory stays: a parameter, a buffer, or as `mark_static_address` marked it."""
    return getattr(tensor, "_dynamo_static_input_type", None) is not None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, from its first element to its last."""
    return tensor.detach().as_strided((extent(tensor.shape, tensor.stride()),), (1,))


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor of the same layout, which may have elements that share memory."""
    return torch.empty_like(_flat(tensor)).as_strided(tensor.shape, tensor.stride())
