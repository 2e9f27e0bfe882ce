"""PyTorch's CUDA caching allocator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from checkmate.allocators.heap import Chunk, Heap

_MIB: Final = 2**20

# PyTorch's constants, with its names: c10/core/AllocatorConfig.h, PyTorch 2.13. They are part of what is simulated.
_MIN_BLOCK: Final = 512
"""kMinBlockSize: every size is rounded up to a multiple of it."""
_SMALL_SIZE: Final = 1 * _MIB
"""kSmallSize: the largest request that is served from small segments."""
_SMALL_BUFFER: Final = 2 * _MIB
"""kSmallBuffer: size of a small segment."""
_MIN_LARGE_ALLOC: Final = 10 * _MIB
"""kMinLargeAlloc: smaller requests share segments of `_LARGE_BUFFER`; others have a segment each."""
_LARGE_BUFFER: Final = 20 * _MIB
"""kLargeBuffer: size of a shared large segment."""
_ROUND_LARGE: Final = 2 * _MIB
"""kRoundLarge: other segments are rounded up to a multiple of it."""


@dataclass(slots=True)
class CachingAllocator(Heap):
    """PyTorch's caching allocator: separate pools for small and large requests, and no segment is released.

    Examples:
        >>> allocator = CachingAllocator()
        >>> block = allocator.allocate(1000)
        >>> allocator.in_use, allocator.held
        (1024, 2097152)
    """

    def allocate(self, size_bytes: int) -> Chunk:
        """Allocate the smallest free block that is large enough, or one in a new segment.

        The rest of the block is split off if it is at least 512 bytes in a small segment, or more than 1 MiB in a large one
        (should_split): smaller rests stay with it as internal fragmentation.

        Args:
            size_bytes: Bytes requested.
        """
        size = max(_MIN_BLOCK, -(-size_bytes // _MIN_BLOCK) * _MIN_BLOCK)
        small = size <= _SMALL_SIZE
        block = self._smallest(size, small) or self._extend(_segment_bytes(size), small)
        rest = block.size - size
        if rest >= _MIN_BLOCK if small else rest > _SMALL_SIZE:
            self._cut(block, size)
        return self._hand_out(block)


def _segment_bytes(size: int) -> int:
    if size <= _SMALL_SIZE:
        return _SMALL_BUFFER
    return _LARGE_BUFFER if size < _MIN_LARGE_ALLOC else -(-size // _ROUND_LARGE) * _ROUND_LARGE
