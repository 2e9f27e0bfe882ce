"""Verdicts on programs, whether their pieces give the bits of the whole ops, in a SQLite file of the user's cache folder.

A verdict holds where the same kernels run: for a version of PyTorch, a processor or a GPU, a number of threads, and settings of
the process such as the precision of products. All are in its key, and the program itself by a hash of its content.
"""

from __future__ import annotations

import platform
import sqlite3
from functools import cache
from pathlib import Path
from typing import Final

import torch

from checkmate.core.errors import shortened
from checkmate.cost.database import Database, cache_folder

_FORMAT: Final = 2
"""To be raised when a comparison becomes stricter: verdicts of before do not count then."""

_SCHEMA: Final = "CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, same INTEGER NOT NULL)"

VERDICTS = Database(
    lambda: cache_folder() / "chunked_bits.sqlite", _SCHEMA, "bits of ops in pieces are compared again in every process"
)


def known_verdict(key: str) -> bool | None:
    """The verdict on a program that was reached before, in this process or another one.

    Args:
        key: Of `verdict_key`.
    """

    def read(connection: sqlite3.Connection) -> object:
        row = connection.execute("SELECT same FROM verdicts WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    found = VERDICTS.run(read, None)
    if found not in (None, 0, 1):
        VERDICTS.disbelieve(f"a verdict of {shortened(repr(found))}")
        return None
    return None if found is None else bool(found)


def keep_verdict(key: str, same: bool) -> None:
    """Store a verdict.

    Args:
        key: Of `verdict_key`.
        same: Whether the bits are the same.
    """
    VERDICTS.run(lambda connection: connection.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (key, int(same))), None)


def verdict_key(program: str, device: torch.device) -> str:
    """All on which a verdict depends, as a text.

    Args:
        program: Key of the program.
        device: Where it runs.
    """
    on_cuda = device.type == "cuda"
    hardware = torch.cuda.get_device_name(device) if on_cuda else f"{_processor()}, {torch.get_num_threads()} threads"
    settings = (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,  # pyright: ignore[reportAttributeAccessIssue]
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    )
    return f"{_FORMAT} {program} torch {torch.__version__} {hardware} {settings}"


@cache
def _processor() -> str:
    """Name of the processor: kernels are chosen by what it can do and by the size of its caches."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model} {torch.backends.cpu.get_cpu_capability()}"
