"""`OutOfMemory`: the contents of a device's memory, the cause of the failed allocation, and advice."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

from checkmate.core.errors import FileFormatError, UnitError
from checkmate.core.units import format_at_least, format_bytes, parse_bytes
from checkmate.oom import stacks
from checkmate.oom.replay import BlockInUse, Moment, moment_of
from checkmate.oom.snapshot import Snapshot, frames_of, read_snapshot
from checkmate.oom.stacks import Origin, origin_of

HEADROOM = 0.03
"""Share of the available memory that a suggested budget leaves for fragmentation, as `checkmate.torch.fits` does by default."""

Cause = Literal["fragmentation", "too little memory", "larger than the device", "no error recorded", "not known"]


class Holder(NamedTuple):
    """Blocks in use that were allocated at one line."""

    place: str  # file, line and function; "" if no stack was recorded
    kind: str  # of data, as far as the stack tells
    size_bytes: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """The memory of a device when an allocation failed. Figures that are not known are None.

    Attributes:
        moment: The moment described, in words.
        device: Index of the device.
        requested_bytes: Bytes of the allocation that failed.
        total_bytes: Memory of the device, or the limit that the process has set.
        device_free_bytes: Bytes that were free on the device.
        allocated_bytes: Bytes in use by tensors.
        reserved_bytes: Bytes that the allocator had from the device, in use or cached.
        largest_free_bytes: Largest free range in the cached memory.
        expandable: Whether the allocator used expandable segments.
        holders: Blocks in use by line, the largest first; empty without a snapshot.
    """

    moment: str
    device: int | None = None
    requested_bytes: int | None = None
    total_bytes: int | None = None
    device_free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    largest_free_bytes: int | None = None
    expandable: bool = False
    holders: tuple[Holder, ...] = ()

    @property
    def cached_bytes(self) -> int | None:
        """Bytes that are reserved but not allocated."""
        if self.allocated_bytes is None or self.reserved_bytes is None:
            return None
        return max(0, self.reserved_bytes - self.allocated_bytes)

    @property
    def available_bytes(self) -> int | None:
        """Bytes for tensors on the device: reserved and free memory. Only an error has the free bytes."""
        if self.reserved_bytes is None or self.requested_bytes is None:
            return None
        return self.reserved_bytes + (self.device_free_bytes or 0)

    @property
    def missing_bytes(self) -> int | None:
        """Bytes by which the request exceeds all free memory; 0 if it would fit in one piece."""
        if self.requested_bytes is None or self.available_bytes is None or self.allocated_bytes is None:
            return None
        return max(0, self.allocated_bytes + self.requested_bytes - self.available_bytes)

    @property
    def cause(self) -> Cause:
        """Cause of the failed allocation."""
        if self.requested_bytes is None:
            return "no error recorded"
        if self.total_bytes is not None and self.requested_bytes > self.total_bytes:
            return "larger than the device"
        if self.missing_bytes is None:
            return "not known"
        return "too little memory" if self.missing_bytes else "fragmentation"

    @property
    def budget(self) -> str | None:
        """A budget that leaves `HEADROOM` of the available memory, as the option of the backend; None if it is not known."""
        if self.available_bytes is None or self.cause == "larger than the device":
            return None
        return format_at_least(round((1 - HEADROOM) * self.available_bytes))

    @property
    def line(self) -> str | None:
        """The line to add to the script, before the first step."""
        if self.budget is None:
            return None
        return f'model = torch.compile(model, backend="checkmate", options={{"budget": "{self.budget}"}})'

    def by_kind(self) -> tuple[Holder, ...]:
        """Blocks in use by kind, the largest first."""
        return _summed(holder._replace(place="") for holder in self.holders)

    def rows(self) -> list[tuple[str, str]]:
        """Figures and cause as pairs of a name and a text."""

        def known(size_bytes: int | None, text: str) -> str:
            return "" if size_bytes is None else text.format(format_bytes(size_bytes))

        cached = known(self.cached_bytes, "{} reserved but not allocated")
        rows = [
            ("device", "" if self.device is None else f"{self.device}{known(self.total_bytes, ', {}')}"),
            ("moment", self.moment),
            ("requested", known(self.requested_bytes, "{}")),
            ("allocated", known(self.allocated_bytes, "{}" + known(self.reserved_bytes, " of {} reserved"))),
            ("cached", cached and cached + known(self.largest_free_bytes, ", the largest range {}")),
            ("free", known(self.device_free_bytes, "{} on the device")),
            ("cause", self._cause_in_words()),
        ]
        return [(name, text) for name, text in rows if text]

    def advice(self) -> tuple[str, ...]:
        """Advice, in sentences."""
        said: list[str] = []
        if self.cause == "fragmentation" and not self.expandable:
            said.append(
                "the free memory is in pieces: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment of the run"
            )
        elif self.cause == "fragmentation":
            said.append("the free memory is in pieces, or belongs to another stream or memory pool")
        elif self.cause == "larger than the device":
            said.append("one tensor is larger than the device: no plan helps, use a smaller batch or sequence")
        fixed = sum(h.size_bytes for h in self.holders if h.kind in (stacks.PARAMETERS, stacks.OPTIMIZER))
        if fixed:
            said.append(f"no plan changes the {format_bytes(fixed)} of parameters and optimizer state")
        if any(h.kind == stacks.BEFORE for h in self.holders):
            said.append("call torch.cuda.memory._record_memory_history() before the model is created, to see all lines")
        if self.budget is not None:
            said.append(
                f"a step planned within {self.budget} fits: {format_bytes(self.available_bytes or 0)} were available, less "
                f"{HEADROOM:.0%}; `checkmate.torch.fits` tells whether there is such a plan"
            )
        return tuple(said)

    def render(self, most: int = 10) -> str:
        """Everything as text.

        Args:
            most: Maximum number of lines in each list.
        """
        rows = self.rows()
        width = max(len(name) for name, _ in rows) + 2
        parts = ["\n".join(f"{name:<{width}}{text}" for name, text in rows)]
        if self.holders:
            parts.append("\n".join(["by kind", *_listed(self.by_kind(), most)]))
            parts.append("\n".join(["by line", *_listed(self.holders, most)]))
        parts.append("\n".join(self.advice()))
        if self.line is not None:
            parts.append(f"add this line before the first step:\n  {self.line}")
        return "\n\n".join(part for part in parts if part)

    __str__ = render

    def _cause_in_words(self) -> str:
        cached, requested = self.cached_bytes or 0, format_bytes(self.requested_bytes or 0)
        if self.cause == "too little memory":
            return f"too little memory: {format_bytes(self.missing_bytes or 0)} more would have been enough"
        if self.cause == "fragmentation":
            free = format_bytes(cached + (self.device_free_bytes or 0))
            return f"fragmentation: {free} were free, but no range of {requested}"
        return self.cause


def of_snapshot(snapshot: Snapshot, device: int | None = None) -> OutOfMemory:
    """Describe the last out-of-memory error of a snapshot, or the largest use in its recording; see `moment_of`."""
    moment = moment_of(snapshot, device)
    error = moment.error
    return OutOfMemory(
        moment=moment.name,
        device=moment.device,
        requested_bytes=None if error is None else error.size,
        device_free_bytes=None if error is None else error.device_free,
        allocated_bytes=moment.allocated_bytes,
        reserved_bytes=moment.reserved_bytes,
        largest_free_bytes=moment.largest_free_bytes,
        expandable=moment.expandable,
        holders=_holders(moment),
    )


_AMOUNT = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?) (bytes|[KMGT]i?B)"


def of_text(text: str) -> OutOfMemory:
    """Describe the last out-of-memory error in a text, such as a log. Its figures are rounded to 0.01 of their unit.

    The form of PyTorch 2.1 to 2.13 is known, of CUDA, ROCm and XPU devices. An impossible amount is left out.
    """
    asked = re.finditer(rf"out of memory\. Tried to allocate {_AMOUNT}", text)
    errors = [(match.start(), requested) for match in asked if (requested := _bytes(match)) is not None]
    if not errors:
        raise FileFormatError(
            "no out-of-memory error of PyTorch is in the text",
            hint="give a memory snapshot, the log of the run, or the caught torch.OutOfMemoryError",
        )
    start, requested = errors[-1]
    said = " ".join(text[start : start + 2000].split())

    def figure(pattern: str) -> int | None:
        found = re.search(pattern.format(_AMOUNT), said)
        return found and _bytes(found)

    allocated, cached = figure("{} is allocated by PyTorch"), figure("{} is reserved by PyTorch but unallocated")
    reserved = None if allocated is None or cached is None else allocated + cached
    allowed, free = figure("{} allowed"), figure("of which {} is free")
    if allowed is not None and reserved is not None and free is not None:
        free = min(free, max(0, allowed - reserved))
    sizes = [size for size in (figure("total capacity of {}"), allowed) if size is not None]
    device = re.search(r"\bGPU (\d+)", said)
    return OutOfMemory(
        moment="at the out-of-memory error, from its text alone",
        device=None if device is None else int(device[1]),
        requested_bytes=requested,
        total_bytes=min(sizes, default=None),
        device_free_bytes=free,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
    )


def read_oom(
    error: BaseException | str, *, snapshot: str | os.PathLike[str] | None = None, device: int | None = None
) -> OutOfMemory:
    """Read an out-of-memory error of PyTorch: the contents of the memory, the cause, and a budget that would fit.

    Args:
        error: The caught `torch.OutOfMemoryError`, or its text.
        snapshot: A file of `torch.cuda.memory._dump_snapshot` made after the error, for the contents of the memory. No code in
            it is run.
        device: Index of the device in the snapshot; by default the device of the error.

    Raises:
        FileFormatError: The text is no out-of-memory error, or the file is no memory snapshot.
        OptionError: The file cannot be opened.

    Examples:
        >>> found = read_oom(
        ...     "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.00 GiB is "
        ...     "free. Of the allocated memory 76.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but "
        ...     "unallocated."
        ... )
        >>> found.cause, found.budget
        ('too little memory', '75.18GiB')
    """
    said = of_text(str(error))
    if snapshot is None:
        return said
    found = of_snapshot(read_snapshot(snapshot), said.device if device is None else device)
    unknown = {field.name: getattr(said, field.name) for field in fields(found) if getattr(found, field.name) is None}
    return replace(found, **unknown)


def _bytes(match: re.Match[str]) -> int | None:
    try:
        return parse_bytes(f"{match[1]}{'B' if match[2] == 'bytes' else match[2]}")
    except UnitError:
        return None


def _holders(moment: Moment) -> tuple[Holder, ...]:
    known: dict[int, Origin] = {}  # files share the stacks of equal allocations

    def origin(block: BlockInUse) -> Origin:
        if block.frames is None:
            return Origin("", stacks.BEFORE)
        key = id(block.frames)
        if key not in known:
            known[key] = origin_of(frames_of(block.frames))
        return known[key]

    return _summed(Holder(*origin(block), block.size_bytes, 1) for block in moment.held)


def _summed(holders: Iterable[Holder]) -> tuple[Holder, ...]:
    sums: dict[tuple[str, str], Holder] = {}
    for holder in holders:
        key = holder[:2]
        before = sums.get(key, Holder(*key, 0, 0))
        sums[key] = Holder(*key, before.size_bytes + holder.size_bytes, before.blocks + holder.blocks)
    return tuple(sorted(sums.values(), key=lambda holder: (-holder.size_bytes, *holder[:2])))


def _listed(holders: tuple[Holder, ...], most: int) -> list[str]:
    rest = sum(holder.size_bytes for holder in holders[most:])
    lines = [
        f"{format_bytes(h.size_bytes):>12}  {h.place or h.kind} "
        f"({h.kind.partition(':')[0] + ', ' if h.place else ''}{h.blocks} block{'s' * (h.blocks != 1)})"
        for h in holders[:most]
    ]
    return [*lines, f"{format_bytes(rest):>12}  in {len(holders) - most} more"] if len(holders) > most else lines
