"""Whether a stage in pieces gives the bits of its whole ops, found out by running both on this device.

A kernel may take another path for a slice: products of few rows, or the vector tail of an elementwise op. Which path it takes
depends on sizes and never on data, so that a comparison on random data at the real sizes decides. That does not hold for sums
over pieces, whose additions have another order: there equality is luck, and no stage with one is tested.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from checkmate.torch._compat.dispatch import no_dispatch, no_modes
from checkmate.torch._compat.sharding import Layout
from checkmate.torch.chunking.graph_values import outputs, tensor
from checkmate.torch.chunking.program import Part
from checkmate.torch.graph.rng import generators_restored

_EXPONENTS = 12
"""The second data set has numbers of so many powers of ten, where a sum in another order shows at once."""


def keeps_bits(part: Part) -> bool:
    """Whether a part returns what its whole ops return, byte for byte, on two random data sets.

    Args:
        part: A part of a region.
    """
    program = part.program
    if any(program.sums):
        return False
    known = _KNOWN.get(program.key)
    if known is None:
        with generators_restored(), no_dispatch(), no_modes(), torch.no_grad():
            known = _KNOWN[program.key] = all(_equal(part, fill) for fill in (_normal, _mixed))
    return known


_KNOWN: dict[str, bool] = {}
"""Verdicts by the key of the program; layers share one."""


def _equal(part: Part, fill: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    stage = part.stage
    given = {value: _random(Layout.of(tensor(value)), fill) for value, _ in stage.operands}
    pieces = part.program([given[value] for value, _ in stage.operands])
    made = dict(given)
    for op in stage.ops:
        args, kwargs = fx.map_arg((op.args, op.kwargs), made.__getitem__)
        result = op.target(*args, **kwargs)  # type: ignore[operator]
        for i, value in enumerate(outputs(op)):
            if value is not None:
                made[value] = result if value is op else result[i]
    return all(_same_bytes(made[value], piece) for value, piece in zip(stage.results, pieces, strict=True))


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    # As bytes, because NaN is not equal to itself.
    return torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b)))


def _random(layout: Layout, fill: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    made = layout.empty()
    # Written by storage: elements of an expanded tensor share memory, and PyTorch refuses to write to them.
    stored = made.as_strided((made.untyped_storage().nbytes() // made.element_size(),), (1,))
    if layout.dtype.is_floating_point:
        fill(stored)
    else:
        stored.fill_(layout.dtype is torch.bool)  # 0 is a valid index of anything
    return made


def _normal(made: torch.Tensor) -> torch.Tensor:
    return made.normal_()


def _mixed(made: torch.Tensor) -> torch.Tensor:
    exponents = torch.randint_like(made, -_EXPONENTS // 2, _EXPONENTS // 2)
    return made.normal_().mul_(torch.pow(10.0, exponents))
