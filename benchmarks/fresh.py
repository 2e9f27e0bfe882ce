"""Parts of a benchmark in processes of their own, and what they ran on."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).parents[1]
_MARK = "RESULT "
BESIDE = ("numpy", "highspy", "checkmate-remat")
"""Packages whose versions are kept with every report, and not shown."""

KEEPS_ITS_HEAP = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_MAX_": "0"}
"""Settings of glibc with which a process keeps freed memory.

By default it returns much of it to the system, and takes it again page by page: a GPT-2 step that keeps 800 MiB has 60,000 page
faults, a twentieth of its time, and a step within 96 MiB has none. What a page fault costs is no op's cost (docs/decisions/0009).
"""

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
    found = {p: importlib.metadata.version(p) for p in (*packages, *BESIDE)}
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


def results_of(script: str) -> Path:
    """The file that a benchmark keeps its results in."""
    return ROOT / "benchmarks" / "results" / f"{Path(script).stem}.json"


def earlier(script: str, rows: str = "models") -> Any:
    """The rows of a benchmark's last run; empty before the first one.

    Args:
        script: File of the benchmark.
        rows: Their name in the report.
    """
    results = results_of(script)
    return json.loads(results.read_text())[rows] if results.exists() else {}


def save(script: str, report: dict[str, Any]) -> None:
    """Write a report to ``benchmarks/results``, named as the script.

    Args:
        script: File of the benchmark.
        report: The results.
    """
    results_of(script).write_text(json.dumps(report, indent=1) + "\n")


def by_model(
    script: str,
    about: str,
    models: Sequence[str],
    *,
    run: Callable[[str, float, int], Any],
    verdict: Callable[[str, Any], list[str]],
    rounds: int = 5,
    own_cache: bool = False,
    packages: Sequence[str] = ("torch", "transformers"),
    settings: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """The main program of a benchmark that has a child for every model: measure, keep the results, and check the promises.

    Results go to ``benchmarks/results``, named as the script. Models that are not named on the command line keep their rows of
    the last run.

    Args:
        script: File of the benchmark.
        about: What ``--help`` says.
        models: Names of the models.
        run: Measures a model, given seconds for a solve and rounds of steps; called in the child.
        verdict: Promises that a row breaks, in words.
        rounds: How many there are by default.
        own_cache: Whether what an earlier run measured must not answer for this one.
        packages: Packages whose versions are kept.
        settings: Further settings of the environment of a child.

    Returns:
        The exit status: 1 if a promise is broken.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds a solve may take")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, limit, times = options.child
        answer(run(name, float(limit), int(times)))
        return 0
    rows = earlier(script)
    for name in options.models:
        with tempfile.TemporaryDirectory() as cache:
            environment = {**settings, **({"CHECKMATE_CACHE": cache} if own_cache else {})}
            rows[name] = child(script, name, str(options.time_limit), str(options.rounds), **environment)
        report = {
            "hardware": hardware(),
            "versions": versions(*packages),
            "models": {n: rows[n] for n in models if n in rows},
        }
        save(script, report)
    broken = [line for name in models for line in (verdict(name, rows[name]) if name in rows else [f"{name}: not run"])]
    print("\n".join(broken) or "all promises hold")
    return bool(broken)
