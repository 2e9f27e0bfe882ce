"""Counts every byte that PyTorch allocates on the CPU in this process, without a profiler, which would change what is measured.

Needs a C++ compiler and ninja. It is built once, into the folder for temporary files.
"""

from __future__ import annotations

import gc
import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".cpp")


@cache
def counting_allocator() -> Any:
    """The built module: `install()`, then `live()` and `peak()` in bytes; `reset()` lowers the peak to what is live.

    `owns(address)` tells whether a block is one that it counts.
    """
    import torch
    from torch.utils.cpp_extension import load

    version = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"counting_allocator_{os.getuid()}_{version}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return load("counting_allocator", [str(SOURCE)], build_directory=str(folder), extra_cflags=["-O2"])


def mapped_bytes(counter: Any) -> int:
    """Bytes of tensors that an allocator did not make: weights that were loaded from a file are mapped into memory."""
    import torch

    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter) and o.device.type == "cpu"]
    storages = {s.data_ptr(): s.nbytes() for t in tensors if t.layout is torch.strided and (s := t.untyped_storage()).nbytes()}
    return sum(size for address, size in storages.items() if address and not counter.owns(address))
