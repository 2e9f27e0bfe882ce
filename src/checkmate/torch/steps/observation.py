"""Turns the record of a step into the data that it is planned from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType

from checkmate.frontend.step_graph import ObservedStep, Part, Storage, Window
from checkmate.torch.steps.recorder import StepRecorder

Span = tuple[int, int]
"""First and last gap at which a storage is alive; gap ``w`` is before window ``w``."""


def observed_step(
    record: StepRecorder,
    parts: Sequence[Part],
    extra_resident_bytes: int,
    existing: Set[tuple[int, int]],
    carried: Sequence[int] = (),
    by_call: Mapping[int, Mapping[int, int]] = MappingProxyType({}),
) -> ObservedStep:
    """A step as data to plan from.

    Args:
        record: The step, which is over.
        parts: The graph of each run.
        extra_resident_bytes: Resident bytes besides what the graphs are given and what is carried.
        existing: Run and input of the leaves that have a gradient before the step.
        carried: Bytes at each gap besides what the graphs are given and make, such as outputs of the step before.
        by_call: Bytes of those that are freed in a gap, by the call of a compiled function at whose end that is.
    """
    count, spans = len(record.windows), _spans(record)
    carried = carried or (0,) * (count + 1)
    released = [carried[gap] - carried[gap + 1] for gap in range(count)] + [0]
    windows: list[Window] = []
    for index, backward in record.windows:
        run = record.runs[index]
        given, made = (run.tangents, run.gradients) if backward else (run.given, run.made)
        transient = _transient(record, len(windows), spans, released, by_call)
        windows.append(Window(part=index, backward=backward, given=given, made=made, eager_bytes=transient))
    storages = _storages(record, windows, spans)
    for storage in (*_eager_storages(record, storages, spans), *_released_storages(released)):
        storages[len(record.sizes) + len(storages)] = storage
    gradients = [record.runs[r].gradients[k] for r, k in existing]
    freed_gradients = frozenset(s for s in gradients if s is not None and record.last.get(s, count) < count)
    for r, k in record.existing - existing:  # it was added to another one, and now becomes the gradient itself
        gradient = record.runs[r].gradients[k]
        if gradient is not None:
            storages[gradient] = replace(storages[gradient], last=count)
    return ObservedStep(
        parts=tuple(parts),
        windows=tuple(windows),
        storages=storages,
        eager_bytes=_transient(record, count, spans, released, by_call),
        resident_bytes=record.input_bytes + carried[count] + extra_resident_bytes,
        accumulated=freed_gradients,
    )


def _storages(record: StepRecorder, windows: Iterable[Window], spans: Mapping[int, Span]) -> dict[int, Storage]:
    """The storages that windows are given or make."""
    count = len(record.windows)
    crossing = {s for window in windows for s in (*window.given, *window.made) if s is not None}
    return {
        s: Storage(
            size_bytes=record.sizes[s],
            first=spans[s][0] if s in record.eager and s in spans else None,
            last=spans[s][1] if s in spans else record.last.get(s, count),
            overwritten=record.overwritten.get(s),
            released=_released(record, s),
        )
        for s in crossing
    }


def _eager_storages(record: StepRecorder, crossing: Mapping[int, Storage], spans: Mapping[int, Span]) -> list[Storage]:
    """Storages that eager code alone uses: one for each pair of gaps between which it is alive."""
    sizes: dict[tuple[Span, bool], int] = {}
    for s, span in spans.items():
        if s not in crossing and s in record.eager:
            kind = span, _released(record, s)
            sizes[kind] = sizes.get(kind, 0) + record.sizes[s]
    return [Storage(size_bytes=size, first=first, last=last, released=early) for ((first, last), early), size in sizes.items()]


def _released(record: StepRecorder, storage: int) -> bool:
    """Whether a storage was freed between two windows in which eager code was seen.

    It may be freed before or after eager code allocates there. The most that both took at once is known (`_transient`).
    """
    return record.watched and storage in record.freed


def _released_storages(released: Sequence[int]) -> list[Storage]:
    """Storages that earlier steps left and that are freed in this one, by gap."""
    return [Storage(size_bytes=size, first=0, last=gap, released=gap > 0) for gap, size in enumerate(released) if size > 0]


def _spans(record: StepRecorder) -> dict[int, Span]:
    """When each storage is alive, of those that windows returned and of eager ones that outlive a gap."""
    spans: dict[int, Span] = {}
    for s, source in enumerate(record.sources):
        last = record.last.get(s, len(record.windows))
        if source is not None:
            spans[s] = source + 1, max(source + 1, last)
        elif s in record.eager and s not in record.brief:
            spans[s] = record.eager[s], last
    return spans


def _transient(
    record: StepRecorder,
    window: int,
    spans: Mapping[int, Span],
    released: Sequence[int],
    by_call: Mapping[int, Mapping[int, int]],
) -> int:
    """The most that was alive before a window at once, besides what is alive there by the account of `step_graph`.

    That is what earlier windows made, as long as it lives and at least to the gap after its window, and what eager code made.
    Outputs of an earlier step that are ``released`` there are still held while the call runs that makes the new ones.
    """
    listed = sum(
        record.sizes[s]
        for s, (first, last) in spans.items()
        if first <= window <= last and not (last == window and _released(record, s))
    )
    freed = by_call.get(window, {})
    inside = [
        peak + max(0, released[window] - sum(size for earlier, size in freed.items() if earlier < call))
        for call, peak in record.call_peaks.get(window, {}).items()
    ]
    return max(0, max([*inside, record.peaks.get(window, 0)]) - listed)
