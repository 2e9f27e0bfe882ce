"""An op that computes its results piece by piece: its time and memory are measured by piece, or estimated from the graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

PIECES: Final = "checkmate_pieces"
"""Key in a node's metadata: its `Pieces`, where it runs piece by piece."""


@dataclass(frozen=True, eq=False, slots=True)
class Pieces:
    """The graphs that an op runs one after the other.

    Attributes:
        graphs: The graph of each piece; equal pieces have the same one. Its inputs are slices of operands and results, sums so
            far, and buffers, which have no traced tensor. The first one returns the first terms of the sums.
        buffers_bytes: Bytes of the buffers of each piece; they are kept for the next one.
        sums: Whether each result is a sum over the pieces, and not assembled from slices.
        run: Runs them on whole operands: yields None after each piece, and the results at last.
    """

    graphs: tuple[fx.Graph, ...]
    buffers_bytes: tuple[int, ...]
    sums: tuple[bool, ...]
    run: Callable[[Sequence[torch.Tensor]], Iterator[list[torch.Tensor] | None]]
