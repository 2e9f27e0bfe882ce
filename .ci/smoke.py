"""Shows that an installed Checkmate with nothing but its core dependencies works; run as `python -I .ci/smoke.py`."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.metadata import entry_points, version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import checkmate

EXTRAS = ("torch", "tensorflow", "jax", "matplotlib")  # rich and cyclopts may be there, by [cli]


def installed() -> None:
    """What runs is the installed package, whole, and no extra is there to hide that something is missing."""
    assert Path(checkmate.__file__).is_relative_to(sysconfig.get_path("purelib")), f"not installed: {checkmate.__file__}"
    assert version("checkmate-remat") == checkmate.__version__
    assert [module for module in EXTRAS if find_spec(module)] == []
    assert files("checkmate").joinpath("py.typed").is_file()
    assert files("checkmate.report").joinpath("assets", "page.html").is_file()
    assert [checkmate.load_device(name).name for name in checkmate.device_names()]
    for entry in entry_points(group="checkmate.solvers"):
        entry.load()


def plans() -> None:
    """Three solvers that share no engine agree about a graph whose best plan is known; a plan is written, read and validated."""
    chain = checkmate.Graph.from_dag(cost=[1, 1, 1, 1], size_bytes=[4, 4, 4, 1], edges=[(0, 1), (1, 2), (0, 3), (2, 3)])
    problem = checkmate.Problem(chain, 9)
    for solver in (checkmate.BruteForce(), checkmate.LpRounding(), checkmate.LocalSearch()):  # no engine, HiGHS, numba
        result = checkmate.solve(problem, solver)
        assert (result.cost, result.peak_bytes) == (5, 9), result
        assert checkmate.validate(chain, result.plan, budget_bytes=9) == ()


def hint(name: str) -> str:
    """The message of the error that the first use of a front end raises."""
    try:
        getattr(checkmate, name)
    except checkmate.MissingExtraError as error:
        return str(error)
    return ""


def missing_extras() -> None:
    """A front end whose extra is missing says how to install it."""
    for name in ("torch", "tf2", "jax", "plot"):
        assert f'pip install "checkmate-remat[{name}]"' in hint(name)


def command_line() -> None:
    """`checkmate --help` is the help, or, without [cli], says how to get it."""
    command = Path(sysconfig.get_path("scripts")) / "checkmate"
    done = subprocess.run([command, "--help"], capture_output=True, text=True, check=False)
    if find_spec("cyclopts"):
        assert done.returncode == 0, done
        assert "verify" in done.stdout, done
    else:
        assert done.returncode == 2, done
        assert 'pip install "checkmate-remat[cli]"' in done.stderr, done


if __name__ == "__main__":
    for check in (installed, plans, missing_extras, command_line):
        check()
    print(f"checkmate {checkmate.__version__} works on Python {sys.version.split()[0]}")
