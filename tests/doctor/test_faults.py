"""Each fault of an installation is found, and named with its cure."""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from checkmate.cost.database import Database
from checkmate.cost.store import CostStore, OpCost
from checkmate.doctor import installation
from checkmate.doctor.check import Check, guarded
from checkmate.doctor.installation import Requirement

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def environment():
    """Set variables of the environment; None removes one."""

    def change(**variables: str | None) -> None:
        for name, value in variables.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)

    before = dict(os.environ)
    yield change
    os.environ.clear()
    os.environ.update(before)


def test_a_failed_check_says_what_to_do():
    """A verdict without a cure helps nobody."""
    with pytest.raises(ValueError, match="says not what to do"):
        Check("torch", "failed", "broken")


def test_a_check_that_raises_has_failed():
    """A broken installation raises whatever it likes, and the checks after it are still made."""

    def broken() -> Check:
        raise ImportError("libomp.so: cannot open shared object file\nmore")

    check = guarded("HiGHS", broken)
    assert (check.verdict, check.name) == ("failed", "HiGHS")
    assert "ImportError: libomp.so: cannot open" in check.detail
    assert check.cure


@pytest.mark.parametrize(
    ("installed", "verdict", "cure"),
    [
        ("2.10.1+cu128", "failed", 'pip install --upgrade "torch>=2.11"'),
        (None, "failed", 'pip install "checkmate-remat[torch]"'),
        ("2.11.0", "ok", ""),
        ("2.13.2+cpu", "ok", ""),
        ("2.14.0.dev20261101", "note", 'pip install "torch==2.13.*"'),
        ("3.0", "note", 'pip install "torch==2.13.*"'),
    ],
)
def test_the_version_of_torch(installed, verdict, cure):
    """Too old fails at once, and newer than tested is a note: it may work."""
    check = installation.check_torch(installed)
    assert check.verdict == verdict
    assert cure in check.cure


def test_a_package_that_takes_the_name_is_found(tmp_path):
    """Others install the same import name and the same command: files of two packages in one folder are neither of them."""
    assert installation.check_name(installation.other_owners()).verdict == "ok"
    for name, files in {
        "checkmate": {"top_level.txt": "checkmate\n"},
        "chess_tools": {"entry_points.txt": "[console_scripts]\ncheckmate = chess:main\n"},
        "innocent": {"entry_points.txt": "[console_scripts]\nmate = chess:main\n", "top_level.txt": "chess\n"},
    }.items():
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        for file, text in {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", **files}.items():
            (folder / file).write_text(text)
    sys.path.insert(0, str(tmp_path))
    check = installation.check_name(installation.other_owners())
    sys.path.remove(str(tmp_path))
    assert check.verdict == "failed"
    assert "checkmate and chess_tools also installs" in check.detail
    assert "pip uninstall checkmate chess_tools" in check.cure and "checkmate-remat" in check.cure


def test_versions_are_those_of_the_project():
    """The floor and the newest tested version are stated elsewhere too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (floor,) = (line.partition(">=")[2] for line in project["optional-dependencies"]["torch"])
    assert installation.check_torch(floor).verdict == "ok"
    major, minor = floor.split(".")
    assert installation.check_torch(f"{major}.{int(minor) - 1}.9").verdict == "failed"
    (pinned,) = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    assert installation.numbers(pinned.partition("==")[2])[:2] == installation.TESTED_TORCH
    assert project["requires-python"] == ">=3.11"


def test_a_package_that_is_too_old_or_missing():
    """Core packages have to be there; those of an extra only if they are used."""
    required = (Requirement("numpy", "2.0", ""), Requirement("highspy", "1.15", ""), Requirement("ortools", "9.15", "solvers"))
    good, numpy, highspy = installation.check_packages({"numpy": "1.26.4"}, required)
    assert good.detail == ""
    assert (numpy.name, numpy.verdict, numpy.cure) == ("numpy", "failed", 'run `pip install --upgrade "numpy>=2.0"`')
    assert (highspy.name, highspy.verdict, highspy.detail) == ("highspy", "failed", "not installed")
    (every,) = installation.check_packages({"numpy": "2.4.1", "highspy": "1.15.1"}, required)
    assert (every.verdict, every.detail) == ("ok", "numpy 2.4.1, highspy 1.15.1")


def test_a_missing_compiler(environment, tmp_path):
    """Inductor needs one, and fails in the middle of a compilation without."""
    environment(CXX=None, PATH=str(tmp_path))
    check = installation.check_cxx()
    assert check.verdict == "failed"
    assert "not found" in check.detail
    assert "apt-get install g++" in check.cure
    environment(CXX="/nowhere/clang++ -O1")
    assert "CXX=/nowhere/clang++ -O1 names no program" in installation.check_cxx().detail


def fake_compiler(folder: Path, message: str) -> Path:
    """A program that refuses every source with a message."""
    path = folder / "broken-g++"
    path.write_text(f"#!/bin/sh\necho '{message}' >&2\nexit 1\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("message", "cure"),
    [
        ("check.cpp:2:10: fatal error: Python.h: No such file or directory", "python3-dev"),
        ("check.cpp:3:10: fatal error: omp.h: No such file or directory", "libomp"),
        ("error: unrecognized command line option -fopenmp", "set CXX to a compiler that knows C++17"),
    ],
)
def test_a_compiler_without_headers(environment, tmp_path, message, cure):
    """Each missing part has a package of its own."""
    environment(CXX=str(fake_compiler(tmp_path, message)))
    check = installation.check_cxx()
    assert check.verdict == "failed"
    assert cure in check.cure


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here")
def test_a_compiler_that_works(environment):
    """The check itself compiles."""
    environment(CXX=None)
    assert installation.check_cxx().verdict == "ok"


@pytest.mark.parametrize("fault", ["a-file", "read-only"])
def test_a_cache_folder_that_cannot_be_written(environment, tmp_path, fault):
    """Everything would be measured and planned again in each process."""
    place = tmp_path / "cache"
    if fault == "a-file":
        place.write_text("mine")
    else:
        place.mkdir(mode=0o500)
        if os.access(place, os.W_OK):
            place = Path("/proc/none")  # the superuser can write any folder of a disk
    environment(CHECKMATE_CACHE=str(place))
    check = installation.check_cache_folder()
    assert check.verdict == "failed"
    assert "set CHECKMATE_CACHE to a" in check.cure
    assert str(place) in check.detail


def test_a_cache_folder_that_can_be_written(tmp_path):
    """It is made if it does not exist, and nothing is left in it."""
    assert installation.check_folder("cache folder", tmp_path / "a" / "b", "").verdict == "ok"
    assert list((tmp_path / "a" / "b").iterdir()) == []


def damaged(path: Path, how: str) -> Database:
    """A store of costs with a fault."""
    store = CostStore(path)
    store.add({str(k): OpCost(k, 0) for k in range(3000)})
    if how == "garbage":
        path.write_bytes(b"this is no database" * 100)
    elif how == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "a-page-overwritten":
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2 // 4096 * 4096)
            file.write(b"\xa5" * 4096)
    elif how == "other-columns":
        path.unlink()
        Database(lambda: path, "CREATE TABLE measures (key TEXT PRIMARY KEY, price TEXT)", "").run(lambda c: None, None)
    return store.database


@pytest.mark.parametrize("how", ["garbage", "truncated", "a-page-overwritten", "other-columns"])
def test_a_corrupt_store(tmp_path, how):
    """A damaged page may be one that no query of today reads."""
    path = tmp_path / "op_costs.sqlite"
    (check,) = installation.check_stores({"cost store": damaged(path, how)})
    assert (check.name, check.verdict) == ("cost store", "failed")
    assert str(path) in check.detail
    assert check.cure.startswith("remove the file, or set CHECKMATE_CACHE")


def test_intact_stores(tmp_path):
    """One line for all of them; a store that does not exist yet is made."""
    stores = {"costs": damaged(tmp_path / "a.sqlite", "not at all"), "plans": CostStore(tmp_path / "new.sqlite").database}
    (check,) = installation.check_stores(stores)
    assert (check.verdict, check.detail) == ("ok", "intact: costs, plans")


def test_the_engines_find_the_known_optimum():
    """HiGHS and the compiled local search."""
    assert installation.check_highs().verdict == "ok"
    assert installation.check_search().verdict == "ok"


def test_an_engine_with_a_wrong_answer_fails():
    """A check that cannot fail checks nothing."""
    from checkmate import KeepAll, Milp

    wrong = installation.check_engine("HiGHS", Milp(), "install it anew", optimum=8)
    assert (wrong.verdict, wrong.detail) == ("failed", "cost 9, and the optimum is 8")
    assert installation.check_engine("HiGHS", KeepAll(), "install it anew", optimum=None).verdict == "failed"


def test_kernels_that_cannot_be_kept():
    """Each process then compiles the search for half a minute, which looks like slow planning."""
    from checkmate.solvers.backends import kernels

    kernels._told.append("no locator available")
    try:
        check = installation.check_search()
    finally:
        kernels._told.clear()
    assert check.verdict == "failed"
    assert "set NUMBA_CACHE_DIR" in check.cure
