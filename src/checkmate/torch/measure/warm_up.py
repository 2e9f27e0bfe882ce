"""Memory that libraries allocate at their first call and keep, made before anything is counted."""

from __future__ import annotations

import functools
import logging

import torch

from checkmate.torch._compat.dispatch import no_modes

_log = logging.getLogger("checkmate.torch")

_SIZE = 64


def warm_up(device: torch.device | None) -> None:
    """Have the matrix library of a CUDA device allocate its workspaces, so that they are among the resident bytes.

    cuBLAS and cuBLASLt keep a workspace of 8 to 32 MiB for each handle and stream, and PyTorch has a handle for each thread
    (aten/src/ATen/cuda/CublasHandlePool.cpp): one for the thread that runs forwards, one for autograd's that runs backwards. They
    come from the caching allocator at the first product. If that is the first product of a planned step, they are memory beside
    the plan.

    Args:
        device: The CUDA device; None for a CPU, where nothing is to be done.
    """
    if device is not None:
        _products(device.type, device.index if device.index is not None else torch.cuda.current_device())


@functools.cache
def _products(kind: str, index: int) -> None:
    """Multiply once in each thread, by both libraries, for the types of numbers that models are trained in."""
    device = torch.device(kind, index)
    with no_modes(), torch.enable_grad():
        for dtype in (torch.float32, torch.bfloat16):
            try:
                x, weight = (torch.zeros(_SIZE, _SIZE, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
                bias = torch.zeros(_SIZE, dtype=dtype, device=device, requires_grad=True)
                (torch.nn.functional.linear(x, weight, bias) @ weight).sum().backward()
            except RuntimeError as error:  # a type that the device does not know
                _log.debug("no products of %s to warm up with: %s", dtype, error)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
