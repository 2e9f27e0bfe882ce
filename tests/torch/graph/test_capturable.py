"""What a CUDA graph cannot record is found in a traced step, as if it were captured on a device that is not present."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from checkmate import OptionError
from checkmate.torch._compat.dispatch import FakeTensorMode, fake_mode_with_numbers
from checkmate.torch.graph.capturable import refuse_uncapturable

CUDA = torch.device("cuda", 0)
MODE = fake_mode_with_numbers()


def refuse(step: Callable[..., object], mode: FakeTensorMode = MODE) -> None:
    """Trace a step of a tensor of the device and one of the host, and look at it as if it were captured."""
    with mode:
        given = torch.empty(4, device=CUDA), torch.empty(4)
    with mode:
        traced = make_fx(step)(*given)
    refuse_uncapturable(traced.graph, CUDA)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda x, y: x * x.sum().item(), r"replay aten\._local_scalar_dense\.default \(.*\): it reads a number back to Python"),
        (lambda x, y: torch.ops.aten.nonzero(x), r"replay aten\.nonzero.*: it makes a tensor whose size depends on data"),
        (lambda x, y: x + y.to(CUDA), r"replay aten\._to_copy.*: it reads a tensor of the host"),
        (lambda x, y: y * 2, r"replay aten\.mul.*: it reads a tensor of the host"),
        (lambda x, y: x.cpu(), r"replay aten\._to_copy.*: it copies to the host"),
        (lambda x, y: x + torch.ones(4).to(CUDA), r"replay aten\._to_copy.*: it copies from the host"),
        (
            lambda x, y: torch.ops.aten.index(x, [torch.ones(2, dtype=torch.int64)]),
            r"replay aten\.index.*: it copies from the host",
        ),
        (lambda x, y: x + torch.rand(4).to(CUDA), r"replay aten\.rand.*: it copies to the host"),
    ],
)
def test_what_no_capture_allows_is_refused(step: Callable[..., object], words: str) -> None:
    """Numbers read back, sizes that data decides, and the host, whose work no replay repeats; the error has op and line."""
    with pytest.raises(OptionError, match=words):
        refuse(step)


def test_an_index_that_is_a_mask_is_refused() -> None:
    """The size of the result depends on the mask; of a mask that is indexed by numbers it does not."""
    with MODE:
        traced = make_fx(lambda x: torch.ops.aten.index(x, [x > 0]))(torch.empty(4))
    with pytest.raises(OptionError, match=r"replay aten\.index.*: it makes a tensor whose size depends on data"):
        refuse_uncapturable(traced.graph, torch.device("cpu"))


def test_constants_of_the_host_and_tables_of_indices_are_allowed() -> None:
    """They are in the graph as they were captured, and no step changes them."""
    refuse(lambda x, y: torch.ops.aten.index(x * torch.full((), 2.0), [torch.arange(2, device=CUDA)]))
    refuse(lambda x, y: torch.ops.aten.index(x > 0, [torch.arange(2, device=CUDA)]))
