"""Parts of a benchmark in processes of their own, and what they ran on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

_MARK = "RESULT "
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class ChildError(RuntimeError):
    """A part of a benchmark did not give an answer."""


def child(script: str, *arguments: str, **environment: str) -> Any:
    """What ``script --child arguments`` answers in a fresh process on one thread.

    Args:
        script: File of the benchmark.
        arguments: What its child is given.
        environment: Settings of the process beside those for one thread.

    Raises:
        ChildError: It failed; why is on the terminal.
    """
    command = [sys.executable, "-W", "ignore", script, "--child", *arguments]
    settings = {**os.environ, **_ONE_THREAD, **environment}
    done = subprocess.run(command, env=settings, stdout=subprocess.PIPE, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not found:
        raise ChildError(f"{' '.join(arguments)} ended with status {done.returncode}")
    return json.loads(found[-1].removeprefix(_MARK))


def answer(value: Any) -> None:
    """Print what `child` returns."""
    print(_MARK + json.dumps(value))


def hardware() -> dict[str, Any]:
    """What it ran on."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    return {"processor": model, "cores": os.cpu_count(), "system": platform.system(), "release": platform.release()}


def versions(*packages: str) -> dict[str, str]:
    """What it ran with."""
    found = {p: importlib.metadata.version(p) for p in (*packages, "numpy", "highspy", "checkmate-remat")}
    return {"python": platform.python_version(), **found}


def mib(size_bytes: int) -> str:
    """MiB with two decimals."""
    return f"{size_bytes / 2**20:.2f}"


def digest(*tensors: Any) -> str:
    """A hash of the bytes of PyTorch tensors; None counts as itself."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(b"none" if tensor is None else tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()
