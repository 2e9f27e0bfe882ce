"""Values are kept and shared by processes; a store that cannot be used is named in one warning with the cure, and that is all."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkmate.core.errors import OptionError
from checkmate.cost import CostStore, OpCost, cache_folder
from checkmate.cost.store import MeasuredCosts
from checkmate.frontend.plan_store import MeasuredPlan, PlanStore
from checkmate.frontend.step_memory import StepMemory

MEASURED = {"mm": OpCost(1200, 8)}
FOUR_BYTES = StepMemory(forward_peak_bytes=4, saved_bytes=0, backward_peak_bytes=2, gradient_bytes=1)


def damage(fault: str, path: Path) -> sqlite3.Connection | None:
    """Make a file faulty; a connection that holds a lock is returned."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if fault == "garbage":
        path.write_bytes(b"this is no database" * 100)
    elif fault == "truncated":
        CostStore(path).add({str(k): OpCost(k, 0) for k in range(2000)})
        os.truncate(path, path.stat().st_size // 2)
    elif fault == "foreign":
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE bookmarks (address TEXT)")
        connection.close()
    elif fault == "other-columns":
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE entries (key TEXT PRIMARY KEY, price TEXT)")
        connection.close()
    elif fault == "not-numbers":
        CostStore(path).add({"mm": OpCost("a", "b")})  # type: ignore[arg-type]
    elif fault == "locked":
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("BEGIN EXCLUSIVE")
        return connection
    return None


def impatient(path: Path) -> CostStore:
    """A store that waits a tenth of a second for a lock."""
    store = CostStore(path)
    store.wait_s = 0.1
    return store


CURES = {
    "garbage": "remove the file",
    "truncated": "remove the file",
    "foreign": "remove the file",
    "other-columns": "remove the file",
    "not-numbers": "remove the file",
    "locked": "end the process that keeps it locked",
}


@pytest.mark.parametrize("fault", CURES)
def test_a_faulty_file_is_named_once_and_left_as_it_is(tmp_path, caplog, fault):
    """Nothing is found in it, nothing is kept in it, and nothing of it is lost: it may be another program's."""
    path = tmp_path / "cache" / "store.sqlite"
    held = damage(fault, path)
    before = path.read_bytes()
    for _ in range(3):
        store = impatient(path)
        assert store.get(["mm"]) == {}
        store.add(MEASURED)
    assert fault in ("other-columns", "not-numbers") or path.read_bytes() == before  # these two look like a store of ours
    (warning,) = caplog.messages
    assert str(path) in warning
    assert CURES[fault] in warning
    assert "set CHECKMATE_CACHE to another folder" in warning
    if held is not None:
        held.close()


def test_a_lock_is_waited_for_once(tmp_path):
    """A process that hangs with the lock must not cost its time limit at every op; a short lock costs nothing."""
    path = tmp_path / "store.sqlite"
    held = damage("locked", path)
    assert impatient(path).get(["mm"]) == {}
    assert held is not None
    held.close()
    CostStore(path).add(MEASURED)
    assert CostStore(path).get(["mm"]) == {}


@pytest.mark.parametrize("name", ["BUSY", "LOCKED", "PROTOCOL", "BUSY_SNAPSHOT", "IOERR_LOCK", "IOERR_SHMLOCK", "IOERR_RDLOCK"])
def test_a_lock_of_any_kind_is_waited_for_once(name, tmp_path, fails, caplog):
    """A network file system that gives no lock of the log, or none at all, is told by other codes, after ten seconds each."""
    error = sqlite3.OperationalError("locking protocol")
    error.sqlite_errorname = f"SQLITE_{name}"
    tries = fails("sqlite3.connect", error)
    path = tmp_path / "store.sqlite"
    for _ in range(3):
        assert CostStore(path).get(["mm"]) == {}
        CostStore(path).add(MEASURED)
    assert len(tries) == 1
    (warning,) = caplog.messages
    assert f"{path} cannot be used (locking protocol): costs of ops are measured again in every process" in warning
    assert warning.endswith("; end the process that keeps it locked, or set CHECKMATE_CACHE to another folder")


@pytest.mark.parametrize("column", ["value", "checksum"])
def test_a_damaged_entry_names_the_file_and_is_measured_again(column, tmp_path, caplog):
    """A plan made of an infinite or a negative cost is worse than none; what else is in the file is right."""
    path = tmp_path / "store.sqlite"
    CostStore(path).add({**MEASURED, "add": OpCost(7, 0)})
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE entries SET {column} = ? WHERE key = 'mm'", (b"\x92\x00\x00",))
    connection.close()
    for _ in range(2):
        costs = MeasuredCosts(
            signature=str,
            measure=lambda ops, _known: dict.fromkeys(ops, OpCost(1000, 8)),
            estimate=lambda _op: OpCost(1, 0),
            store=CostStore(path),
        )
        assert costs(["mm", "add"]) == [OpCost(1000, 8), OpCost(7, 0)]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert str(path) in warning
    assert "a damaged entry, which is not used: costs of ops are measured again" in warning
    assert "remove the file, or set CHECKMATE_CACHE" in warning


def test_costs_that_no_file_can_keep_are_no_error(tmp_path, caplog):
    """SQLite counts in 64 bits."""
    store = CostStore(tmp_path / "store.sqlite")
    store.add({"mm": OpCost(2**70, 0)})
    assert store.get(["mm"]) == {}
    assert len(caplog.messages) == 1


def test_answers_bound_the_peaks_of_other_budgets(tmp_path):
    """No smaller budget is answered with a larger peak."""
    path = tmp_path / "store.sqlite"
    for budget, peak in ((10, 4), (30, 20), (40, 33)):
        PlanStore("graph", path).record_answer(budget, peak)
    assert PlanStore("graph", path).monotone_bounds(25) == (4, 20)
    assert PlanStore("other", path).monotone_bounds(25) == (0, 25)


def test_measured_plans_are_replaced_one_by_one(tmp_path):
    """By their order of computations; the smallest peak comes first."""
    plans, larger = PlanStore("graph", tmp_path / "store.sqlite"), FOUR_BYTES.plus(8)
    for order, memory in (((0, 1), larger), ((0, 1, 0), FOUR_BYTES), ((0, 1), larger.plus(8))):
        plans.add(MeasuredPlan(order, memory))
    assert plans.all() == [MeasuredPlan((0, 1, 0), FOUR_BYTES), MeasuredPlan((0, 1), larger.plus(8))]


@pytest.mark.parametrize("fault", ["a-file", "cannot-be-made", "no-home"])
def test_a_faulty_folder_is_named_once(tmp_path, environ, fails, caplog, fault):
    """There is one cure for all kinds of values."""
    (tmp_path / "file").write_text("mine")
    place = {"a-file": str(tmp_path / "file"), "cannot-be-made": f"/proc/{tmp_path.name}/cache", "no-home": "no home"}[fault]
    environ["CHECKMATE_CACHE"] = "" if fault == "no-home" else place
    if fault == "no-home":
        environ.pop("XDG_CACHE_HOME", None)
        fails("pathlib.Path.home", RuntimeError("Could not determine home directory."))
        with pytest.raises(OptionError, match="the user has no home folder"):
            cache_folder()
    CostStore().add(MEASURED)
    assert CostStore().get(["mm"]) == {}
    plans = PlanStore("graph")
    plans.add(MeasuredPlan((0, 1), FOUR_BYTES))
    plans.record_answer(10, 4)
    assert (plans.all(), plans.monotone_bounds(8)) == ([], (0, 8))
    (warning,) = caplog.messages
    assert place in warning
    assert "set CHECKMATE_CACHE to a" in warning
    assert (tmp_path / "file").read_text() == "mine"


READ_ONLY = """
import logging, os, stat, sys
from pathlib import Path
logging.basicConfig(format="%(message)s", stream=sys.stdout)
from checkmate.cost import CostStore, OpCost
folder = Path(os.environ["CHECKMATE_CACHE"])
folder.chmod(0o555)
for path in folder.iterdir():
    path.chmod(0o444)
print(CostStore().get(["mm", "add"]))
CostStore().add({"add": OpCost(1, 0)})
print(CostStore().get(["mm", "add"]))
"""


def test_a_store_that_can_only_be_read_is_read(tmp_path):
    """As in an image whose costs were measured when it was built; one warning says that nothing is added."""
    # The root user of a container may write everywhere; without its capabilities it may not.
    unprivileged = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()
    if unprivileged and shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, or another user than root")
    folder = tmp_path / "cache"
    CostStore(folder / "store.sqlite").add(MEASURED)
    environment = {**os.environ, "CHECKMATE_CACHE": str(folder)}
    command = [*unprivileged, sys.executable, "-c", READ_ONLY]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    folder.chmod(0o755)
    assert done.returncode == 0, done.stderr
    found, warning, again = done.stdout.splitlines()
    assert found == again == str(MEASURED)
    assert warning.startswith(
        f"the cache folder {folder} cannot be used (attempt to write a readonly database): costs of ops are "
    )
    assert warning.endswith("make it a folder that can be written, or set CHECKMATE_CACHE to another folder")


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("needs the right to mount a small disk")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("free_bytes", [0, 4096, 40_000, 100_000])
def test_a_full_disk_stops_nothing(small_disk, caplog, free_bytes):
    """Before the file is made, while it is made, and while it grows; what was kept before is found again."""
    path = small_disk / "cache" / "store.sqlite"
    store = CostStore(path)
    if free_bytes:
        store.add(MEASURED)
    left = shutil.disk_usage(small_disk).free - free_bytes
    (small_disk / "other").write_bytes(bytes(max(0, left)))
    for k in range(20):
        store.add({f"op{k}.{i}": OpCost(i, 0) for i in range(500)})
    (warning,) = caplog.messages
    assert str(small_disk / "cache") in warning
    (small_disk / "other").unlink()
    assert store.get(["mm"]) == (MEASURED if free_bytes else {})
    store.add({"later": OpCost(1, 0)})
    assert "later" in store.get(["later"])


WRITES = """
import sys
from checkmate.cost import CostStore, OpCost
store = CostStore(sys.argv[1])
for k in range(10**6):
    store.add({f"op{k}.{i}": OpCost(i, 0) for i in range(200)})
    print(k, flush=True)
"""


def test_a_process_that_is_killed_while_it_writes_leaves_the_file_consistent(tmp_path, caplog):
    """All of a write is there, or nothing."""
    path = tmp_path / "store.sqlite"
    process = subprocess.Popen([sys.executable, "-c", WRITES, path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(5):
        last = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    store = CostStore(path)
    counts = [len(store.get(f"op{k}.{i}" for i in range(200))) for k in range(last + 200)]
    assert counts[: last + 1] == [200] * (last + 1)
    assert set(counts) <= {0, 200}
    store.add(MEASURED)
    assert store.get(["mm"]) == MEASURED
    assert caplog.messages == []


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
