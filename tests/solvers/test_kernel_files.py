"""Solvers run where compiled functions cannot be kept on disk, and one warning names the cure."""

from __future__ import annotations

import importlib.util
import pickle
import re
import sys
from pathlib import Path

import pytest

from checkmate.solvers.backends import kernels

FUNCTION = "def twice(x):\n    return 2 * x\n"


@pytest.fixture
def twice(tmp_path):
    """A function of a file, as numba needs it to keep it; nothing was warned of before."""
    kernels._told.clear()
    (tmp_path / "functions.py").write_text(FUNCTION)
    spec = importlib.util.spec_from_file_location("functions", tmp_path / "functions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["functions"] = module  # numba looks its functions up by their modules' names
    spec.loader.exec_module(module)
    yield module.twice
    del sys.modules["functions"]
    kernels._told.clear()


def test_a_function_is_kept_and_loaded(twice, tmp_path, caplog):
    """The second process does not compile it."""
    assert kernels.kernel(twice)(3) == 6
    assert list(tmp_path.rglob("*.nbc"))
    again = kernels.kernel(twice)
    assert again(3) == 6
    assert sum(again.stats.cache_hits.values()) == 1
    assert caplog.messages == []


def test_no_folder_to_keep_it_in(twice, fails, caplog):
    """A read-only home and a read-only installation, as in many containers: numba refuses."""
    fails("numba.core.caching.CacheImpl.__init__", RuntimeError("cannot cache function 'twice': no locator available"))
    assert [kernels.kernel(twice)(3) for _ in range(2)] == [6, 6]
    (warning,) = caplog.messages
    assert "no locator available" in warning
    assert "set NUMBA_CACHE_DIR to a folder that can be written" in warning


def test_a_full_disk(twice, fails, caplog):
    """The function is compiled, and used."""
    fails("numba.core.caching.IndexDataCacheFile.save", OSError(28, "No space left on device"))
    assert kernels.kernel(twice)(3) == 6
    (warning,) = caplog.messages
    assert "No space left on device" in warning


@pytest.mark.parametrize(
    "content", [b"", b"garbage", pickle.dumps("0.0.0"), b"\x80\x04.", b"cno_such_module\nname\n."], ids=range(5)
)
def test_a_damaged_file_is_written_again(twice, tmp_path, content, caplog):
    """Whatever its bytes are; an index of another version names types that are gone. The next process compiles nothing."""
    assert kernels.kernel(twice)(3) == 6
    damaged = [*tmp_path.rglob("*.nbi"), *tmp_path.rglob("*.nbc")]
    assert damaged
    for path in damaged:
        path.write_bytes(content)
    assert kernels.kernel(twice)(3) == 6
    again = kernels.kernel(twice)
    assert again(3) == 6
    assert sum(again.stats.cache_hits.values()) == 1
    assert caplog.messages == []


def test_every_kernel_is_made_here():
    """A function that numba compiles by other means would fail without a folder."""
    folder = Path(kernels.__file__).parents[1]
    assert [path.name for path in folder.rglob("*.py") if re.search(r"import .*\bn?jit\b|numba\.n?jit", path.read_text())] == [
        "kernels.py"
    ]
