"""TensorFlow's best-fit allocator with coalescing (BFC)."""

from __future__ import annotations

from dataclasses import dataclass

from checkmate.allocators.heap import Chunk, Heap

_ALIGNMENT = 256  # the allocator's smallest chunk; sizes are multiples of it


_FIRST_REGION = 2 << 20


_FRAGMENT = 128 << 20  # more than this is split off in any case


@dataclass(slots=True)
class Bfc(Heap):
    """TensorFlow's best-fit allocator with coalescing.

    Examples:
        >>> heap = Bfc()
        >>> chunk = heap.allocate(3_000_000)
        >>> heap.in_use
        4194304
    """

    _region: int = _FIRST_REGION

    def allocate(self, size_bytes: int) -> Chunk:
        """Hand out the smallest free chunk that is large enough; its rest is split off if it is as large again."""
        size = max(_ALIGNMENT, -(-size_bytes // _ALIGNMENT) * _ALIGNMENT)
        chunk = self._smallest(size) or self._grow(size)
        if chunk.size >= 2 * size or chunk.size - size >= _FRAGMENT:
            self._cut(chunk, size)
        return self._hand_out(chunk)

    def _grow(self, size: int) -> Chunk:
        doubled = False
        while size > self._region:
            self._region *= 2
            doubled = True
        chunk = self._extend(self._region)
        if not doubled:
            self._region *= 2
        return chunk
