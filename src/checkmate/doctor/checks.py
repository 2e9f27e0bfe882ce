"""All checks of an installation, each with its outcome as a value: packages, stores, solvers, the device, and the steps."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from logging.handlers import BufferingHandler
from typing import Any, Final, Literal

from checkmate.core.errors import CheckmateError, OptionError
from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.core.result import Limits
from checkmate.core.units import format_bytes
from checkmate.cost.database import Database
from checkmate.cost.store import CostStore, processor
from checkmate.frontend.plan_store import PlanStore
from checkmate.frontend.solved_plans import SolvedPlans
from checkmate.solvers.backends import kernels
from checkmate.solvers.local_search import LocalSearch
from checkmate.solvers.milp import Milp
from checkmate.solvers.solve import solve

DISTRIBUTION: Final = "checkmate-remat"
TESTED_TORCH: Final = (2, 13)
"""The newest minor version in which the private names that Checkmate uses were tested."""
REPORT: Final = "report this with the output of `checkmate doctor --json`"
_COMPILERS = (
    "install a C++ compiler with the headers of Python and OpenMP (`apt-get install g++ python3-dev`), or set CXX; on a GPU also "
    "Triton and a C compiler, or set CC; compiler='eager' needs none of them"
)


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one check: its subject, the finding, and the cure. A note is information and no fault."""

    name: str
    verdict: Literal["ok", "note", "failed"]
    detail: str
    cure: str = ""  # an imperative, which a failed check always has
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])  # measured values, for the JSON and the table

    def __post_init__(self) -> None:
        if self.verdict == "failed" and not self.cure:
            raise ValueError(f"the check of {self.name} failed and says not what to do")


def guarded(name: str, check: Callable[[], Check], cure: str = REPORT) -> Check:
    """The outcome of a check; a check that raises has failed."""
    try:
        return check()
    except CheckmateError as error:
        return Check(name, "failed", f"{type(error).__name__}: {error.message}", error.hint or cure)
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises is what is looked for
        first = next(iter(str(error).strip().splitlines()), "")
        return Check(name, "failed", f"{type(error).__name__}: {first}", cure, {"error": str(error)})


def installed_versions() -> dict[str, str]:
    """Versions of Python, Checkmate and the installed packages that matter."""
    from checkmate import __version__

    names = ["numpy", "scipy", "highspy", "numba", "msgspec", "torch", "triton", "transformers", "tensorflow", "jax"]
    found = {name: each.version for name in names for each in importlib.metadata.distributions(name=name)}
    return {"python": platform.python_version(), "checkmate": __version__, **found}


def check_name() -> Check:
    """Whether no other distribution installs the import name or the command of this package."""
    imports = importlib.metadata.packages_distributions().get("checkmate", [])
    commands = importlib.metadata.entry_points(group="console_scripts", name="checkmate")
    named = [*imports, *(point.dist.name for point in commands if point.dist is not None)]
    others = sorted({name for name in named if re.sub(r"[-_.]+", "-", name).lower() != DISTRIBUTION})
    if not others:
        return Check("name", "ok", "no other package installs 'checkmate'")
    shown = " and ".join(others)
    detail = f"{shown} also installs the import name or the command 'checkmate': files of both are mixed, or one hides the other"
    cure = f"run `pip uninstall {' '.join(others)}`, then `pip install --force-reinstall --no-deps {DISTRIBUTION}`"
    return Check("name", "failed", detail, cure)


def check_torch(installed: str | None, floor: str = "2.11") -> Check:
    """The version of PyTorch; None if it is not installed."""
    if installed is None:
        cure = f'run `pip install "{DISTRIBUTION}[torch]"`'
        return Check("torch", "failed", "not installed: plans can be made, and no step can run", cure)
    version, tested = numbers(installed), ".".join(map(str, TESTED_TORCH))
    if version < numbers(floor):
        detail = f"{installed} is older than {floor}, the lowest version that works"
        return Check("torch", "failed", detail, f'run `pip install --upgrade "torch>={floor}"`')
    if version[:2] > TESTED_TORCH:
        cure = f'if a check below fails, run `pip install "torch=={tested}.*"`'
        return Check("torch", "note", f"{installed} is newer than {tested}, the newest version tested", cure)
    return Check("torch", "ok", f"{installed}, within {floor} to {tested}")


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    Examples:
        >>> numbers("2.13.0+cpu"), numbers("2.11"), numbers("2.14.0.dev20261101")
        ((2, 13, 0), (2, 11), (2, 14, 0))
    """
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def user_stores() -> list[Database]:
    """The stores of this user: measured costs, solved plans, and compiled plans."""
    return [CostStore().database, SolvedPlans().database, PlanStore("").database]


def check_stores(stores: Sequence[Database]) -> Check:
    """Whether stores can be read, to their last page, and written."""
    faults = list(dict.fromkeys(fault for store in stores if (fault := store.fault()) is not None))
    if not faults:
        return Check("stores", "ok", "measured costs and plans can be read and written")
    detail = "; ".join(f"{fault.place or 'the cache folder'} cannot be {fault.used}: {fault.reason}" for fault in faults)
    return Check("stores", "failed", detail, f"{faults[0].cure}, or set CHECKMATE_CACHE to another folder")


def check_solvers(least_cost: int = 9) -> Check:
    """HiGHS and the compiled local search on a small problem whose least cost is known by brute force."""
    # Forward and backward of four ops that do not fit: one op has to be computed twice.
    edges = [(i, i + 1) for i in range(7)] + [(0, 7), (1, 6), (2, 5)]
    problem = Problem(Graph.from_dag(cost=[1] * 8, size_bytes=[1] * 8, edges=edges), 4)
    exact, found = (solve(problem, solver, limits=Limits(time_s=30)) for solver in (Milp(), LocalSearch()))
    if exact.cost != least_cost:
        detail = f"HiGHS found a cost of {exact.cost}, and the least is {least_cost}"
        return Check("solvers", "failed", detail, "run `pip install --force-reinstall highspy`")
    if (reason := kernels.fault()) is not None:
        detail = f"compiled functions cannot be kept, so that each process compiles them for some seconds: {reason}"
        return Check("solvers", "failed", detail, "set NUMBA_CACHE_DIR to a folder that can be written")
    elapsed_s = exact.elapsed_s + found.elapsed_s
    return Check("solvers", "ok", f"HiGHS and the local search solve a small problem in {elapsed_s:.1f} s")


def check_device(device: str) -> Check:
    """Whether PyTorch can use the device; on a GPU also the settings of its allocator."""
    import torch

    from checkmate.torch.measure.allocator import allocator_settings, has_expandable_segments

    if device != "cuda":
        threads = torch.get_num_threads()
        return Check("device", "ok", f"CPU, {processor()}, {threads} thread{'s' * (threads > 1)}")
    if not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            cure = "install a build of PyTorch with CUDA: https://pytorch.org/get-started"
            return Check("device", "failed", f"torch {torch.__version__} has no CUDA", cure)
        detail = f"torch {torch.__version__} finds no GPU: no driver, too old a driver, or CUDA_VISIBLE_DEVICES is empty"
        return Check("device", "failed", detail, "look at `nvidia-smi`, and at CUDA_VISIBLE_DEVICES")
    free, total = torch.cuda.mem_get_info()
    backend, settings = torch.cuda.get_allocator_backend(), allocator_settings()
    detail = (
        f"{torch.cuda.get_device_name(0)}, {format_bytes(total)}, of which {format_bytes(free)} are free; {backend} allocator"
        + "".join(f", {name}:{value}" for name, value in settings.items())
    )
    if total - free - torch.cuda.memory_reserved(0) > total // 10:  # the context takes less
        return Check("device", "note", detail, "end other processes on the GPU before you measure: `nvidia-smi` lists them")
    if backend == "native" and not has_expandable_segments():
        detail += ": up to 1 MiB more a tensor, and segments that stay reserved"
        return Check("device", "note", detail, "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before Python starts")
    return Check("device", "ok", detail)


def _machine() -> list[str]:
    """Hardware, operating system and drivers, as PyTorch describes them for its own bug reports."""
    from torch.utils import collect_env

    return collect_env.get_pretty_env_info().splitlines()


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
    versions, machine = installed_versions(), list[str]()

    def examined(name: str, check: Callable[[], Check], cure: str = REPORT) -> bool:
        on_start(name)
        made.append(guarded(name, check, cure))
        on_check(made[-1])
        return made[-1].verdict != "failed"

    with _warnings_collected() as warnings:
        examined("name", check_name)
        usable = examined("torch", lambda: check_torch(versions.get("torch")))
        examined("stores", lambda: check_stores(user_stores()))
        examined("solvers", check_solvers)
        where = _device(device) if usable else "cpu"
        if usable and examined("device", lambda: check_device(where)):
            from checkmate.doctor import steps

            machine = _machine()
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
