"""What is written over: after it was read, and as soon as it was."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from checkmate.torch import measure_peak
from checkmate.torch._compat.inductor import InductorChoices, under_a_plan
from tests.torch.inductor.conftest import inductor_settings


def test_a_sum_is_scattered_before_it_is_read() -> None:
    """PyTorch 2.13 reads zeros here: it computes the last loop again, to fuse it with the first, and loses what it waits for."""
    torch.manual_seed(0)
    a, w = torch.randn(4, 8, 32, 32), torch.randn(8)
    index, source = torch.randint(0, 1024, (32, 256)), torch.randn(32, 256)

    def function(a: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(a * w[:, None, None])
        z = torch.zeros(32, 1024).scatter_add(1, index, source).view(4, 8, 32, 32)
        return y, torch.where(y <= 0, 0.0, z)

    torch._dynamo.reset()
    with under_a_plan(InductorChoices()), inductor_settings(fx_graph_cache=False):
        _, found = torch.compile(function)(a, w)
    torch.testing.assert_close(found, function(a, w)[1])


def test_a_product_with_a_parameter_that_is_updated_later_is_written_over() -> None:
    """PyTorch 2.13 does not: the update waits for the product, and counts as a reader of it."""
    from torch._inductor.utils import run_and_get_code

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (torch.relu(x @ w) @ w).sum(0)
        w.add_(y)
        return y

    torch.manual_seed(0)
    x, w = torch.randn(64, 32), torch.randn(32, 32)
    expected = function(x, w.clone())
    patches = inductor_settings(fx_graph_cache=False, allow_buffer_reuse=False)
    torch._dynamo.reset()
    with under_a_plan(InductorChoices()), patches:
        found, (code, *_) = run_and_get_code(torch.compile(function), x, w.clone())
    torch.testing.assert_close(found, expected)
    reused = [line for line in code.splitlines() if line.endswith("# reuse")]
    assert len(reused) == 1, "the result of relu is written over its operand"


def test_what_is_in_registers_is_not_written_over() -> None:
    """PyTorch 2.13 allocates memory for a sigmoid that is not stored, because the gradient of its operand is written over it."""
    from torch._inductor.utils import run_and_get_code

    def function(x: torch.Tensor, w: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate = x @ w
        open_share = torch.sigmoid(gate)
        return (up * open_share * (1 + gate * (1 - open_share))) @ w

    torch.manual_seed(0)
    x, w, up = torch.randn(64, 32), torch.randn(32, 32), torch.randn(64, 32)
    patches = inductor_settings(fx_graph_cache=False, allow_buffer_reuse=False)
    torch._dynamo.reset()
    with under_a_plan(InductorChoices()), patches:
        found, (code, *_) = run_and_get_code(torch.compile(function), x, w, up)
    torch.testing.assert_close(found, function(x, w, up))
    allocated = [line for line in code.splitlines() if "= empty_strided_cpu(" in line]
    assert len(allocated) == 2, "the two products"


def test_what_a_loop_reads_last_is_freed_before_the_next_loop() -> None:
    """Both are in one C++ function otherwise: all results of the function are allocated before it is called."""

    def function(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x @ w).sin().sum(0), y.sin()

    torch.manual_seed(0)
    x, w, y = torch.randn(512, 8), torch.randn(8, 512), torch.randn(300, 700)
    patches = {"fx_graph_cache": False, "allow_buffer_reuse": False, "reorder_for_peak_memory": False}
    peaks = []
    for context in (nullcontext(), under_a_plan(InductorChoices())):
        torch._dynamo.reset()
        with context, inductor_settings(**patches):
            run = torch.compile(function)
            for mine, expected in zip(run(x, w, y), function(x, w, y), strict=True):
                torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)
            peaks.append(measure_peak(lambda run=run: run(x, w, y)))
    product, result = 4 * 512 * 512, 4 * 300 * 700
    assert peaks[0] >= product + result
    assert max(product, result) <= peaks[1] < product + 4096
