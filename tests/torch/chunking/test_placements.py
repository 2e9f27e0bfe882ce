"""Pieces of tensors, and the arguments of an op for them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from checkmate.torch.chunking.rules.placements import Rule, Split, arguments_of_piece, cuts, sliced

aten = torch.ops.aten


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 40))
def test_axes_of_one_length_are_cut_alike(rows: int, columns: int, count: int) -> None:
    """Tensors of a region have the axis as one dimension or as two: their pieces must hold the same elements."""
    flat = torch.arange(rows * columns).view(1, -1, 1).expand(2, -1, 3)
    folded = flat.reshape(2, rows, columns, 3)
    expected = [sliced(flat, each)[0, :, 0].tolist() for each in cuts(tuple(flat.shape), Split((1,)), count) or ()]
    assert [x for piece in expected for x in piece] == list(range(rows * columns))
    assert len({len(piece) for piece in expected[:-1]}) <= 1 and len(expected) <= count
    size = len(expected[0])
    pieces = cuts(tuple(folded.shape), Split((1, 2)), count)
    if size % columns and columns % size:
        assert pieces is None, "neither whole rows nor parts of one"
        return
    assert pieces is not None
    assert [sliced(folded, each)[0, :, :, 0].flatten().tolist() for each in pieces] == expected


def test_sizes_among_the_arguments_become_those_of_the_piece() -> None:
    """A view of a piece has the shape of the piece."""
    x = torch.zeros(3, 4)
    args = arguments_of_piece(aten.view.default, Rule((Split((0,)),), (Split((0,)),)), (x, [8, 4]), [(3, 4)])
    assert args == (x, [3, 4])
