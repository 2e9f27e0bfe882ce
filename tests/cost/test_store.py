"""Measured costs are kept, and shared by processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from checkmate.cost import CostStore, OpCost, cache_folder

_ADD = """
import sys
from checkmate.cost import CostStore, OpCost
store, worker = CostStore(sys.argv[1]), int(sys.argv[2])
for k in range(40):
    store.add({f"op{k}": OpCost(worker, k), f"own{worker}.{k}": OpCost(worker, 0)})
"""


def test_processes_that_write_at_once_agree(tmp_path: Path) -> None:
    """The first measure of an op stays, and none is lost."""
    path = tmp_path / "costs.sqlite"
    workers = [subprocess.Popen([sys.executable, "-c", _ADD, str(path), str(w)]) for w in range(3)]
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    keys = [f"op{k}" for k in range(40)] + [f"own{w}.{k}" for w in range(3) for k in range(40)]
    found = CostStore(path).get(keys)
    assert set(found) == set(keys)
    assert all(found[f"op{k}"].workspace_bytes == k for k in range(40))


def test_more_keys_than_a_statement_takes(tmp_path: Path) -> None:
    """Large models ask for thousands."""
    store = CostStore(tmp_path / "costs.sqlite")
    store.add({str(k): OpCost(k, 0) for k in range(2500)})
    assert len(store.get(str(k) for k in range(5000))) == 2500


def test_the_cache_folder_can_be_chosen(environ: dict[str, str], tmp_path: Path) -> None:
    """By our own variable before the platform's."""
    environ["CHECKMATE_CACHE"] = str(tmp_path)
    assert cache_folder() == tmp_path
    del environ["CHECKMATE_CACHE"]
    environ["XDG_CACHE_HOME"] = str(tmp_path / "xdg")
    assert cache_folder().parts[-1].lower() == "checkmate" or "checkmate" in str(cache_folder()).lower()
