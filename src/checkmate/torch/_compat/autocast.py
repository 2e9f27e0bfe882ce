"""Private names of autocast: the marks of its regions in a graph, and its kernels in the dispatcher."""

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
    """Ops for which autocast has a rule on a type of device."""
    registered = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith(_NAMESPACE))
    return {name.removeprefix(_NAMESPACE) for name in names if registered(name, f"Autocast{device}")}


def autocast_off() -> AbstractContextManager[Any]:
    """Context in which the CPU's autocast leaves ops alone, so that a rule can call the op it is for."""
    return torch._C._ExcludeDispatchKeyGuard(_OFF)


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
