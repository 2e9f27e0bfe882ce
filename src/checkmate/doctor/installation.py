"""Checks of packages and their versions, compilers, folders that are written, and solvers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, Result
from checkmate.core.units import format_bytes
from checkmate.cost.store import CostStore, cache_folder
from checkmate.doctor.check import Check
from checkmate.solvers.local_search import LocalSearch
from checkmate.solvers.milp import Milp
from checkmate.solvers.session import Solver
from checkmate.solvers.solve import solve

DISTRIBUTION: Final = "checkmate-remat"
TESTED_TORCH: Final = (2, 13)
"""The newest minor version in which the private names that Checkmate uses were tested."""


class Requirement(NamedTuple):
    """A package that Checkmate needs."""

    package: str
    floor: str  # lowest version, as written
    extra: str  # the extra that needs it; empty for a core dependency


def installed_versions() -> dict[str, str]:
    """Versions of Python, Checkmate and the installed packages that matter."""
    from checkmate import __version__

    found = {"python": platform.python_version(), "checkmate": __version__}
    for package in ["numpy", "scipy", "highspy", "numba", "msgspec", "torch", "triton", "transformers", "tensorflow", "jax"]:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def requirements() -> list[Requirement]:
    """Requirements of the installed distribution; empty if Checkmate runs from a folder and was not installed."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    matches = [re.match(r"([\w.-]+)>=([\w.]+)(?:\s*;\s*extra == ['\"](\w+)['\"])?$", line) for line in lines]
    return [Requirement(match[1], match[2], match[3] or "") for match in matches if match is not None]


def check_python() -> Check:
    """Python itself; pip has checked its version."""
    return Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def other_owners() -> list[str]:
    """Names of other distributions that install the import name or the command of this package, sorted."""
    imports = importlib.metadata.packages_distributions().get("checkmate", [])
    commands = importlib.metadata.entry_points(group="console_scripts", name="checkmate")
    named = [*imports, *(point.dist.name for point in commands if point.dist is not None)]
    return sorted({name for name in named if re.sub(r"[-_.]+", "-", name).lower() != DISTRIBUTION})


def check_name(others: Sequence[str]) -> Check:
    """Whether no other package has this import name or command."""
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
    if numbers(installed) < numbers(floor):
        detail = f"{installed} is older than {floor}, the lowest version that works"
        return Check("torch", "failed", detail, f'run `pip install --upgrade "torch>={floor}"`')
    tested = ".".join(map(str, TESTED_TORCH))
    if numbers(installed)[:2] > TESTED_TORCH:
        cure = f'if a check below fails, run `pip install "torch=={tested}.*"`'
        return Check("torch", "note", f"{installed} is newer than {tested}, the newest version tested", cure)
    return Check("torch", "ok", f"{installed}, within {floor} to {tested}")


def check_packages(installed: Mapping[str, str], required: Sequence[Requirement]) -> list[Check]:
    """The other packages: one check for all that are new enough, and one for each outdated package."""
    if not required:
        detail = f"{DISTRIBUTION} is not installed, so that the versions it requires are not known"
        return [Check("packages", "note", detail, "run `pip install -e .` in its folder")]
    checks: list[Check] = []
    good: list[str] = []
    for package, floor, extra in required:
        if package in ("torch", DISTRIBUTION) or extra in ("dev", "demo", "plot", "all"):  # no step and no solver needs these
            continue
        version = installed.get(package)
        if version is None and not extra:
            checks.append(Check(package, "failed", "not installed", f'run `pip install "{package}>={floor}"`'))
        elif version is not None and numbers(version) < numbers(floor):
            detail = f"{version} is older than {floor}, the lowest version that works"
            checks.append(Check(package, "failed", detail, f'run `pip install --upgrade "{package}>={floor}"`'))
        elif version is not None:
            good.append(f"{package} {version}")
    return [Check("packages", "ok", ", ".join(good)), *checks]


def check_backend() -> Check:
    """Whether ``torch.compile(backend="checkmate")`` finds the backend: an entry point of the installed distribution."""
    backend = 'torch.compile(..., backend="checkmate")'
    if importlib.metadata.entry_points(group="torch_dynamo_backends", name="checkmate"):
        return Check("backend", "ok", f"{backend} finds it")
    cure = f"install Checkmate with pip again: `pip install --force-reinstall --no-deps {DISTRIBUTION}`"
    return Check("backend", "failed", f"{backend} does not find the backend: no entry point is installed", cure)


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    Examples:
        >>> numbers("2.13.0+cpu"), numbers("2.11"), numbers("2.14.0.dev20261101")
        ((2, 13, 0), (2, 11), (2, 14, 0))
    """
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


_WITHOUT: Final = "compiler='inductor' and stock torch.compile cannot be used without it; compiler='eager' can"
_MISSING: Final = {
    "Python.h": ("the headers of Python are missing", "install them: `apt-get install python3-dev`, or your system's package"),
    "omp.h": ("OpenMP is missing", "install it: `apt-get install libomp-dev` for clang, or `brew install libomp`"),
}
"""The meaning of a header that a compiler does not find, and the cure."""


def check_cxx() -> Check:
    """The C++ compiler that Inductor uses on a CPU: it compiles a small extension module.

    The choice is Inductor's: the environment variable ``CXX``, else ``g++`` (``clang++`` on macOS).
    """
    name, mac = "C++ compiler", sys.platform == "darwin"
    chosen, default = os.environ.get("CXX", ""), "clang++" if mac else "g++"
    words = shlex.split(chosen) or [default]
    found = shutil.which(words[0])
    if found is None:
        detail = f"CXX={chosen} names no program" if chosen else f"{default} is not found"
        cure = "install one: `apt-get install g++`, `conda install -c conda-forge gxx`, or set CXX to a compiler"
        return Check(name, "failed", f"{detail}: {_WITHOUT}", cure)
    flags = ["-std=c++17", "-shared", "-fPIC", "-fopenmp", f"-I{sysconfig.get_path('include')}"]
    # On macOS, names of Python are found when the module is loaded.
    flags += ["-Xpreprocessor", "-undefined", "dynamic_lookup"] if mac else []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "check.cpp"
        source.write_text('#include <Python.h>\n#include <omp.h>\nextern "C" int threads() { return omp_get_max_threads(); }\n')
        command = [found, *words[1:], *flags, str(source), "-o", str(source.with_suffix(".so"))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            cure = "install it again, or set CXX to another compiler"
            return Check(name, "failed", f"{found} does not run ({error})", cure)
    if done.returncode:
        message = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        unknown = ("it does not compile an extension module", "set CXX to a compiler that knows C++17 and -fopenmp")
        reason, cure = next((text for header, text in _MISSING.items() if header in message), unknown)
        return Check(name, "failed", f"{found}: {reason} ({message.strip()}); {_WITHOUT}", cure)
    return Check(name, "ok", f"{found} compiles an extension module with OpenMP")


def check_triton() -> Check:
    """Triton, which Inductor uses on a GPU, and the C compiler with which Triton builds its launchers."""
    if importlib.util.find_spec("triton") is None:
        cure = "install PyTorch with CUDA from https://pytorch.org/get-started, which brings Triton"
        return Check("Triton", "failed", f"not installed: {_WITHOUT}", cure)
    chosen = os.environ.get("CC", "")
    compiler = shutil.which(shlex.split(chosen)[0]) if chosen else shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        cure = "install one: `apt-get install gcc`, or set CC to a compiler"
        return Check("Triton", "failed", f"it finds no C compiler: {_WITHOUT}", cure)
    return Check("Triton", "ok", f"installed; {compiler} builds its launchers")


def check_cache_folder() -> Check:
    """The folder of the measured costs and of the plans."""
    try:
        folder = cache_folder()
    except OptionError as error:
        return Check("cache folder", "failed", error.message, error.hint)
    return check_folder("cache folder", folder, "set CHECKMATE_CACHE to another one")


def check_folder(name: str, folder: Path, other: str) -> Check:
    """A folder that has to be writable; ``other`` says how to choose another one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="doctor-") as file:
            file.write(b"x" * 4096)
            file.flush()
    except OSError as error:
        cure = f"make it a folder that can be written, or {other}"
        return Check(name, "failed", f"{folder} cannot be written: {error.strerror or error}", cure)
    free = shutil.disk_usage(folder).free
    if free < 1 << 30:  # the code that Inductor builds for one model takes some hundred MiB
        return Check(name, "note", f"{folder} has {format_bytes(free)} free", f"free space on its disk, or {other}")
    return Check(name, "ok", f"{folder} can be written, {format_bytes(free)} free")


def check_store(store: CostStore) -> Check:
    """The store of measured costs, plans and verdicts, page by page."""
    fault = store.fault()
    if fault is None:
        return Check("store", "ok", "measured costs and plans are intact")
    cure = f"{fault.cure}, or set CHECKMATE_CACHE to another folder"
    return Check("store", "failed", str(fault), cure)


def check_highs() -> Check:
    """HiGHS, through the exact formulation; the least cost of the small problem is known by brute force."""
    return check_engine("HiGHS", Milp(), "run `pip install --force-reinstall highspy`", optimum=9)


def check_search() -> Check:
    """The compiled local search, and the files in which numba keeps compiled code."""
    from checkmate.solvers.backends.kernels import fault

    found = check_engine("local search", LocalSearch(), "run `pip install --force-reinstall numba`", optimum=None)
    reason = fault()
    if found.verdict != "ok" or reason is None:
        return found
    detail = f"compiled functions cannot be kept, so that each process compiles them for some seconds: {reason}"
    return Check("local search", "failed", detail, "set NUMBA_CACHE_DIR to a folder that can be written")


def check_engine(name: str, solver: Solver, cure: str, *, optimum: int | None) -> Check:
    """A solver on a small problem with its optimum; None for a heuristic, whose plan only has to be valid."""
    # Forward and backward of four ops that do not fit: one op has to be computed twice.
    edges = [(i, i + 1) for i in range(7)] + [(0, 7), (1, 6), (2, 5)]
    problem = Problem(Graph.from_dag(cost=[1] * 8, size_bytes=[1] * 8, edges=edges), 4)
    result = solve(problem, solver, limits=Limits(time_s=30), raise_on_failure=False)
    if not isinstance(result, Result):
        return Check(name, "failed", f"no plan: {result.termination}", cure)
    if optimum is not None and result.cost != optimum:
        return Check(name, "failed", f"cost {result.cost}, and the optimum is {optimum}", cure)
    return Check(name, "ok", f"solves a problem of {len(result.plan.order)} steps in {result.elapsed_s:.1f} s")
