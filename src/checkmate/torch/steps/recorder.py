"""Records a step: its segments in order, and the storages that they are given, make and hold.

A *segment* is one run of a forward or a backward. Interval ``w`` is the time before segment ``w``, in which eager code runs.

A step that runs the same segments as a recorded one, with the same parameters, is not recorded: the recorder *follows* the
record. Of each segment it keeps weak references to the storages that are new. A step that turns out differently is recorded after
all, from its first segment on: from these references and the record that it followed until then (`StepRecorder.leave`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress, count
from operator import is_not
from typing import Any

import torch

from checkmate.torch.graph.host_weights import ON_HOST
from checkmate.torch.graph.storages import storage_bytes, storage_key, strided_parts
from checkmate.torch.steps.program import PlannedGraph, Program
from checkmate.torch.steps.run import Run, Seen, SeenStorage, StorageRefs, gradients_of, storage_refs
from checkmate.torch.steps.state import StateMachine

StepSequence = tuple[tuple[int, int, frozenset[int] | None], ...]
"""Identity of a step: graph and run of each segment, and the undefined tangents of a backward."""


@dataclass(eq=False)
class StepRecorder:
    """The segments of the present step and its storages, which it does not keep alive.

    An exception at any line of a method leaves a record on which every other method runs.
    """

    machine: StateMachine
    watched: bool = False  # whether eager code is seen
    like: StepRecorder | None = None  # the record that this step follows so far
    bare: bool = False  # whether no leaf of that record had a gradient when this step began
    over: bool = False  # whether the backward of the step is over, or another step has begun
    forwards: list[Run] = field(default_factory=list)  # in the order in which they began
    runs: list[Run] = field(default_factory=list)  # those whose backward runs
    abandoned: list[Run] = field(default_factory=list)  # forwards whose backward will not run; they are part of the eager code
    segments: list[tuple[Run, bool]] = field(default_factory=list)  # and whether each is a backward
    storages: list[SeenStorage] = field(default_factory=list)
    existing: set[int] = field(default_factory=set)  # leaves that had a gradient when some forward began, by identity
    cleared: set[int] = field(default_factory=set)  # leaves of `existing` without a gradient when a backward began
    eager_leaves: dict[int, Callable[[], torch.Tensor | None]] = field(default_factory=dict)  # that eager code reads, by identity
    keeps_eager_gradients: bool = False  # whether any of those had a gradient when the first backward began
    eager_bytes: int = 0  # that eager code has allocated and that are alive
    eager_peak_bytes: int = 0  # the largest `eager_bytes` of the step
    peaks: dict[int, int] = field(default_factory=dict)  # by interval: most bytes that eager code held and segments had returned
    # The same until the last call of a compiled function was over, if eager code took memory in a call.
    call_peaks: dict[int, int] = field(default_factory=dict)
    _running: bool = False  # whether a segment runs now
    _versions: list[tuple[SeenStorage, Callable[[], torch.Tensor | None], int]] = field(default_factory=list)  # of inputs
    _returned_bytes: int = 0  # of storages that segments made and that are alive
    _returned_at: int = 0  # its sum with `eager_bytes` when the newest segment ended
    _gradients: dict[int, int] = field(default_factory=dict)
    _finalizers: list[weakref.finalize[..., Any]] = field(default_factory=list)
    _present: dict[int, SeenStorage] = field(default_factory=dict)  # those that are alive, by the key of the storage

    def allocated(self, tensor: torch.Tensor) -> None:
        """Record that eager code allocated the storage of a tensor."""
        self.leave()
        if not self.over and storage_key(tensor) not in self._present:
            seen = self._see(tensor)
            seen.eager = len(self.segments)
            self.eager_bytes += seen.size_bytes
            self._note_eager()

    def read(self, tensor: torch.Tensor) -> None:
        """Record that eager code reads a tensor."""
        self.leave()
        key = storage_key(tensor)
        if self.over or key in self._gradients:
            return
        if tensor.is_leaf and tensor.requires_grad:
            self.eager_leaves[id(tensor)] = weakref.ref(tensor)
        if key not in self._present:
            self._see(tensor).read_by_eager = True

    def keeps(self, tensor: torch.Tensor) -> None:
        """Record that a tensor is state of an optimizer: later steps are given it, and eager code does not make it again."""
        seen = self._present.get(storage_key(tensor))
        if not self.over and seen is not None and seen.eager is not None:
            seen.eager, seen.read_by_eager = None, True
            self.eager_bytes -= seen.size_bytes

    def exchanged(self, tensor: torch.Tensor) -> None:
        """Record that a collective of the backward exchanges a tensor: a bucket of gradients, if the graphs count those."""
        seen = self._present.get(storage_key(tensor))
        if seen is not None and any(run.planned.resident.wrappers_bytes for run in self.runs):
            seen.read_by_eager = False

    def took(self, size_bytes: int) -> None:
        """Record that an op of eager code has allocated ``size_bytes`` at once, and still holds its results."""
        if not self.over:
            self._note_eager(size_bytes)

    def end_call(self) -> None:
        """Record that a call of a compiled function is over; outputs of an earlier call are held at least until then."""
        if self.over or not self.segments:
            return
        interval = len(self.segments)
        peak = self.peaks.get(interval, 0)
        if self.watched and not self._running and peak > self._returned_at:
            self.call_peaks[interval] = peak

    def _note_eager(self, more_bytes: int = 0) -> None:
        interval, eager_bytes = len(self.segments), self.eager_bytes + more_bytes
        self.peaks[interval] = max(self.peaks.get(interval, 0), eager_bytes + self._returned_bytes)
        self.eager_peak_bytes = max(self.eager_peak_bytes, eager_bytes)

    def begin_forward(self, planned: PlannedGraph, program: Program, args: Sequence[Any], transient: Mapping[int, int]) -> Run:
        """Record that a forward begins. Transient storages, by key, are counted elsewhere, and have no bytes here."""
        run = None if transient else self._following_forward(planned, program, args)
        if run is None:
            self.leave()
            run = self._recorded_forward(planned, program, args, transient)
        if self.like is None or self.segments or not self.bare:
            self._note_existing(run)
        self.forwards.append(run)
        self.runs.append(run)
        self._begin(run, backward=False)
        return run

    def _recorded_forward(
        self, planned: PlannedGraph, program: Program, args: Sequence[Any], transient: Mapping[int, int]
    ) -> Run:
        most = planned.input_bytes if planned.dynamic else (0,) * len(args)
        given = tuple(
            self._see(a, transient=transient, least_bytes=size) if isinstance(a, torch.Tensor) else None
            for a, size in zip(args, most, strict=True)
        )
        gradients = planned.gradients or range(len(args))
        each = zip(gradients, args, strict=True)
        leaves = [(k, a) for k, a in each if isinstance(a, torch.Tensor) and a.is_leaf and a.requires_grad]
        run = Run(planned, program, given, leaves=tuple((k, weakref.ref(a)) for k, a in leaves))
        run.tensors = () if transient or None in given else tuple(map(weakref.ref, args))
        run.inputs = _storages(args)
        run.inputs.update(dict.fromkeys(run.inputs.keys() & transient.keys(), 0))  # counted with their wrapper
        run.held_bytes = self.eager_bytes + self._returned_bytes
        self._watch_versions(given, args)
        return run

    def _note_existing(self, run: Run) -> None:
        found = gradients_of(leaf for _, leaf in run.leaves)
        if found:
            run.existing = frozenset(id(a) for a in found)
            self.existing |= run.existing
        if found and self.like is None:
            self._gradients.update({storage_key(p): storage_bytes(p) for a in found for p in strided_parts(a.grad)})  # type: ignore[arg-type]

    def _watch_versions(self, given: Seen, args: Iterable[Any]) -> None:
        for seen, a in zip(given, args, strict=True):
            if seen is not None and a is not None and not a.is_inference():
                self._versions.append((seen, weakref.ref(a), a._version))

    def _following_forward(self, planned: PlannedGraph, program: Program, args: Sequence[Any]) -> Run | None:
        """The run of a forward as the followed record has it next, with the same parameters; None if it is another one."""
        before, backward = self._expected
        if before is None or backward or before.planned is not planned:
            return None
        tensors = tuple(map(weakref.ref, args))  # of one tensor there is one such reference
        fresh = list(compress(count(), map(is_not, tensors, before.tensors)))
        if any(args[k].is_leaf and args[k].requires_grad for k in fresh):
            return None
        run = Run(planned, program, (), leaves=before.leaves, tensors=tensors)
        run.fresh = {k: weakref.ref(args[k].untyped_storage()) for k in fresh}
        return run

    @property
    def _expected(self) -> tuple[Run | None, bool]:
        """The segment that comes next in the followed record, if any."""
        at, like = len(self.segments), self.like
        return like.segments[at] if like is not None and at < len(like.segments) else (None, False)

    def begin_backward(self, run: Run, tangents: Sequence[Any]) -> None:
        """Record that a backward begins."""
        run.undefined = frozenset(t for t, value in enumerate(tangents) if value is None)
        (before, backward), like = self._expected, self.like
        ends = before is not None and backward and before.undefined == run.undefined
        if ends and like is not None and before is like.runs[self.runs.index(run)]:
            run.tangent_refs = storage_refs(tangents)
        else:
            self.leave()
            run.tangents = tuple(self._see(t) if isinstance(t, torch.Tensor) else None for t in tangents)
            if not any(backward for _, backward in self.segments):
                self.keeps_eager_gradients = bool(gradients_of(self.eager_leaves.values()))
        if self.existing:
            leaves = (t for _, leaf in run.leaves if (t := leaf()) is not None)
            self.cleared |= {id(t) for t in leaves if id(t) in self.existing and t.grad is None}
        self._begin(run, backward=True)

    def leave(self) -> None:
        """Record the segments so far of a step that has followed a record until now, and all that comes."""
        if self.like is None or self.over:
            return
        like, self.like = self.like, None
        again: dict[SeenStorage, SeenStorage] = {}
        for (run, backward), (before, _) in zip(self.segments, like.segments, strict=False):
            if backward:
                run.tangents = self._again(again, before.tangents, run.tangent_refs)
                run.gradients = self._again(again, before.gradients, run.gradient_refs)
                continue
            run.held_bytes = self._returned_bytes
            args = [tensor() for tensor in run.tensors]
            run.inputs = _storages(args)
            run.held = {-id(run): run.program.memory.saved_bytes}  # under no storage's key: they were not looked up
            run.given = self._again(again, before.given, [run.fresh.get(k) or ref for k, ref in enumerate(storage_refs(args))])
            run.made = self._again(again, before.made, run.made_refs)
            self._note_existing(run)
            self._watch_versions(run.given, args)

    def _again(self, again: dict[SeenStorage, SeenStorage], followed: Seen, refs: StorageRefs) -> Seen:
        """Records of storages of this step, each like the record of the followed step."""
        found: list[SeenStorage | None] = []
        now = len(self.segments) - self._running
        for before, ref in zip(followed, refs, strict=False):
            storage = None if ref is None else ref()
            seen = None if storage is None else self._present.get(storage._cdata)
            if before is not None and seen is None and (seen := again.get(before)) is None:
                last = None if storage is not None else now if before.last is None else min(now, before.last)
                seen = SeenStorage(
                    before.size_bytes, ref or before.storage, before.source, None, False, last, before.freed_between
                )
                seen.overwritten = before.overwritten if (before.overwritten or 0) < len(self.segments) else None
                again[before] = seen
                self.storages.append(seen)
                if storage is not None:
                    self._present[storage._cdata] = seen
                    self._when_freed(storage, seen)
                    self._returned_bytes += seen.size_bytes if seen.source is not None else 0
            found.append(seen)
        return tuple(found)

    def _begin(self, run: Run, *, backward: bool) -> None:
        if self.like is None:
            self._note_eager()
        for seen, tensor, version in self._versions:
            now = tensor()
            if now is not None and now._version != version and seen.overwritten is None:
                seen.overwritten = len(self.segments) - 1
        self.segments.append((run, backward))
        self._running = True

    def end_forward(self, run: Run, results: Sequence[Any]) -> None:
        """Record the results of a forward: outputs that it returns to its caller, and then saved tensors."""
        outputs = results[: run.planned.interface.num_outputs]
        if self.like is None:
            run.held = {key: size for key, size in _storages(results).items() if key not in run.inputs}
            run.made = self._results(outputs)
        else:
            run.made_refs, self._running = storage_refs(outputs), False

    def end_backward(self, run: Run, gradients: Sequence[Any]) -> None:
        """Record the gradients that a backward returned."""
        if self.like is None:
            run.gradients = self._results(gradients)
        else:
            run.gradients = self.like.runs[self.runs.index(run)].gradients
            run.gradient_refs, self._running = storage_refs(gradients), False

    def _results(self, results: Sequence[Any]) -> Seen:
        here, known = len(self.segments) - 1, len(self.storages)
        self._running = False
        found = tuple(self._see(r, here) if isinstance(r, torch.Tensor) else None for r in results)
        self._returned_bytes += sum(seen.size_bytes for seen in self.storages[known:])
        self._returned_at = self.eager_bytes + self._returned_bytes
        self._note_eager()
        return found

    def abandon(self, run: Run) -> None:
        """Count a forward as eager code: its outputs and saved tensors were freed, and its backward will not run.

        Its segment is removed, and the intervals around it become one. Nothing changes if its backward has begun.
        """
        if (run, False) not in self.segments or (run, True) in self.segments:
            return
        self.leave()
        w = self.segments.index((run, False))
        memory = run.planned.own.memory
        self.abandoned.append(run)
        self.runs.remove(run)
        del self.segments[w]
        for seen in self.storages:
            if seen.source == w:
                seen.source, seen.eager = None, w + 1
                if seen.last is None:
                    self._returned_bytes -= seen.size_bytes
                    self.eager_bytes += seen.size_bytes
            seen.source = _without_segment(w, seen.source)
            seen.eager, seen.last = _without_segment(w, seen.eager), _without_segment(w, seen.last)
            seen.overwritten = _without_segment(w, seen.overwritten)
            seen.freed_between = seen.freed_between or seen.eager == w == seen.last
        peak = max(self.peaks.pop(w, 0), self.peaks.pop(w + 1, 0), run.held_bytes + memory.forward_peak_bytes)
        self.peaks = {at - (at > w): size for at, size in self.peaks.items()} | {w: peak}
        self.call_peaks = {at - (at > w): size for at, size in self.call_peaks.items() if at not in (w, w + 1)}
        if len(self.segments) > w:  # its saved tensors were held until now
            saved = SeenStorage(memory.saved_bytes, lambda: None, eager=w, last=len(self.segments) - self._running)
            self.storages.append(saved)

    @property
    def complete(self) -> bool:
        """Whether every forward of the step was followed by exactly one backward."""
        backwards = [run for run, backward in self.segments if backward]
        return 0 < len(self.runs) == len(backwards) == len({*backwards}) and all(run.gradients for run in self.runs)

    @property
    def sequence(self) -> StepSequence:
        """Identity of the step."""
        return self._now() if self.like is None else self.like._final

    def _now(self) -> StepSequence:
        return tuple((id(self.runs[r].planned), r, undefined) for r, undefined in self.order)

    _final = functools.cached_property(_now)  # of a record that steps follow, which does not change

    @property
    def order(self) -> list[tuple[int, frozenset[int] | None]]:
        """Index of the run of each segment, and the undefined tangents of a backward."""
        index = {run: r for r, run in enumerate(self.runs)}
        return [(index[run], run.undefined if backward else None) for run, backward in self.segments]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that existed before the step."""
        return sum(self._gradients.values())

    @property
    def _given(self) -> set[SeenStorage | None]:
        return {seen for run in (*self.runs, *self.abandoned) for seen in run.given}

    @property
    def eager_input_bytes(self) -> int:
        """Bytes of storages that existed before the step and that only eager code reads, such as the labels of a loss."""
        given = self._given
        return sum(seen.size_bytes for seen in self.storages if seen.read_by_eager and seen not in given)

    @property
    def input_bytes(self) -> int:
        """Bytes of the storages that existed before the step, that segments are given or eager code reads."""
        given = self._given
        return sum(seen.size_bytes for seen in self.storages if seen.existed and (seen.read_by_eager or seen in given))

    @property
    def early_bytes(self) -> int:
        """Bytes of the storages that eager code allocated before the first segment and that are alive when it begins."""
        return sum(seen.size_bytes for seen in self.storages if seen.eager == 0 and not seen.brief)

    def present(self, *, made: bool = False) -> dict[int, int]:
        """Bytes of each storage of the step that is alive, by its key; or only of those that the step has made."""
        self.leave()
        return {key: seen.size_bytes for key, seen in self._present.items() if not (made and seen.existed)}

    def held(self, forwards: Iterable[Run]) -> dict[int, int]:
        """Bytes of each storage that graphs in flight hold, by its key: a storage that several graphs hold counts once."""
        self.leave()
        return {key: size for run in forwards for held in (run.inputs, run.held) for key, size in held.items()}

    def _see(
        self, tensor: torch.Tensor, source: int | None = None, *, transient: Mapping[int, int] | None = None, least_bytes: int = 0
    ) -> SeenStorage:
        key = storage_key(tensor)
        found = self._present.get(key)
        if found is None:
            storage = tensor.untyped_storage()
            size = 0 if key in ON_HOST or (transient and key in transient) else max(least_bytes, storage_bytes(tensor))
            found = self._present[key] = SeenStorage(size, weakref.ref(storage), source)
            self.storages.append(found)
            if not isinstance(tensor, torch.nn.Parameter):  # parameters outlive every step
                self._when_freed(storage, found)
        return found

    def _when_freed(self, storage: torch.UntypedStorage, seen: SeenStorage) -> None:
        finalizer = weakref.finalize(storage, self._free, storage._cdata, seen)
        finalizer.atexit = False
        self._finalizers.append(finalizer)

    def _free(self, key: int, seen: SeenStorage) -> None:
        with self.machine.update():
            if self._present.get(key) is seen:
                del self._present[key]
            if not self.over:
                seen.last = len(self.segments) - self._running
                seen.freed_between = not self._running
                if seen.eager is not None:
                    self.eager_bytes -= seen.size_bytes
                elif seen.source is not None:
                    self._returned_bytes -= seen.size_bytes

    def close(self) -> None:
        """End the record. Buffers and gradients outlive the step, and their finalizers would keep every record alive."""
        self.over = True
        for finalizer in self._finalizers:
            finalizer.detach()
        self._finalizers.clear()

    def remaining(self) -> Iterator[tuple[int, SeenStorage, int | None]]:
        """Each storage that outlives the step, and its key; of a step that follows another one only the new ones.

        For a storage that the step made, also the interval in which a variable of the user is assigned the storage. It is the
        interval after the last of several forwards in a row, since these may belong to one call.
        """
        if self.like is None:
            for key, seen in self._present.items():
                yield key, seen, self._assigned(seen)
            return
        for run, before in zip(self.runs, self.like.runs, strict=True):
            known = chain((before.given[k] for k in run.fresh), before.made, before.tangents, before.gradients)
            refs = chain(run.fresh.values(), run.made_refs, run.tangent_refs, run.gradient_refs)
            for seen, ref in zip(known, refs, strict=True):
                if ref is not None and (storage := ref()) is not None and seen is not None:
                    seen = replace(seen, storage=ref, eager=None)
                    yield storage._cdata, seen, self._assigned(seen)

    def _assigned(self, seen: SeenStorage) -> int | None:
        source = seen.source
        if source is None or self.segments[source][1]:
            return seen.eager if source is None else source + 1
        return next((w for w in range(source, len(self.segments)) if self.segments[w][1]), len(self.segments))

    def is_given(self, key: int, storage: torch.UntypedStorage) -> bool:
        """Whether the step is given a storage that still lives."""
        if self.like is not None:
            return self.like.is_given(key, storage) or any(ref() is storage for run in self.runs for ref in run.fresh.values())
        seen = self._present.get(key)
        return seen is not None and seen.existed and seen.storage() is storage


def _storages(values: Iterable[Any]) -> dict[int, int]:
    """Bytes of the storage of each tensor, by its key."""
    tensors = {storage_key(v): v for v in values if isinstance(v, torch.Tensor)}
    return {key: 0 if key in ON_HOST else storage_bytes(v) for key, v in tensors.items()}


def _without_segment(removed: int, at: int | None) -> int | None:
    """An interval or a segment after the removal of an earlier segment."""
    return at if at is None or at <= removed else at - 1
