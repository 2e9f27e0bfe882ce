"""A step by what runs piece by piece in it: each set of kinds of regions gives another graph to plan."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Generic, Protocol, TypeVar

from torch import fx

from checkmate.core.graph import Graph
from checkmate.frontend.planner import near_smallest
from checkmate.solvers.bounds.floor import floor
from checkmate.torch.chunking.kinds import Kind, kinds_of
from checkmate.torch.chunking.program import NotChunkable
from checkmate.torch.chunking.replace import with_regions
from checkmate.torch.graph.copy import copy_graph
from checkmate.torch.passes.loss_picks import make_ones_without_input, pick_before_reducing

_log = logging.getLogger("checkmate.torch")

LEAST_GAIN: Final = 0.002
"""Share of a cost or of a peak that another kind must save. Costs are not known more exactly."""

SMALLEST_S: Final = 1.0
"""Most seconds of a search for a plan of a small peak."""

_MOST_KINDS: Final = 4
"""Kinds that are tried, those that save most."""


class HasGraph(Protocol):
    """A captured step."""

    @property
    def graph(self) -> Graph:
        """The graph to plan."""
        ...


CapturedT = TypeVar("CapturedT", bound=HasGraph)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Which ops may run piece by piece.

    Attributes:
        exact: Whether results have to be those of the whole ops to the bit.
        allows: Whether an op may; all may by default.
        once: Whether only those may that compute nothing twice.
    """

    exact: bool
    allows: Callable[[fx.Node], bool] = lambda op: True
    once: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class ChunkableStep(Generic[CapturedT]):
    """A step whose joint modules can be changed before it is planned.

    Attributes:
        whole: The step as it was captured, in which nothing runs piece by piece.
        joints: Its joint modules.
        captured: Captures the step with other joint modules.
    """

    whole: CapturedT
    joints: tuple[fx.GraphModule, ...]
    captured: Callable[[Sequence[fx.GraphModule]], CapturedT]


class Variants(Generic[CapturedT]):
    """A step by what runs piece by piece in it.

    Args:
        step: The step.
        chunks: What may run piece by piece.
        until: Value of ``time.perf_counter()`` from which it raises `TimeoutError`; None for never.
    """

    def __init__(self, step: ChunkableStep[CapturedT], chunks: Chunks, until: float | None = None) -> None:
        self._step, self._chunks, self._until = step, chunks, until
        self._known: dict[frozenset[Kind], CapturedT] = {frozenset(): step.whole}

    @cached_property
    def kinds(self) -> list[Kind]:
        """The kinds of regions to choose from, those that save most."""
        began = time.perf_counter()
        chunks = self._chunks
        found = [
            kind for joint in self._joints for kind in kinds_of(joint.graph, chunks.allows, exact=chunks.exact, once=chunks.once)
        ]
        _log.debug("found %d kinds of regions in %.1f s", len(found), time.perf_counter() - began)
        return _first_kinds(sorted(found, key=lambda kind: kind.saved_bytes, reverse=True))

    @property
    def _smallest_kinds(self) -> list[Kind]:
        """Those with which memory gets smallest."""
        return [kind for kind in self.kinds if kind.most_pieces]

    @cached_property
    def _joints(self) -> list[fx.GraphModule]:
        return [cuttable(joint) for joint in self._step.joints]

    def captured(self, kinds: tuple[Kind, ...]) -> CapturedT:
        """The step with some kinds in pieces.

        Raises:
            NotChunkable: Regions of these kinds wait for each other.
        """
        if self._until is not None and time.perf_counter() > self._until:
            raise TimeoutError
        if frozenset(kinds) not in self._known:
            self._known[frozenset(kinds)] = self._capture(kinds)
        return self._known[frozenset(kinds)]

    def _capture(self, kinds: tuple[Kind, ...]) -> CapturedT:
        parts = [part for kind in kinds for part in kind.parts]
        modules = list(self._step.joints)
        for i, joint in enumerate(self._joints):
            mine = [part for part in parts if part.stage.region.seed.graph is joint.graph]
            if mine:
                modules[i] = with_regions(joint, mine)
        return self._step.captured(modules)

    def below(self, budget_bytes: int) -> tuple[Kind, ...]:
        """Kinds with which the floor is within a budget, or as low as it gets, by adding the one that lowers it most."""
        chosen: list[Kind] = []
        lowest = self._floor_bytes(chosen)
        while lowest > budget_bytes:
            left = [kind for kind in self._smallest_kinds if not any(kind.excludes(other) for other in chosen)]
            floors = {kind: self._floor_bytes([*chosen, kind]) for kind in left}
            best = min(left, key=floors.__getitem__, default=None)
            if best is None or floors[best] >= lowest:
                break
            chosen.append(best)
            lowest = floors[best]
        return tuple(chosen)

    def smallest(self, search_s: float = SMALLEST_S) -> tuple[Kind, ...]:
        """Kinds with which the smallest peak is low: those that lower the floor, and perhaps those that lower the peak further.

        Args:
            search_s: Seconds of a search for the smallest peak without the latter, and of one with them. The quick searches
                that choose them can be wrong by more than they save.
        """
        below = self.below(0)
        chosen = list(below)
        lowest = self._quick_bytes(chosen)
        for kind in self._smallest_kinds:
            if not any(kind.excludes(other) for other in chosen):
                peak = self._quick_bytes([*chosen, kind])
                if peak < (1 - LEAST_GAIN) * lowest:
                    chosen.append(kind)
                    lowest = peak
        if len(chosen) == len(below):
            return below
        return min((below, tuple(chosen)), key=lambda kinds: self._searched_bytes(kinds, search_s))

    def floors(self) -> list[int]:
        """The floors of all steps that were captured."""
        return [floor(captured.graph).peak_bytes for captured in self._known.values()]

    def _quick_bytes(self, kinds: Sequence[Kind]) -> int:
        return self._bytes(kinds, lambda graph: near_smallest(graph, SMALLEST_S).peak_bytes)

    def _searched_bytes(self, kinds: Sequence[Kind], search_s: float) -> int:
        return self._bytes(kinds, lambda graph: near_smallest(graph, search_s, enough_bytes=0).peak_bytes)

    def _floor_bytes(self, kinds: Sequence[Kind]) -> int:
        return self._bytes(kinds, lambda graph: floor(graph).peak_bytes)

    def _bytes(self, kinds: Sequence[Kind], of: Callable[[Graph], int]) -> int:
        try:
            return of(self.captured(tuple(kinds)).graph)
        except NotChunkable:
            return sys.maxsize


def _first_kinds(kinds: Sequence[Kind]) -> list[Kind]:
    """The first kinds, as many as are tried; other ways to run the same regions do not count."""
    first: list[Kind] = []
    for kind in kinds:
        if len(first) < _MOST_KINDS and not any(kind.excludes(other) for other in first):
            first.append(kind)
    return [kind for kind in kinds if any(kind.excludes(other) for other in first)]


def cuttable(joint: fx.GraphModule) -> fx.GraphModule:
    """A copy of a joint module in which losses can be cut.

    Args:
        joint: The module.
    """
    graph = copy_graph(joint.graph)
    pick_before_reducing(graph)
    make_ones_without_input(graph)
    graph.lint()
    return fx.GraphModule(joint, graph)
