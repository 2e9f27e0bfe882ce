"""What all tests share: how Hypothesis runs, a store of measured costs, and who needs a device."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

# Solvers compile at their first call and machines are shared: time says nothing about an example.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
# For tests/mutation: the verdict on a mutant must not depend on the run, and nobody reads its smallest example.
settings.register_profile(
    "mutation", settings.get_profile("default"), derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True, scope="session")
def _own_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One folder for all processes of a run: what one of them measures the others and their children do not measure again.

    It is empty at first: a plan that an earlier run remembered would be tested in place of what the solvers find now.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "costs"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHECKMATE_CACHE", str(folder))
        yield folder


@pytest.fixture
def environ() -> Iterator[MutableMapping[str, str]]:
    """The environment, which is as before when the test ends."""
    before = dict(os.environ)
    yield os.environ
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def own_cache(environ: MutableMapping[str, str], tmp_path: Path) -> Path:
    """An empty cache folder for one test."""
    environ["CHECKMATE_CACHE"] = str(tmp_path)
    return tmp_path


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Path]:
    """The test runs in a folder of its own, which is empty."""
    with contextlib.chdir(tmp_path):
        yield tmp_path


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, BaseException], list[Any]]:
    """Let a function of Python, the system or another package raise an error as on some machine; its calls are returned."""

    def fails(name: str, error: BaseException) -> list[Any]:
        calls: list[Any] = []

        def raises(*given: Any, **_: Any) -> None:
            calls.append(given)
            raise error

        monkeypatch.setattr(name, raises)
        return calls

    return fails


@pytest.fixture
def before_fsync(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], object]], None]:
    """Call a function whenever what was written is to reach the disk: to look, or to raise an error as a full disk does."""
    fsync = os.fsync
    return lambda then: monkeypatch.setattr(os, "fsync", lambda handle: (then(handle), fsync(handle)))


@pytest.fixture
def plugged_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let entry points be those of all packages that are installed."""
    return lambda *entries: monkeypatch.setattr("importlib.metadata.entry_points", lambda group: list(entries))


KERNELS = """
from checkmate import AStar, Auto, Limits, Problem, min_budget, solve
from benchmarks.generate import chain
graph = chain(12)
for solver in (Auto(), AStar()):
    solve(Problem(graph, "45%"), solver, limits=Limits(time_s=2, gap=0.0), raise_on_failure=False)
min_budget(graph, limits=Limits(time_s=1))
"""
COMPILING = pytest.StashKey[tuple[Path, subprocess.Popen[bytes]]]()
"""The process that compiles the kernels, and a file that it holds locked; only where several processes run the tests."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the solvers' kernels once for all processes, while these import what they test.

    In a fresh clone that takes 24 s of a core, which each process would take for itself. The lock belongs to the compiling
    process, so that it ends with it, however it ends.

    Importing makes next to no garbage: without looking for it, what tests import is there a sixth sooner.
    """
    gc.disable()
    if not session.config.getoption("numprocesses", None):
        return
    held, name = tempfile.mkstemp(prefix="checkmate-kernels-")
    fcntl.flock(held, fcntl.LOCK_EX)
    compiling = subprocess.Popen([sys.executable, "-c", KERNELS], pass_fds=[held])
    os.close(held)
    session.config.stash[COMPILING] = Path(name), compiling


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell each process of pytest-xdist which file to wait for."""
    node.workerinput["kernels"] = str(node.config.stash[COMPILING][0])


@pytest.fixture(autouse=True, scope="session")
def _kernels(request: pytest.FixtureRequest) -> None:
    """Wait until the kernels are compiled: a test that calls one before would compile it again."""
    given: dict[str, Any] = getattr(request.config, "workerinput", {})
    if "kernels" in given:
        with Path(given["kernels"]).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave no file, and do not compile on where no test waited for it."""
    if COMPILING in config.stash:
        lock, compiling = config.stash[COMPILING]
        compiling.kill()
        compiling.wait()
        lock.unlink()


def pytest_collection_finish() -> None:
    """What was imported stays: a collection that looks at PyTorch and TensorFlow takes 0.4 s, and hundreds of tests ask for one.

    Keras collects whenever its session is cleared, and `measure_peak` before it measures.
    """
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Golden files are written anew on request only."""
    parser.addoption("--regen", action="store_true", help="write golden files anew")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none; PyTorch is imported only if some test does."""
    wanting = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
