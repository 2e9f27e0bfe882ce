"""Versions of Python and of packages, compared with those that Checkmate requires and was tested with."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from checkmate.doctor.check import Check

DISTRIBUTION: Final = "checkmate-remat"
_NAME: Final = "checkmate"

TESTED: Final = {"torch": (2, 13)}
"""The newest minor version with which the private names that Checkmate uses were tested."""

_SHOWN: Final = (
    "numpy",
    "scipy",
    "highspy",
    "numba",
    "msgspec",
    "torch",
    "triton",
    "transformers",
    "tensorflow",
    "jax",
)
_OPTIONAL_EXTRAS: Final = ("dev", "demo", "plot", "all")
"""Extras whose packages no step and no solver needs."""


class Requirement(NamedTuple):
    """A package that Checkmate needs.

    Attributes:
        package: Its name.
        floor: Lowest version, as written.
        extra: The extra that needs it; empty for a core dependency.
    """

    package: str
    floor: str
    extra: str


def installed_versions() -> dict[str, str]:
    """Versions of Python, Checkmate and the packages that matter, of those that are installed."""
    from checkmate import __version__

    found = {"python": platform.python_version(), "checkmate": __version__}
    for package in _SHOWN:
        version = _version(package)
        if version is not None:
            found[package] = version
    return found


def requirements() -> tuple[Requirement, ...]:
    """Requirements of the installed distribution; empty if Checkmate runs from a folder and was not installed."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    found: list[Requirement] = []
    for line in lines:
        match = re.match(r"([\w.-]+)>=([\w.]+)(?:\s*;\s*extra == ['\"](\w+)['\"])?$", line)
        if match is not None:
            found.append(Requirement(match[1], match[2], match[3] or ""))
    return tuple(found)


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """Python itself.

    Args:
        version: The version that runs.
    """
    text = ".".join(map(str, version))
    if version < (3, 11):
        return Check(name="python", verdict="failed", detail=f"{text} is older than 3.11", cure="use Python 3.11 or newer")
    return Check(name="python", verdict="ok", detail=f"{text} on {platform.system()} {platform.machine()}")


def other_owners() -> list[str]:
    """Names of other distributions that install the import name or the command of this package, sorted."""
    imports = importlib.metadata.packages_distributions().get(_NAME, [])
    commands = importlib.metadata.entry_points(group="console_scripts", name=_NAME)
    named = [*imports, *(point.dist.name for point in commands if point.dist is not None)]
    return sorted({name for name in named if re.sub(r"[-_.]+", "-", name).lower() != DISTRIBUTION})


def check_name(others: Sequence[str]) -> Check:
    """Whether the import name and the command are those of this package.

    Args:
        others: Other distributions that install one of them.
    """
    if not others:
        return Check(name="name", verdict="ok", detail=f"no other package installs {_NAME!r}")
    shown = " and ".join(others)
    return Check(
        name="name",
        verdict="failed",
        detail=f"{shown} also installs the import name or the command {_NAME!r}: files of both are mixed, or one hides the other",
        cure=f"run `pip uninstall {' '.join(others)}`, then `pip install --force-reinstall --no-deps {DISTRIBUTION}`",
    )


def check_torch(installed: str | None, floor: str = "2.11") -> Check:
    """PyTorch.

    Args:
        installed: Its version; None if it is not installed.
        floor: The lowest version that Checkmate works with.
    """
    if installed is None:
        return Check(
            name="torch",
            verdict="failed",
            detail="not installed: plans can be made, and no step can run",
            cure=f'run `pip install "{DISTRIBUTION}[torch]"`',
        )
    if numbers(installed) < numbers(floor):
        return Check(
            name="torch",
            verdict="failed",
            detail=f"{installed} is older than {floor}, the lowest version that works",
            cure=f'run `pip install --upgrade "torch>={floor}"`',
        )
    tested = ".".join(map(str, TESTED["torch"]))
    if numbers(installed)[:2] > TESTED["torch"]:
        return Check(
            name="torch",
            verdict="note",
            detail=f"{installed} is newer than {tested}, the newest version tested",
            cure=f'if a check below fails, run `pip install "torch=={tested}.*"`',
        )
    return Check(name="torch", verdict="ok", detail=f"{installed}, within {floor} to {tested}")


def check_packages(installed: Mapping[str, str], required: tuple[Requirement, ...]) -> list[Check]:
    """The other packages: one check for all that are new enough, and one for each that is not.

    Args:
        installed: Versions by package.
        required: What is required.
    """
    checks: list[Check] = []
    good: list[str] = []
    for package, floor, extra in required:
        if package in ("torch", DISTRIBUTION) or extra in _OPTIONAL_EXTRAS:
            continue
        version = installed.get(package)
        if version is None:
            if not extra:
                checks.append(_failed(package, "not installed", f'run `pip install "{package}>={floor}"`'))
        elif numbers(version) < numbers(floor):
            cure = f'run `pip install --upgrade "{package}>={floor}"`'
            checks.append(_failed(package, f"{version} is older than {floor}, the lowest version that works", cure))
        else:
            good.append(f"{package} {version}")
    if not required:
        detail = f"{DISTRIBUTION} is not installed, so that the versions it requires are not known"
        return [Check(name="packages", verdict="note", detail=detail, cure="run `pip install -e .` in its folder")]
    return [Check(name="packages", verdict="ok", detail=", ".join(good)), *checks]


def check_backend() -> Check:
    """Whether ``torch.compile(backend="checkmate")`` finds the backend: an entry point of the installed distribution."""
    points = importlib.metadata.entry_points(group="torch_dynamo_backends", name="checkmate")
    if not points:
        return Check(
            name="backend",
            verdict="failed",
            detail='torch.compile(..., backend="checkmate") does not find the backend: no entry point is installed',
            cure=f"install Checkmate with pip again: `pip install --force-reinstall --no-deps {DISTRIBUTION}`",
        )
    return Check(name="backend", verdict="ok", detail='torch.compile(..., backend="checkmate") finds it')


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    Examples:
        >>> numbers("2.13.0+cpu"), numbers("2.11"), numbers("2.14.0.dev20261101")
        ((2, 13, 0), (2, 11), (2, 14, 0))
    """
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _failed(name: str, detail: str, cure: str) -> Check:
    return Check(name=name, verdict="failed", detail=detail, cure=cure)
