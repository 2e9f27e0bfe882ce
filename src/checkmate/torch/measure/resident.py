"""Resident bytes that a graph does not show: gradients, and other allocations on a CUDA device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from checkmate.torch.graph.storages import current_bytes, unique_bytes
from checkmate.torch.options import Options


def gradient_bytes(example_inputs: Sequence[Any], accumulate: bool) -> int:
    """Bytes of the gradients of a graph's parameters that are held while it runs.

    Args:
        example_inputs: Inputs of the graph, its parameters among them.
        accumulate: Whether gradients of earlier backwards may exist when the graph runs, so that those missing now count.
    """
    leaf = [t for t in example_inputs if isinstance(t, torch.Tensor) and t.is_leaf]
    coming = [t for t in leaf if t.requires_grad and t.grad is None] if accumulate else []
    return unique_bytes(t.grad for t in leaf if t.grad is not None) + unique_bytes(coming)


def other_allocated_bytes(example_inputs: Sequence[Any], options: Options) -> int:
    """Bytes on the device that are neither inputs of a graph nor their gradients.

    Args:
        example_inputs: Inputs of the graph.
        options: Options of the backend; ``device`` names the device, by default that of the inputs.

    Returns:
        Bytes, from the CUDA allocator's count; 0 on a CPU, whose allocator keeps none.
    """
    tensors = [t for t in example_inputs if isinstance(t, torch.Tensor)]
    device = (
        torch.device(options.device) if options.device else next((t.device for t in tensors if t.device.type == "cuda"), None)
    )
    if device is None or device.type != "cuda":
        return 0
    seen = unique_bytes(tensors, current_bytes) + gradient_bytes(example_inputs, accumulate=False)
    return max(0, torch.cuda.memory_allocated(device) - seen)
