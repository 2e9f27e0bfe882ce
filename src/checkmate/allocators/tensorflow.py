"""TensorFlow's best-fit allocator with coalescing (BFC)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from checkmate.allocators.heap import Chunk, Heap

# TensorFlow's constants: xla/tsl/framework/bfc_allocator.h and .cc, TensorFlow 2.21. They are part of what is simulated.
_MIN_CHUNK: Final = 256
"""kMinAllocationSize: every size is rounded up to a multiple of it."""
_FIRST_REGION: Final = 2 * 2**20
"""Size of the first region under ``allow_growth``; every further region is twice as large."""
_MAX_FRAGMENT: Final = 128 * 2**20
"""max_internal_fragmentation_bytes: a rest of this size is split off however large the chunk is."""


@dataclass(slots=True)
class Bfc(Heap):
    """TensorFlow's best-fit allocator with coalescing, in the mode in which its memory grows on demand.

    Examples:
        >>> heap = Bfc()
        >>> chunk = heap.allocate(3_000_000)
        >>> heap.in_use
        4194304
    """

    _region: int = _FIRST_REGION

    def allocate(self, size_bytes: int) -> Chunk:
        """Allocate the smallest free chunk that is large enough, or one in a new region.

        The chunk is split if it is at least twice as large as the request, or if 128 MiB or more would stay unused
        (BFCAllocator::FindChunkPtr): smaller rests stay with it as internal fragmentation.

        Args:
            size_bytes: Bytes requested.
        """
        size = max(_MIN_CHUNK, -(-size_bytes // _MIN_CHUNK) * _MIN_CHUNK)
        chunk = self._smallest(size) or self._grow(size)
        if chunk.size >= 2 * size or chunk.size - size >= _MAX_FRAGMENT:
            self._cut(chunk, size)
        return self._hand_out(chunk)

    def _grow(self, size: int) -> Chunk:
        """Make a region of one chunk (BFCAllocator::Extend)."""
        doubled = False
        while size > self._region:
            self._region *= 2
            doubled = True
        chunk = self._extend(self._region)
        if not doubled:
            self._region *= 2
        return chunk
