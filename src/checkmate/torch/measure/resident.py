"""Bytes that are allocated on the device while a graph is compiled, and that no plan changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from checkmate.torch.graph.storages import current_bytes, unique_bytes
from checkmate.torch.options import Options


def gradient_bytes(example_inputs: Sequence[Any], accumulate: bool) -> int:
    """Bytes of gradients that are there when a graph is compiled, or may be there when it runs."""
    leaf = [t for t in example_inputs if isinstance(t, torch.Tensor) and t.is_leaf]
    coming = [t for t in leaf if t.requires_grad and t.grad is None] if accumulate else []
    return unique_bytes(t.grad for t in leaf if t.grad is not None) + unique_bytes(coming)


def other_allocated_bytes(example_inputs: Sequence[Any], options: Options) -> int:
    """Bytes allocated on the device that a graph does not show: known on CUDA, where the allocator says it."""
    tensors = [t for t in example_inputs if isinstance(t, torch.Tensor)]
    device = (
        torch.device(options.device) if options.device else next((t.device for t in tensors if t.device.type == "cuda"), None)
    )
    if device is None or device.type != "cuda":
        return 0
    seen = unique_bytes(tensors, current_bytes) + gradient_bytes(example_inputs, accumulate=False)
    return max(0, torch.cuda.memory_allocated(device) - seen)
