"""Private names of torch's dispatcher: fake tensors, op types, higher-order ops, autocast."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._dispatch.python import no_python_dispatcher
from torch._guards import detect_fake_mode
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch._subclasses.meta_utils import MetaTensorDescriber
from torch.amp.autocast_mode import _enter_autocast as autocast_enter
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
    is_traceable_wrapper_subclass,
)

from checkmate.torch._compat import replaced

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "autocast_enter",
    "detect_fake_mode",
    "invoke_subgraph",
    "no_dispatch",
    "run_and_save_rng_state",
    "run_with_rng_state",
]

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of fake tensors if a number or a size depends on data."""

COLLECTIVES = ("_c10d_functional", "c10d_functional", "_dtensor")
"""Namespaces of collectives: ops that exchange data with other processes."""


def fake_mode_with_numbers() -> FakeTensorMode:
    """A mode in which `Tensor.item` of a fake tensor returns a symbol instead of an error."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    mode.allow_scalar_outputs = True
    return mode


def traced_parts(value: Any) -> Iterator[Any]:
    """The inputs that a traced graph has for an input: itself, or the tensors of which AOTAutograd builds a wrapper subclass."""
    if not is_traceable_wrapper_subclass(value):
        yield value
        return
    for name in value.__tensor_flatten__()[0]:
        yield from traced_parts(getattr(value, name))


@contextmanager
def traced_on(device: torch.device, of: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Let some tensors, with the parts of those that are built of others, have fake tensors on another device inside."""
    describe = MetaTensorDescriber.describe_tensor
    moves = [False]  # whether the tensor that is described moves, and those that it is a part of

    def described(self: MetaTensorDescriber, t: torch.Tensor, **options: Any) -> Any:
        moves.append(moves[-1] or of(t))
        try:
            found = describe(self, t, **options)
            return replace(found, device=device) if moves[-1] else found
        finally:
            moves.pop()

    with replaced(MetaTensorDescriber, "describe_tensor", described):
        yield


@contextmanager
def no_modes() -> Iterator[None]:
    """Context in which ops run for real and at full speed while Dynamo or AOTAutograd traces.

    There is no ``TorchDispatchMode``, and no dispatch through Python, which adds 25 microseconds to each op.
    """
    with _disable_current_modes(), no_python_dispatcher():
        yield


@contextmanager
def defined_memory() -> Iterator[None]:
    """Context in which PyTorch's ops give the same bits each time, if they can, and new tensors have defined content."""
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
    """Whether the class of a tensor handles its ops in Python; the tensor may wrap other tensors or none."""
    return type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]


def cudnn_reserve_bytes(x: torch.Tensor) -> int:
    """Bytes that cuDNN's BatchNorm saves for its backward besides its statistics; 0 without a CUDA device."""
    there = x.device.type == "cuda" and torch.cuda.is_available()
    return torch._C._get_cudnn_batch_norm_reserve_space_size(x, True) if there else 0  # type: ignore[attr-defined]


def fake_tensor_on(tensor: FakeTensor, device: torch.device) -> FakeTensor:
    """A fake tensor relabelled for another device."""
    mode = tensor.fake_mode
    with in_kernel_invocation_manager(mode):
        return FakeTensor(mode, torch.Tensor._make_subclass(torch.Tensor, tensor), device)


def autocast_kernels(device: Literal["CPU", "CUDA"]) -> set[str]:
    """Ops for which autocast has a rule on a type of device, present or not, such as ``"addmm"`` or ``"softmax.int"``."""
    registered = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return {name.removeprefix("aten::") for name in names if registered(name, f"Autocast{device}")}


def autocast_off() -> AbstractContextManager[Any]:
    """Context in which the CPU's autocast leaves ops alone, and a rule can call its own op."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


@contextmanager
def replaced_autocast(kernels: Mapping[str, Callable[..., Any] | None]) -> Iterator[None]:
    """Replace rules of the CPU's autocast, in the whole process, while the context is open."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for name, kernel in kernels.items():
                library.impl(name, torch.library.fallthrough_kernel if kernel is None else kernel, "AutocastCPU")
        yield
    finally:
        library._destroy()
