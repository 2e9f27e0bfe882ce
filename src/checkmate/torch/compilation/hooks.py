"""Callbacks and settings of a compilation for callers inside this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from checkmate.core.result import Result
from checkmate.torch.chunking.choose import ChunkableStep
from checkmate.torch.emulate.device import EmulatedDevice
from checkmate.torch.joint.capture import Capture
from checkmate.torch.steps.program import GraphInterface


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Callbacks and settings of a compilation."""

    captured: Callable[[ChunkableStep[Capture]], NoReturn] | None = None  # called in place of planning, and ends the compilation
    planned: Callable[[GraphInterface, Result], None] = lambda interface, result: None  # called before anything runs
    before_forward: Callable[[], None] | None = None  # called before every run of a compiled forward; may raise
    inference: bool = True  # whether graphs without gradients are compiled; they are refused otherwise
    whole: bool = False  # whether the graph is a whole step, with the backward and the updates
    returned_bytes: int = 0  # bytes of the live results of the last run of a whole step
    target: EmulatedDevice | None = None  # the device to plan for; by default the one at hand
