"""PyTorch's CUDA allocator: its settings in this process, and the bytes of a plan that count against a budget."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping

import torch

from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.units import format_bytes
from checkmate.frontend.counted_memory import Counted
from checkmate.studies.reserved import allocator_peaks, smallest_arena
from checkmate.torch._compat.dispatch import no_modes
from checkmate.torch.options import BudgetOf

_log = logging.getLogger("checkmate.torch")


def allocator_settings(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The allocator's settings by name, from the environment; empty if all are the defaults.

    Examples:
        >>> allocator_settings({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True, max_split_size_mb:128"})
        {'expandable_segments': 'True', 'max_split_size_mb': '128'}
    """
    given = os.environ if environment is None else environment
    # The variable that overrides the others comes first (c10/core/AllocatorConfig.cpp).
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    text = next((given[name] for name in names if given.get(name)), "")
    pairs = (part.partition(":") for part in text.split(","))
    return {name.strip(): value.strip() for name, _, value in pairs if name.strip()}


def has_expandable_segments(environment: Mapping[str, str] | None = None) -> bool:
    """Whether segments grow and shrink page by page, in place of segments of fixed sizes."""
    return allocator_settings(environment).get("expandable_segments", "").lower() == "true"


def counted_memory(budget_of: BudgetOf, device: torch.device | None) -> Counted | None:
    """The function that counts a plan against a budget on a CUDA device or a CPU; None if only the live bytes count.

    With segments of fixed sizes a block can be up to 1 MiB larger than its request. ``torch.cuda.max_memory_allocated`` counts
    whole blocks, and therefore the budget does too.
    """
    if budget_of == "reserved":
        return ReservedMemory(device)
    if device is None or has_expandable_segments() or torch.cuda.get_allocator_backend() != "native":
        return None
    return lambda graph, plan: allocator_peaks(graph, plan).allocated_bytes


class ReservedMemory:
    """Memory that the CUDA allocator holds while a plan runs, if it was reserved in one piece before.

    A call predicts the bytes. On a CPU, without this allocator, there is only the prediction.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._checked = False
        self._unused_bytes = 0
        if device is not None:
            torch.cuda.empty_cache()  # blocks of earlier work; segments with resident memory stay, unused parts included
            self._unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def __call__(self, graph: Graph, plan: Plan) -> int:
        """Predicted bytes of all segments."""
        return smallest_arena(graph, plan).reserved_bytes + self._unused_bytes

    def prepare(self, graph: Graph, plan: Plan) -> None:
        """Reserve the memory for a plan in one piece, from which the allocator cuts its blocks."""
        if self._device is None:
            return
        size = smallest_arena(graph, plan).size_bytes
        torch.cuda.empty_cache()
        if size:
            torch.empty(size, dtype=torch.uint8, device=self._device)

    def check(self, budget_bytes: int) -> None:
        """Warn, once, if the device holds more than the budget after a step."""
        if self._device is None or self._checked:
            return
        self._checked = True
        held = torch.cuda.memory_reserved(self._device)
        if held > budget_bytes:
            _log.warning(
                "the allocator holds %s after the first step, more than the budget of %s: what ran beside the plan is not in its "
                "prediction\nhint: call torch.cuda.empty_cache() once after the first step, or lower the budget by %s",
                format_bytes(held),
                format_bytes(budget_bytes),
                format_bytes(held - budget_bytes),
            )


def warm_up(device: torch.device | None) -> None:
    """Have the matrix library of a CUDA device allocate its workspaces, and thereby count them as resident bytes.

    cuBLAS and cuBLASLt keep a workspace of 8 to 32 MiB for each handle and stream, and PyTorch has a handle for each thread
    (aten/src/ATen/cuda/CublasHandlePool.cpp): one for the thread of the forward, one for the thread of autograd's backward. The
    caching allocator allocates a workspace at the first product. If that product is in a planned step, the plan does not include
    the workspace.
    """
    if device is not None:
        _products(device.type, device.index if device.index is not None else torch.cuda.current_device())


@functools.cache
def _products(kind: str, index: int) -> None:
    """Multiply once in each thread, by both libraries, for the dtypes of training."""
    device = torch.device(kind, index)
    with no_modes(), torch.enable_grad():
        for dtype in (torch.float32, torch.bfloat16):
            try:
                x, weight = (torch.zeros(64, 64, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
                bias = torch.zeros(64, dtype=dtype, device=device, requires_grad=True)
                (torch.nn.functional.linear(x, weight, bias) @ weight).sum().backward()
            except RuntimeError as error:  # a type that the device does not know
                _log.debug("no products of %s to warm up with: %s", dtype, error)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
