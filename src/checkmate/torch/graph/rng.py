"""Recomputation of random ops: the generator's state is saved at the first computation and replayed later.

Without replay, dropout would draw another mask in the backward than in the forward, and gradients would be wrong. The ops that
save and replay are defined by torch's own partitioner (``torch/_prims/rng_prims.py``).
"""

from __future__ import annotations

import functools
import operator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from checkmate.torch._compat.dispatch import detect_fake_mode, run_and_save_rng_state, run_with_rng_state
from checkmate.torch.graph.storages import leaves

_CUDA_RNG_STATE_BYTES = 16
"""State of a CUDA generator: a 64-bit seed and a 64-bit Philox offset (``aten/src/ATen/cuda/CUDAGeneratorImpl.cpp``)."""


@functools.cache
def cpu_rng_state_bytes() -> int:
    """5056 bytes in torch 2.13: a Mersenne Twister and cached normal samples (``aten/src/ATen/CPUGeneratorImpl.cpp``)."""
    return torch.get_rng_state().untyped_storage().nbytes()


def rng_state_bytes(node: fx.Node) -> int:
    """Bytes of the generator state that must be held to recompute a random op: 5056 on the CPU, 16 on CUDA."""
    devices = {t.device.type for t in leaves(node.meta.get("val"))}
    return _CUDA_RNG_STATE_BYTES if "cuda" in devices else cpu_rng_state_bytes()


def generators_restored() -> AbstractContextManager[None]:
    """A block after which every random generator, of the CPU and of all CUDA devices, has the state from before the block."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    return torch.random.fork_rng(devices=devices)


def emit_with_saved_state(
    graph: fx.Graph, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[fx.Node, fx.Node, list[fx.Node]]:
    """Emit a random op that also returns the generator state from before it ran."""
    op: Any = node.target
    both = graph.call_function(run_and_save_rng_state, (op, *args), kwargs)
    state = graph.call_function(operator.getitem, (both, 0))
    output = graph.call_function(operator.getitem, (both, 1))
    value = node.meta["val"]
    mode = detect_fake_mode(value)
    assert mode is not None
    with mode:
        held = torch.empty(rng_state_bytes(node), dtype=torch.uint8, device="cpu")
    for emitted, meaning in ((both, (held, value)), (state, held), (output, value)):
        emitted.meta = {**node.meta, "val": meaning} if emitted is not state else {"val": held}
    return output, state, [both, state, output]


def emit_replay(graph: fx.Graph, node: fx.Node, state: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Emit a random op that runs from a saved generator state and leaves the generator unchanged."""
    op: Any = node.target
    again = graph.call_function(run_with_rng_state, (state, op, *args), kwargs)
    again.meta = dict(node.meta)
    return again
