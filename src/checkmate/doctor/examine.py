"""All checks, in an order in which a fault of one explains faults of the next."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from checkmate.core.errors import OptionError
from checkmate.cost.store import CostStore
from checkmate.doctor import installation
from checkmate.doctor.check import Check, guarded


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All checks of one examination."""

    device: str  # type of the device that the steps ran on
    machine: Mapping[str, Any]  # hardware and operating system, by name
    versions: Mapping[str, str]  # of Python, Checkmate and the packages that matter
    checks: tuple[Check, ...]  # in the order in which they were made
    warnings: tuple[str, ...]  # that Checkmate logged during the checks
    elapsed_s: float

    @property
    def holds(self) -> bool:
        """Whether no check failed."""
        return all(check.verdict != "failed" for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """The report as an object of JSON."""
        return {
            "format": "checkmate.doctor/1",
            "holds": self.holds,
            **asdict(self),
            "warnings": list(self.warnings),
            "checks": [asdict(check) for check in self.checks],
            "elapsed_s": round(self.elapsed_s, 1),
        }


def examine(
    device: str | None = None,
    *,
    quick: bool = False,
    on_check: Callable[[Check], None] = lambda check: None,
    on_start: Callable[[str], None] = lambda name: None,
) -> Report:
    """Check an installation: versions, compilers, caches, solvers, settings, and small training steps.

    The device is ``"cpu"`` or ``"cuda"``, by default CUDA if PyTorch finds a GPU. Each check is passed to ``on_check`` as soon
    as it is made, and a few words on the next checks to ``on_start``.
    """
    if device not in (None, "cpu", "cuda"):
        raise OptionError(f"device={device!r} is neither 'cpu' nor 'cuda'", hint="use device='cuda' for the first GPU")
    began = time.perf_counter()
    checks: list[Check] = []

    def add(*made: Check) -> bool:
        checks.extend(made)
        for check in made:
            on_check(check)
        return all(check.verdict != "failed" for check in made)

    with _warnings_collected() as warnings:
        on_start("versions and compilers")
        versions = installation.installed_versions()
        add(installation.check_python())
        add(guarded("name", lambda: installation.check_name(installation.other_owners())))
        usable = add(installation.check_torch(versions.get("torch")))
        add(*installation.check_packages(versions, installation.requirements()))
        where = _device(device) if usable else "cpu"
        if usable:
            add(guarded("backend", installation.check_backend))
        can_compile = add(guarded("C++ compiler", installation.check_cxx))
        if where == "cuda":
            can_compile = add(guarded("Triton", installation.check_triton)) and can_compile
        on_start("caches")
        add(guarded("cache folder", installation.check_cache_folder))
        add(installation.check_store(CostStore()))
        on_start("solvers")
        add(guarded("HiGHS", installation.check_highs))
        add(guarded("local search", installation.check_search))
        machine = _examine_device(add, on_start, where, quick, can_compile) if usable else {}
    elapsed_s = time.perf_counter() - began
    return Report(
        device=where,
        machine=machine,
        versions=versions,
        checks=tuple(checks),
        warnings=tuple(warnings),
        elapsed_s=elapsed_s,
    )


def _device(asked: str | None) -> str:
    import torch

    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def _examine_device(
    add: Callable[..., bool], on_start: Callable[[str], None], device: str, quick: bool, can_compile: bool
) -> dict[str, Any]:
    """Check the device, its settings and small training steps, and return a description of the machine."""
    from checkmate.doctor import settings, steps

    add(guarded("Inductor cache", settings.check_inductor_cache))
    on_start("the device")
    if not add(guarded("device", lambda: settings.check_device(device))):
        return {}
    if device == "cuda":
        add(guarded("allocator", settings.check_allocator))
        add(guarded("cuDNN", settings.check_autotuning))
        add(guarded("precision", settings.check_precision))
    for path in steps.PATHS:
        if path.compiler == "inductor" and quick:
            continue
        on_start(f"a small training step: {path.name}")
        if path.compiler == "inductor" and not can_compile:
            add(Check(path.name, "skipped", "the compiler that it needs failed its check"))
        else:
            add(guarded(path.name, functools.partial(steps.check_path, path, device)))
    return settings.machine(device)


@contextmanager
def _warnings_collected() -> Iterator[list[str]]:
    """Collect the warnings of this package for the report, instead of printing them among its lines."""
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
