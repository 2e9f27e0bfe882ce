"""Private names of torch for autocast: its regions in a graph, and its kernels in the dispatcher."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch.amp.autocast_mode import _enter_autocast as autocast_enter

__all__ = ["autocast_enter", "autocast_kernels", "autocast_off", "replaced_autocast"]

_NAMESPACE = "aten::"
_OFF = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def autocast_kernels(device: Literal["CPU", "CUDA"]) -> set[str]:
    """Names of the ops, without their namespace, that autocast has a rule for on a kind of device, which need not be there."""
    registered = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith(_NAMESPACE))
    return {name.removeprefix(_NAMESPACE) for name in names if registered(name, f"Autocast{device}")}


def autocast_off() -> AbstractContextManager[Any]:
    """Within it, ops are not seen by a processor's autocast."""
    return torch._C._ExcludeDispatchKeyGuard(_OFF)


@contextmanager
def replaced_autocast(kernels: Mapping[str, Callable[..., Any] | None]) -> Iterator[None]:
    """A processor's autocast with other rules, in the whole process, for as long as the context is open.

    Args:
        kernels: Name of an op -> what is called instead of it; None where autocast is to leave it alone.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for name, kernel in kernels.items():
                library.impl(name, torch.library.fallthrough_kernel if kernel is None else kernel, "AutocastCPU")
        yield
    finally:
        library._destroy()
