"""Private names of torch's dispatcher: fake tensors, op types, higher-order ops."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._dispatch.python import no_python_dispatcher
from torch._guards import detect_fake_mode
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

__all__ = [
    "COLLECTIVES",
    "WATCHES_COMPILED_CODE",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "defined_memory",
    "detect_fake_mode",
    "dispatches_in_python",
    "fake_mode_with_numbers",
    "fake_tensor_on",
    "innermost_transform",
    "invoke_subgraph",
    "no_dispatch",
    "no_modes",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "top_mode",
]

COLLECTIVES = ("_c10d_functional", "c10d_functional", "_dtensor")
"""Namespaces of collectives: ops that exchange data with other processes."""


def fake_mode_with_numbers() -> FakeTensorMode:
    """A mode in which `Tensor.item` of a fake tensor returns a symbol, and not an error."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    mode.allow_scalar_outputs = True
    return mode


@contextmanager
def no_modes() -> Iterator[None]:
    """Context in which ops run for real and as fast as ever while Dynamo or AOTAutograd traces.

    There is no ``TorchDispatchMode``, and no dispatch through Python, which adds 25 microseconds to each op.
    """
    with _disable_current_modes(), no_python_dispatcher():
        yield


@contextmanager
def defined_memory() -> Iterator[None]:
    """Context in which PyTorch's ops give the same bits each time, where they can, and new tensors have defined content."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch._C._get_deterministic_fill_uninitialized_memory()
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch._C._set_deterministic_fill_uninitialized_memory(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch._C._set_deterministic_fill_uninitialized_memory(filled)
        torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])


top_mode = _get_current_dispatch_mode
"""The ``TorchDispatchMode`` that was begun last, or None."""

innermost_transform = peek_interpreter_stack
"""The transform of ``torch.func`` (``grad``, ``vmap``) that was begun last, or None."""


def dispatches_in_python(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class that handles its ops in Python, and wraps other tensors or none."""
    return type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]


WATCHES_COMPILED_CODE = hasattr(TorchDispatchMode, "ignore_compile_internals")
"""Whether Dynamo can compile while a dispatch mode is on."""


def fake_tensor_on(tensor: FakeTensor, device: torch.device) -> FakeTensor:
    """A fake tensor relabelled for another device."""
    mode = tensor.fake_mode
    with in_kernel_invocation_manager(mode):
        return FakeTensor(mode, torch.Tensor._make_subclass(torch.Tensor, tensor), device)
