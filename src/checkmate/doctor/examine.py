"""All checks, in the order in which a fault of one explains those of the next."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from checkmate.core.errors import OptionError
from checkmate.doctor import caches, compilers, engines, versions
from checkmate.doctor.check import Check, Report, guarded

_SCALES: Final = {"cpu": 1, "cuda": 4}
"""Scale of the models: on a GPU tensors have to be larger than the blocks of its allocator."""


def examine(
    device: str | None = None,
    *,
    quick: bool = False,
    on_check: Callable[[Check], None] | None = None,
    on_start: Callable[[str], None] = lambda name: None,
) -> Report:
    """Check an installation: versions, compilers, caches, solvers, settings, and small training steps.

    Args:
        device: ``"cpu"`` or ``"cuda"``; CUDA where PyTorch finds a GPU, else the CPU.
        quick: Whether to leave out the steps that need a compiler, which take most of the time.
        on_check: Called with each check as soon as it is made.
        on_start: Called with a few words on what is looked at now.

    Returns:
        The report.

    Raises:
        OptionError: The device is neither ``"cpu"`` nor ``"cuda"``.
    """
    if device not in (None, "cpu", "cuda"):
        raise OptionError(f"device={device!r} is neither 'cpu' nor 'cuda'", hint="use device='cuda' for the first GPU")
    began = time.perf_counter()
    checks: list[Check] = []

    def add(*made: Check) -> None:
        for check in made:
            checks.append(check)
            if on_check is not None:
                on_check(check)

    with _warnings_collected() as warnings:
        on_start("versions and compilers")
        installed = versions.installed_versions()
        add(versions.check_python(), guarded("name", lambda: versions.check_name(versions.other_owners())))
        torch_check = versions.check_torch(installed.get("torch"))
        add(torch_check, *versions.check_packages(installed, versions.requirements()))
        usable = torch_check.verdict != "failed"
        where = _device(device) if usable else "cpu"
        if usable:
            add(guarded("backend", versions.check_backend))
        add(guarded("C++ compiler", compilers.check_cxx))
        if where == "cuda":
            add(guarded("Triton", compilers.check_triton))
        on_start("caches")
        add(guarded("cache folder", caches.check_cache_folder), *caches.check_stores())
        on_start("solvers")
        add(guarded("HiGHS", engines.check_highs), guarded("local search", engines.check_search))
        machine: dict[str, Any] = {}
        if usable:
            from checkmate.doctor import settings

            add(guarded("Inductor cache", settings.check_inductor_cache))
            on_start("the device")
            add(here := guarded("device", lambda: settings.check_device(where)))
            if here.verdict != "failed":
                machine = settings.machine(where)
                if where == "cuda":
                    add(*(guarded(name, check) for name, check in settings.CUDA_CHECKS.items()))
                _add_steps(add, on_start, where, quick, _can_compile(checks))
    return Report(
        device=where,
        machine=machine,
        versions=installed,
        checks=tuple(checks),
        warnings=tuple(warnings),
        elapsed_s=time.perf_counter() - began,
    )


def _device(asked: str | None) -> str:
    import torch

    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def _add_steps(
    add: Callable[[Check], None], on_start: Callable[[str], None], device: str, quick: bool, can_compile: bool
) -> None:
    """Check small training steps.

    Args:
        add: Takes each check.
        on_start: Called with a few words on what is looked at now.
        device: Type of the device.
        quick: Whether steps that need a compiler are left out.
        can_compile: Whether the compilers passed their checks.
    """
    from checkmate.doctor import steps

    for path in steps.QUICK if quick else steps.PATHS:
        on_start(f"a small training step: {path.name}")
        if path.compiler == "inductor" and not can_compile:
            add(Check(name=path.name, verdict="skipped", detail="the compiler that it needs failed its check"))
        else:
            add(guarded(path.name, functools.partial(steps.check_path, path, device, _SCALES[device])))


def _can_compile(checks: list[Check]) -> bool:
    return all(check.verdict != "failed" for check in checks if check.name in ("C++ compiler", "Triton"))


@contextmanager
def _warnings_collected() -> Iterator[list[str]]:
    """Keep the warnings of this package for the report, where they would be printed among its lines."""
    found: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = logging.getLogger("checkmate"), Collect(logging.WARNING)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
