"""Records what a step does: its windows in order, and which storages they are given, make and hold."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from checkmate.torch.graph.storages import storage_bytes, storage_key, strided_parts
from checkmate.torch.steps.program import PlannedGraph

StepSequence = tuple[tuple[int, int, frozenset[int] | None], ...]
"""Identity of a step: graph and run of each window, and the undefined tangents of a backward."""


@dataclass(eq=False, slots=True)
class Run:
    """One forward of a step, and its backward if that has run.

    Attributes:
        planned: The graph.
        given: Storage of each input of the forward; None for what is no tensor.
        made: Storage of each output of the forward.
        leaves: Inputs that are leaves and require a gradient, by weak references, with their position.
        undefined: Tangents that were None in the backward.
        tangents: Storage of each tangent of the backward.
        gradients: Storage of each result of the backward.
        held_bytes: What eager code held and windows had returned when the forward began.
    """

    planned: PlannedGraph
    given: tuple[int | None, ...]
    made: tuple[int | None, ...] = ()
    leaves: tuple[tuple[int, Callable[[], torch.Tensor | None]], ...] = ()
    undefined: frozenset[int] = frozenset()
    tangents: tuple[int | None, ...] = ()
    gradients: tuple[int | None, ...] = ()
    held_bytes: int = 0


def gradient_parts(leaves: Iterable[Callable[[], torch.Tensor | None]]) -> Iterator[torch.Tensor]:
    """The tensors that have the storages of gradients.

    Args:
        leaves: Tensors that may have a gradient, by weak references.
    """
    tensors = (leaf() for leaf in leaves)
    return (part for t in tensors if t is not None and t.grad is not None for part in strided_parts(t.grad))


def _no_storage() -> None:
    """Stands for the storages that an abandoned forward saved."""


@dataclass(eq=False)
class StepRecorder:
    """The windows of the present step and its storages, which it does not keep alive.

    A storage is known by the order in which it was seen, since addresses are reused.

    Attributes:
        forwards: All forwards of the step, in the order in which they began.
        runs: Those whose backward runs.
        abandoned: Forwards whose backward will not run; they are part of the eager code.
        windows: Forward and backward windows in the order in which they began: index of the run, and whether it is the backward.
        sizes: Bytes of each storage.
        sources: The window that made each storage; None for one that a window was given first.
        last: The last gap in which a storage was alive, of those that were freed: gap ``w`` is before window ``w``.
        overwritten: Window in or after which a storage was found to have changed.
        existing: Run and input of every leaf that had a gradient when its forward began.
        cleared: Those of them that had none any more when their backward began.
        watched: Whether eager code is seen.
        over: Whether the backward of the step is over, or another step has begun.
        eager_peak_bytes: The most that eager code held at any time of the step.
        eager_inputs: Storages that existed before the step and that eager code alone reads, such as the labels of a loss outside.
        eager_leaves: Leaves that require a gradient and that eager code reads, by weak references, by their identity.
        keeps_eager_gradients: Whether any of those had a gradient when the first backward began.
        eager: The window after each storage that eager code allocated.
        eager_bytes: Bytes of those that are alive.
        brief: Storages that eager code allocated and freed between the same two windows.
        freed: Storages that were freed between two windows, and not while a window ran.
        peaks: The most that eager code held and windows had returned, before each window.
        call_peaks: The same until each call of a compiled function was over, where eager code took memory in it.
        made_in: The call in which each storage was seen first, counted from that of the first window.
    """

    forwards: list[Run] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    abandoned: list[Run] = field(default_factory=list)
    windows: list[tuple[int, bool]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    sources: list[int | None] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)
    overwritten: dict[int, int] = field(default_factory=dict)
    existing: set[tuple[int, int]] = field(default_factory=set)
    cleared: set[tuple[int, int]] = field(default_factory=set)
    watched: bool = False
    over: bool = False
    eager_peak_bytes: int = 0
    eager_inputs: set[int] = field(default_factory=set)
    eager_leaves: dict[int, Callable[[], torch.Tensor | None]] = field(default_factory=dict)
    keeps_eager_gradients: bool = False
    eager: dict[int, int] = field(default_factory=dict)
    eager_bytes: int = 0
    brief: set[int] = field(default_factory=set)
    freed: set[int] = field(default_factory=set)
    peaks: dict[int, int] = field(default_factory=dict)
    call_peaks: dict[int, dict[int, int]] = field(default_factory=dict)
    made_in: list[int] = field(default_factory=list)
    _calls: int = 0  # of compiled functions that are over
    _running: bool = False  # whether a window runs now
    _versions: list[tuple[int, Callable[[], torch.Tensor | None], int]] = field(default_factory=list)  # of inputs
    _returned_bytes: int = 0  # of storages that windows made and that are alive
    _returned_at: int = 0  # both when the newest window ended
    _gradients: dict[int, int] = field(default_factory=dict)
    _finalizers: list[weakref.finalize[..., Any]] = field(default_factory=list)
    _present: dict[int, int] = field(default_factory=dict)
    _storages: list[Callable[[], torch.UntypedStorage | None]] = field(default_factory=list)

    def allocated(self, tensor: torch.Tensor) -> None:
        """Record that eager code allocated the storage of a tensor."""
        if self.over or storage_key(tensor) in self._present:
            return
        storage = self._storage(tensor, None, {})
        self.eager[storage] = len(self.windows)
        self.eager_bytes += self.sizes[storage]
        self._note_eager()

    def read(self, tensor: torch.Tensor) -> None:
        """Record that eager code reads a tensor."""
        key = storage_key(tensor)
        if self.over or key in self._gradients:
            return
        if tensor.is_leaf and tensor.requires_grad:
            self.eager_leaves[id(tensor)] = weakref.ref(tensor)
        if key in self._present:
            return
        self.eager_inputs.add(self._storage(tensor, None, {}))

    def keeps(self, tensor: torch.Tensor) -> None:
        """Record that a tensor is state of an optimizer: later steps are given it, and eager code does not make it again."""
        storage = self._present.get(storage_key(tensor), -1)
        if not self.over and storage in self.eager:
            del self.eager[storage]
            self.eager_bytes -= self.sizes[storage]
            self.eager_inputs.add(storage)

    def exchanged(self, tensor: torch.Tensor) -> None:
        """Record that a collective of the backward exchanges a tensor: a bucket of gradients, if the graphs count those."""
        if any(run.planned.resident.wrappers_bytes for run in self.runs):
            self.eager_inputs.discard(self._present.get(storage_key(tensor), -1))

    @property
    def eager_input_bytes(self) -> int:
        """Bytes of `eager_inputs` that no window is given."""
        given = {s for run in (*self.runs, *self.abandoned) for s in run.given}
        return sum(self.sizes[s] for s in self.eager_inputs - given)

    def made(self) -> dict[int, int]:
        """Bytes of each storage that the step has made and that is alive, by its key."""
        return {key: self.sizes[s] for key, s in self._present.items() if s in self.eager or self.sources[s] is not None}

    def present(self) -> dict[int, int]:
        """Bytes of each storage of the step that is alive, by its key."""
        return {key: self.sizes[s] for key, s in self._present.items()}

    @property
    def input_bytes(self) -> int:
        """Bytes of the storages that existed before the step, that windows are given or eager code reads."""
        given = {s for run in (*self.runs, *self.abandoned) for s in run.given if s is not None}
        return sum(self.sizes[s] for s in given | self.eager_inputs if self.sources[s] is None and s not in self.eager)

    @property
    def early_bytes(self) -> int:
        """Bytes of the storages that eager code allocated before the first window and that are alive when it begins."""
        early = [s for s, window in self.eager.items() if not window and s not in self.brief]
        return sum(self.sizes[s] for s in early if self.last.get(s, 1) > 0 or s not in self.freed)

    def _begin(self, window: tuple[int, bool]) -> None:
        self._note_eager()
        for storage, tensor, version in self._versions:
            now = tensor()
            if now is not None and now._version != version:
                self.overwritten.setdefault(storage, len(self.windows) - 1)
        self.windows.append(window)
        self._running = True

    def took(self, size_bytes: int) -> None:
        """Record that an op of eager code has allocated so much at once, and still holds its results."""
        if not self.over:
            self._note_eager(size_bytes)

    def end_call(self) -> None:
        """Record that a call of a compiled function is over; outputs of an earlier call are held at least until then."""
        if self.over or not self.windows:
            return
        window, peak = len(self.windows), self.peaks.get(len(self.windows), 0)
        if self.watched and not self._running and peak > self._returned_at:
            self.call_peaks.setdefault(window, {})[self._calls] = peak
        self._calls += 1

    def _note_eager(self, more_bytes: int = 0) -> None:
        window, eager_bytes = len(self.windows), self.eager_bytes + more_bytes
        self.peaks[window] = max(self.peaks.get(window, 0), eager_bytes + self._returned_bytes)
        self.eager_peak_bytes = max(self.eager_peak_bytes, eager_bytes)

    def begin_forward(self, planned: PlannedGraph, args: Sequence[Any], transient: Mapping[int, int]) -> Run:
        """Record that a forward begins.

        Args:
            planned: The graph.
            args: Its arguments.
            transient: Storages that are counted elsewhere, by key: they have no bytes here.
        """
        most = planned.input_bytes if planned.dynamic else (0,) * len(args)
        given = tuple(
            self._storage(a, None, transient, size) if isinstance(a, torch.Tensor) else None
            for a, size in zip(args, most, strict=True)
        )
        leaves = tuple(
            (k, weakref.ref(a)) for k, a in enumerate(args) if isinstance(a, torch.Tensor) and a.is_leaf and a.requires_grad
        )
        run = Run(planned, given, leaves=leaves, held_bytes=self.eager_bytes + self._returned_bytes)
        self.forwards.append(run)
        for k, leaf in leaves:
            gradient = leaf().grad  # type: ignore[union-attr]
            if gradient is not None:
                self.existing.add((len(self.runs), k))
                self._gradients.update({storage_key(t): storage_bytes(t) for t in strided_parts(gradient)})
        self.runs.append(run)
        self._begin((len(self.runs) - 1, False))
        for storage, a in zip(given, args, strict=True):
            if isinstance(a, torch.Tensor) and storage is not None and not a.is_inference():
                self._versions.append((storage, weakref.ref(a), a._version))
        return run

    def end_forward(self, run: Run, outputs: Sequence[Any]) -> None:
        """Record what a forward returned to its caller."""
        run.made = self._results(outputs)

    def begin_backward(self, run: Run, tangents: Sequence[Any]) -> None:
        """Record that a backward begins."""
        run.undefined = frozenset(t for t, value in enumerate(tangents) if value is None)
        run.tangents = tuple(self._storage(t, None, {}) if isinstance(t, torch.Tensor) else None for t in tangents)
        r = self.runs.index(run)
        if not any(backward for _, backward in self.windows):
            self.keeps_eager_gradients = next(gradient_parts(self.eager_leaves.values()), None) is not None
        if self.existing:
            self.cleared |= {
                (r, k) for k, leaf in run.leaves if (r, k) in self.existing and getattr(leaf(), "grad", None) is None
            }
        self._begin((r, True))

    def end_backward(self, run: Run, gradients: Sequence[Any]) -> None:
        """Record what a backward returned."""
        run.gradients = self._results(gradients)

    def waits(self, run: Run) -> bool:
        """Whether a forward is one of the step, and its backward has not begun."""
        return run in self.runs and (self.runs.index(run), True) not in self.windows

    def abandon(self, run: Run) -> None:
        """Take a forward for eager code: what it returned and saved was freed, and its backward will not run.

        Its window is removed, and the gaps around it become one.
        """
        self.abandoned.append(run)
        r = self.runs.index(run)
        w = self.windows.index((r, False))
        memory = run.planned.own.memory
        peak = max(self.peaks.get(w, 0), self.peaks.get(w + 1, 0), run.held_bytes + memory.forward_peak_bytes)
        del self.runs[r], self.windows[w]
        self.windows = [(other - (other > r), backward) for other, backward in self.windows]
        self.existing, self.cleared = (
            {(other - (other > r), k) for other, k in places if other != r} for places in (self.existing, self.cleared)
        )
        for s, source in enumerate(self.sources):
            if source == w:
                self.sources[s], self.eager[s] = None, w + 1
                if s not in self.last:
                    self._returned_bytes -= self.sizes[s]
                    self.eager_bytes += self.sizes[s]
            elif source is not None and source > w:
                self.sources[s] = source - 1
        for gaps in (self.last, self.eager):
            gaps.update({s: gap - 1 for s, gap in gaps.items() if gap > w})
        self.overwritten = {s: window - (window > w) for s, window in self.overwritten.items()}
        self.brief = {s for s, first in self.eager.items() if s in self.brief or self.last.get(s) == first == w}
        self.peaks = {gap - (gap > w): size for gap, size in self.peaks.items() if gap not in (w, w + 1)} | {w: peak}
        self.call_peaks = {gap - (gap > w): size for gap, size in self.call_peaks.items() if gap not in (w, w + 1)}
        # What it saved was held until now.
        if len(self.windows) > w:
            self.eager[len(self.sizes)], self.last[len(self.sizes)] = w, len(self.windows) - self._running
            self.sizes.append(memory.saved_bytes)
            self.made_in.append(self._calls)
            self.sources.append(None)
            self._storages.append(_no_storage)

    @property
    def after_backward(self) -> bool:
        """Whether the newest window is that of a backward."""
        return bool(self.windows) and self.windows[-1][1]

    @property
    def complete(self) -> bool:
        """Whether every forward of the step was followed by exactly one backward."""
        backwards = sorted(r for r, backward in self.windows if backward)
        return bool(self.runs) and backwards == list(range(len(self.runs))) and all(run.gradients for run in self.runs)

    @property
    def searched_s(self) -> float:
        """Seconds of the searches for the graphs' own plans, where those were made for a step of several graphs."""
        return sum({id(run.planned): run.planned.searched_s for run in self.runs}.values())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that existed before the step."""
        return sum(self._gradients.values())

    @property
    def sequence(self) -> StepSequence:
        """Identity of the step."""
        return tuple((id(self.runs[r].planned), r, self.runs[r].undefined if back else None) for r, back in self.windows)

    def _results(self, results: Sequence[Any]) -> tuple[int | None, ...]:
        here, known = len(self.windows) - 1, len(self.sizes)
        self._running = False
        found = tuple(self._storage(r, here, {}) if isinstance(r, torch.Tensor) else None for r in results)
        self._returned_bytes += sum(self.sizes[known:])
        self._returned_at = self.eager_bytes + self._returned_bytes
        self._note_eager()
        return found

    def _storage(self, tensor: torch.Tensor, source: int | None, transient: Mapping[int, int], least_bytes: int = 0) -> int:
        key = storage_key(tensor)
        found = self._present.get(key)
        if found is None:
            found = self._present[key] = len(self.sizes)
            self.sizes.append(0 if key in transient else max(least_bytes, storage_bytes(tensor)))
            self.sources.append(source)
            self.made_in.append(self._calls)
            storage = tensor.untyped_storage()
            self._storages.append(weakref.ref(storage))
            if not isinstance(tensor, torch.nn.Parameter):  # parameters outlive every step
                finalizer = weakref.finalize(storage, self._free, key, found)
                finalizer.atexit = False
                self._finalizers.append(finalizer)
        return found

    def close(self) -> None:
        """End the record. Buffers and gradients outlive the step, and their finalizers would keep every record alive."""
        self.over = True
        for finalizer in self._finalizers:
            finalizer.detach()
        self._finalizers.clear()

    def remaining(self) -> Iterator[tuple[int, Callable[[], torch.UntypedStorage | None], int, int | None, int]]:
        """Key, storage and bytes of each storage that outlives the step, and the call that made it.

        Of what the step made, also the gap at which a variable of the user is assigned the storage: that after the last of the
        forwards that follow each other, since these may belong to one call.
        """
        for key, s in self._present.items():
            source = self.sources[s]
            assigned = self.eager.get(s) if source is None else source + 1
            if source is not None and not self.windows[source][1]:
                assigned = next((w for w in range(source, len(self.windows)) if self.windows[w][1]), len(self.windows))
            yield key, self._storages[s], self.sizes[s], assigned, self.made_in[s]

    def is_eager(self, key: int) -> bool:
        """Whether eager code made a storage that remains."""
        return self._present.get(key) in self.eager

    def is_given(self, key: int, storage: torch.UntypedStorage) -> bool:
        """Whether the step is given a storage that still lives.

        Args:
            key: Key of the storage.
            storage: The storage.
        """
        s = self._present.get(key)
        return s is not None and self.sources[s] is None and s not in self.eager and self._storages[s]() is storage

    def _free(self, key: int, storage: int) -> None:
        if self._present.get(key) == storage:
            del self._present[key]
        if not self.over:
            self.last[storage] = len(self.windows) - self._running
            if not self._running:
                self.freed.add(storage)
                if self.eager.get(storage) == len(self.windows):
                    self.brief.add(storage)
            if storage in self.eager:
                self.eager_bytes -= self.sizes[storage]
            elif self.sources[storage] is not None:
                self._returned_bytes -= self.sizes[storage]
