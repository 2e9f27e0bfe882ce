"""A tensor that is added to in place is read after that, whatever the loop that reads it is fused with."""

from __future__ import annotations

import torch

from checkmate.torch._compat.inductor import inductor_config, reads_after_writes


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
    with reads_after_writes(), inductor_config.patch(fx_graph_cache=False):
        _, found = torch.compile(function)(a, w)
    torch.testing.assert_close(found, function(a, w)[1])
