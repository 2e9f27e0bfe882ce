"""exp, tanh and the like have the same bits in loops that are vectorised and in those that are not."""

from __future__ import annotations

from collections.abc import Callable

import torch

from checkmate.torch._compat.inductor import InductorChoices, under_a_plan
from tests.torch.inductor.conftest import inductor_settings

WIDTH = 24
"""One vector of 16 numbers, and 8 after it."""

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "log": lambda x: torch.log(x.abs() + 1),
    "log1p": lambda x: torch.log1p(x.abs()),
    "expm1": torch.expm1,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "sin": torch.sin,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.1),
}


def test_what_it_is_fused_with_changes_no_bit() -> None:
    torch.manual_seed(0)
    x, ids = torch.randn(64, WIDTH), torch.arange(64) % WIDTH

    def alone(x: torch.Tensor) -> list[torch.Tensor]:
        return [function(x) for function in FUNCTIONS.values()]

    def beside_integers(x: torch.Tensor) -> list[torch.Tensor]:
        marked = ids[:, None] == torch.arange(WIDTH)
        return [torch.where(marked, function(x), -function(x)).abs() for function in FUNCTIONS.values()]

    def of_one_number(x: torch.Tensor) -> list[torch.Tensor]:
        return [function(x[:, :1]).double() for function in FUNCTIONS.values()]

    torch._dynamo.reset()
    with under_a_plan(InductorChoices()), inductor_settings(fx_graph_cache=False):
        found = [torch.compile(f)(x) for f in (alone, beside_integers, of_one_number)]
    for name, vectors, mixed, scalars in zip(FUNCTIONS, *found, strict=True):
        assert torch.equal(vectors.abs(), mixed), name
        assert torch.equal(vectors[:, :1].double(), scalars), name
