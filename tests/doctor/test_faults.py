"""Each fault of an installation is found, and named with its cure."""

from __future__ import annotations

import os
import sqlite3
import sys
import tomllib
from pathlib import Path

import pytest

from checkmate.cost.store import CostStore, OpCost
from checkmate.doctor import checks
from checkmate.doctor.checks import Check, guarded

ROOT = Path(__file__).parent.parent.parent


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
    check = checks.check_torch(installed)
    assert check.verdict == verdict
    assert cure in check.cure


def test_a_package_that_takes_the_name_is_found(tmp_path):
    """Others install the same import name and the same command: files of two packages in one folder are neither of them."""
    assert checks.check_name().verdict == "ok"
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
    check = checks.check_name()
    sys.path.remove(str(tmp_path))
    assert check.verdict == "failed"
    assert "checkmate and chess_tools also installs" in check.detail
    assert "pip uninstall checkmate chess_tools" in check.cure and "checkmate-remat" in check.cure


def test_versions_are_those_of_the_project():
    """The floor and the newest tested version are stated elsewhere too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (floor,) = (line.partition(">=")[2] for line in project["optional-dependencies"]["torch"])
    assert checks.check_torch(floor).verdict == "ok"
    major, minor = floor.split(".")
    assert checks.check_torch(f"{major}.{int(minor) - 1}.9").verdict == "failed"
    (pinned,) = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    assert checks.numbers(pinned.partition("==")[2])[:2] == checks.TESTED_TORCH
    assert project["requires-python"] == ">=3.11"


@pytest.mark.parametrize("fault", ["a-file", "read-only"])
def test_a_cache_folder_that_cannot_be_written(environ, tmp_path, fault):
    """Everything would be measured and planned again in each process."""
    place = tmp_path / "cache"
    if fault == "a-file":
        place.write_text("mine")
    else:
        place.mkdir(mode=0o500)
        if os.access(place, os.W_OK):
            place = Path("/proc/none")  # the superuser can write any folder of a disk
    environ["CHECKMATE_CACHE"] = str(place)
    check = checks.check_store(CostStore())
    assert check.verdict == "failed"
    assert "set CHECKMATE_CACHE to another folder" in check.cure
    assert str(place) in check.detail


def damaged(path: Path, how: str) -> CostStore:
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
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE entries (key TEXT PRIMARY KEY, price TEXT)")
        connection.close()
    return store


@pytest.mark.parametrize("how", ["garbage", "truncated", "a-page-overwritten", "other-columns"])
def test_a_corrupt_store(tmp_path, how):
    """A damaged page may be one that no query of today reads."""
    path = tmp_path / "store.sqlite"
    check = checks.check_store(damaged(path, how))
    assert (check.name, check.verdict) == ("store", "failed")
    assert str(path) in check.detail
    assert check.cure.startswith("remove the file, or set CHECKMATE_CACHE")


def test_an_intact_store(tmp_path):
    """A store that does not exist yet is made."""
    for store in (damaged(tmp_path / "a.sqlite", "not at all"), CostStore(tmp_path / "new.sqlite")):
        assert checks.check_store(store).verdict == "ok"


def test_the_engines_find_the_known_optimum():
    """HiGHS and the compiled local search; a check that cannot fail checks nothing."""
    assert checks.check_solvers().verdict == "ok"
    wrong = checks.check_solvers(least_cost=8)
    assert (wrong.verdict, wrong.detail) == ("failed", "HiGHS found a cost of 9, and the least is 8")


def test_kernels_that_cannot_be_kept():
    """Each process then compiles the search for half a minute, which looks like slow planning."""
    from checkmate.solvers.backends import kernels

    kernels._told.append("no locator available")
    try:
        check = checks.check_solvers()
    finally:
        kernels._told.clear()
    assert check.verdict == "failed"
    assert "set NUMBA_CACHE_DIR" in check.cure
