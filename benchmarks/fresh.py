"""Parts of a benchmark in processes of their own, and what they ran on."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """What ``script --child arguments`` answers in a fresh process on one thread; a failure is on the terminal."""
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


def pass_warnings_to(add: Callable[[str], object]) -> logging.Handler:
    """Give the library's warnings to a function from now on."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: add(without_folders(record.getMessage()))  # type: ignore[method-assign]
    logging.getLogger("checkmate").addHandler(handler)
    return handler


def without_folders(text: str) -> str:
    """A message whose file names begin in site-packages, or in this repository."""
    return re.sub(r"/[^\s:'\"`(]*?/(?=site-packages/|benchmarks/|src/)", "", text)


def mib(size_bytes: int) -> str:
    """MiB with two decimals."""
    return f"{size_bytes / 2**20:.2f}"


def digest(*tensors: Any) -> str:
    """A hash of the bytes of PyTorch tensors; None counts as itself."""
    import torch

    found = hashlib.sha256()
    for tensor in tensors:
        flat = None if tensor is None else tensor.detach().contiguous().cpu().reshape(-1)
        found.update(b"none" if flat is None else flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def results_of(script: str) -> Path:
    """The file that a benchmark keeps its results in."""
    return ROOT / "benchmarks" / "results" / f"{Path(script).stem}.json"


def earlier(script: str, rows: str = "models") -> Any:
    """The rows of a benchmark's last run, by their name in its report; empty before the first one."""
    results = results_of(script)
    return json.loads(results.read_text())[rows] if results.exists() else {}


def save(script: str, report: dict[str, Any]) -> None:
    """Write a report to ``benchmarks/results``, named as the script."""
    results_of(script).write_text(json.dumps(report, indent=1) + "\n")


def ran(*packages: str) -> dict[str, Any]:
    """What a report begins with."""
    return {"hardware": hardware(), "versions": versions(*packages)}


def add_rows(
    script: str,
    new: Iterable[dict[str, Any]],
    by: Sequence[str],
    *,
    rows: str = "rows",
    packages: Sequence[str] = (),
    **facts: Any,
) -> list[dict[str, Any]]:
    """Print rows and add them to those of the last run, in place of those that have the same values of the keys ``by``.

    The results are kept after each row, under the name ``rows``. All rows are returned.
    """
    found = {tuple(row[key] for key in by): row for row in earlier(script, rows)}
    for row in new:
        print(*row.values(), flush=True)
        found[tuple(row[key] for key in by)] = row
        save(script, {**ran(*packages), **facts, rows: list(found.values())})
    return list(found.values())


def parser(about: str | None) -> argparse.ArgumentParser:
    """The command line of a benchmark, with its docstring as the help."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def of_cases(about: str | None, cases: Iterable[str], devices: Iterable[str], seconds: float) -> argparse.Namespace:
    """The options of a benchmark that solves named cases on named devices, by default all, in so many seconds each."""
    command = parser(about)
    for name, known in (("--cases", [*cases]), ("--devices", [*devices])):
        command.add_argument(name, nargs="+", choices=known, default=known)
    command.add_argument("--seconds", type=float, default=seconds)
    return command.parse_args()


def paper(name: str, about: str | None, measure: Callable[[bool], dict[str, Any]]) -> None:
    """The command line of a paper's script: measure and keep the results, or with ``--quick`` measure less and print it."""
    command = parser(about)
    command.add_argument("--quick", action="store_true", help="less of it, with short limits; replaces no full run")
    quick = command.parse_args().quick
    began = time.perf_counter()
    report = {**ran("numba"), **measure(quick)}
    report["seconds"] = round(time.perf_counter() - began)
    if quick:
        print(json.dumps(report, indent=1))
    else:
        save(name, report)


def by_model(
    script: str,
    about: str | None,
    models: Sequence[str],
    *,
    run: Callable[..., Any],
    verdict: Callable[[str, Any], list[str]],
    rounds: int = 5,
    time_limit_s: float = 30.0,
    own_cache: bool = False,
    rows: str = "models",
    packages: Sequence[str] = ("torch", "transformers"),
    settings: Mapping[str, str] = MappingProxyType({}),
    row: Callable[[str, Callable[..., Any]], Any] | None = None,
) -> int:
    """The main program of a benchmark that has a child for every model: measure, keep the results, and check the promises.

    In the child ``run`` measures a model, given seconds for a solve and rounds of steps, and ``verdict`` says in words which
    promises its row breaks. Results go to ``benchmarks/results``, named as the script, under the name ``rows``, with the
    versions of ``packages``; models that are not named on the command line keep those of the last run. With ``own_cache`` what
    an earlier run measured does not answer for this one. ``settings`` are further ones of the environment of a child. A row of
    several children is made by ``row``, given the model and a function that starts one: its arguments beside the model are those
    of ``run``. The exit status is 1 if a promise is broken.
    """
    command = parser(about)
    command.add_argument("--models", nargs="+", choices=models, default=models, metavar="MODEL")
    command.add_argument("--time-limit", type=float, default=time_limit_s, help="seconds a solve may take")
    command.add_argument("--rounds", type=int, default=rounds)
    command.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = command.parse_args()
    if options.child:
        name, limit, times, *rest = options.child
        answer(run(name, float(limit), int(times), *rest))
        return 0
    found = earlier(script, rows)
    for name in options.models:
        with tempfile.TemporaryDirectory() as cache:
            environment = {**settings, **({"CHECKMATE_CACHE": cache} if own_cache else {})}

            def ask(name: str, *rest: str, environment: Mapping[str, str] = environment) -> Any:
                return child(script, name, str(options.time_limit), str(options.rounds), *rest, **environment)

            found[name] = ask(name) if row is None else row(name, ask)
        print(name, verdict(name, found[name]) or "holds", flush=True)
        save(script, {**ran(*packages), "time_limit_s": options.time_limit, rows: {n: found[n] for n in models if n in found}})
    broken = [line for name in models for line in (verdict(name, found[name]) if name in found else [f"{name}: not run"])]
    print("\n".join(broken) or "all promises hold")
    return bool(broken)
