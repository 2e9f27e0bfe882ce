"""The outcome of a check as a value, and the checks before any step: packages, the store, solvers, and the device."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from checkmate.core.errors import CheckmateError
from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.core.result import Limits
from checkmate.core.units import format_bytes
from checkmate.cost.store import CostStore, processor
from checkmate.solvers.backends import kernels
from checkmate.solvers.local_search import LocalSearch
from checkmate.solvers.milp import Milp
from checkmate.solvers.solve import solve

DISTRIBUTION: Final = "checkmate-remat"
TESTED_TORCH: Final = (2, 13)
"""The newest minor version in which the private names that Checkmate uses were tested."""
REPORT: Final = "report this with the output of `checkmate doctor --json`"


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


def check_store(store: CostStore) -> Check:
    """Whether the store of measured costs and plans can be read, to its last page, and written."""
    fault = store.fault()
    if fault is None:
        return Check("store", "ok", "measured costs and plans can be read and written")
    return Check("store", "failed", str(fault), f"{fault.cure}, or set CHECKMATE_CACHE to another folder")


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


def machine() -> list[str]:
    """Hardware, operating system and drivers, as PyTorch describes them for its own bug reports."""
    from torch.utils import collect_env

    return collect_env.get_pretty_env_info().splitlines()
