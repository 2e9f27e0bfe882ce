"""All checks, in an order in which a fault of one explains faults of the next."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from logging.handlers import BufferingHandler
from typing import Any

from checkmate.core.errors import OptionError
from checkmate.cost.store import CostStore
from checkmate.doctor import checks
from checkmate.doctor.checks import Check, guarded

_COMPILERS = (
    "install a C++ compiler with the headers of Python and OpenMP (`apt-get install g++ python3-dev`), or set CXX; on a GPU also "
    "Triton and a C compiler, or set CC; compiler='eager' needs none of them"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All checks of one examination."""

    device: str  # type of the device that the steps ran on
    machine: Sequence[str]  # hardware, operating system and drivers, in lines
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
    """Check an installation: versions, stores, solvers, the device, and small training steps.

    The device is ``"cpu"`` or ``"cuda"``, by default CUDA if PyTorch finds a GPU. Each check is passed to ``on_check`` as soon
    as it is made, and its name to ``on_start`` before.
    """
    if device not in (None, "cpu", "cuda"):
        raise OptionError(f"device={device!r} is neither 'cpu' nor 'cuda'", hint="use device='cuda' for the first GPU")
    began = time.perf_counter()
    made: list[Check] = []
    versions, machine = checks.installed_versions(), list[str]()

    def examined(name: str, check: Callable[[], Check], cure: str = checks.REPORT) -> bool:
        on_start(name)
        made.append(guarded(name, check, cure))
        on_check(made[-1])
        return made[-1].verdict != "failed"

    with _warnings_collected() as warnings:
        examined("name", checks.check_name)
        usable = examined("torch", lambda: checks.check_torch(versions.get("torch")))
        examined("store", lambda: checks.check_store(CostStore()))
        examined("solvers", checks.check_solvers)
        where = _device(device) if usable else "cpu"
        if usable and examined("device", lambda: checks.check_device(where)):
            from checkmate.doctor import steps

            machine = checks.machine()
            for path in steps.PATHS:
                if path.compiler == "eager":
                    examined(path.name, functools.partial(steps.check_path, path, where))
                elif not quick:
                    examined(path.name, functools.partial(steps.check_path, path, where), _COMPILERS)
    return Report(
        device=where,
        machine=machine,
        versions=versions,
        checks=tuple(made),
        warnings=tuple(record.getMessage() for record in warnings),
        elapsed_s=time.perf_counter() - began,
    )


def _device(asked: str | None) -> str:
    import torch

    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def _warnings_collected() -> Iterator[list[logging.LogRecord]]:
    """Collect the warnings of this package for the report, instead of printing them among its lines."""
    logger, handler = logging.getLogger("checkmate"), BufferingHandler(capacity=10_000)
    handler.setLevel(logging.WARNING)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield handler.buffer
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
