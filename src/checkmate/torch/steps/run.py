"""The runs of a step's graphs, and the storages that they are given, make and hold."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from checkmate.torch.graph.storages import strided_parts
from checkmate.torch.steps.program import ForwardArguments, PlannedGraph, Program

StorageRef = Callable[[], torch.UntypedStorage | None]
StorageRefs = Sequence[StorageRef | None]
"""Storages of arguments or results, not kept alive; None for other objects."""


@dataclass(eq=False, slots=True)
class SeenStorage:
    """A storage, not kept alive by the step. Addresses are reused: the identity of the storage is that of its record."""

    size_bytes: int
    storage: StorageRef
    source: int | None = None  # the segment that made it
    eager: int | None = None  # the interval in which eager code allocated it
    read_by_eager: bool = False  # whether it existed before the step, and eager code read it before any segment
    last: int | None = None  # the last interval in which it was alive; None while it is alive
    freed_between: bool = False  # whether it was freed between two segments, and not while one ran
    overwritten: int | None = None  # segment in or after which it was found changed

    @property
    def brief(self) -> bool:
        """Whether eager code allocated and freed it between the same two segments."""
        return self.eager is not None and self.eager == self.last and self.freed_between

    @property
    def existed(self) -> bool:
        """Whether it existed before the step."""
        return self.source is None and self.eager is None


Seen = tuple[SeenStorage | None, ...]
"""Storages of arguments or results; None for other objects."""


@dataclass(eq=False, slots=True)
class Run:
    """One forward of a step, and its backward if that has run."""

    planned: PlannedGraph
    program: Program
    given: Seen  # inputs of the forward
    inputs: dict[int, int] = field(default_factory=dict)  # bytes of each input, by the key of its storage
    held: dict[int, int] = field(default_factory=dict)  # bytes of each result, outputs and saved tensors, by the same key
    arguments: ForwardArguments | None = None  # None if the program reads all tangents, or the backward is over
    symbols: list[Any] = field(default_factory=list)  # symbolic sizes that it saved for the backward
    made: Seen = ()  # outputs of the forward
    leaves: tuple[tuple[int, Callable[[], torch.Tensor | None]], ...] = ()  # inputs that require a gradient, by position
    undefined: frozenset[int] = frozenset()  # tangents that were None in the backward
    tangents: Seen = ()
    gradients: Seen = ()  # results of the backward
    held_bytes: int = 0  # bytes that eager code held and segments had returned when the forward began
    existing: frozenset[int] = frozenset()  # identities of leaves that had a gradient when the forward began
    tensors: tuple[Callable[[], torch.Tensor | None], ...] = ()  # all inputs of the forward; empty if some are no tensors
    # Of a step that follows another one:
    fresh: Mapping[int, StorageRef] = field(default_factory=dict)  # inputs that are other tensors than in that step, by position
    made_refs: StorageRefs = ()
    tangent_refs: StorageRefs = ()
    gradient_refs: StorageRefs = ()

    def places(self, leaves: Set[int]) -> list[int]:
        """Positions of the inputs that are among some leaves, which are given by identity."""
        return [k for k, leaf in self.leaves if id(leaf()) in leaves]


def gradients_of(leaves: Iterable[Callable[[], torch.Tensor | None]]) -> list[torch.Tensor]:
    """Those of some leaves, which are weak references, that have a gradient."""
    return [t for leaf in leaves if (t := leaf()) is not None and t.grad is not None]


def gradient_parts(leaves: Iterable[Callable[[], torch.Tensor | None]]) -> Iterator[torch.Tensor]:
    """The tensors with the storages of the gradients of some leaves, which are weak references."""
    return (part for t in gradients_of(leaves) for part in strided_parts(t.grad))  # type: ignore[arg-type]


def storage_refs(values: Iterable[Any]) -> list[StorageRef | None]:
    """Weak references to the storages of tensors; None for other objects."""
    return [weakref.ref(v.untyped_storage()) if v is not None and isinstance(v, torch.Tensor) else None for v in values]
