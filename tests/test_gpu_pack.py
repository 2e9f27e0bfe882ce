"""The measurements for a GPU run from nothing on a CPU, by plans that are carried, and find a broken promise."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACK = ROOT / "benchmarks" / "gpu"
REHEARSED = ("peaks:gpt2", "offload:gpt2")
"""Parts that run every time."""


@pytest.fixture(scope="module")
def pack() -> Iterator[Any]:
    """The runner; its modules have names that others have too."""
    names = ("quick", "parts", "cases", "measure", "fresh", "models", "steps")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    path = list(sys.path)
    sys.path.insert(0, str(PACK))
    yield importlib.import_module("quick")
    sys.path[:] = path
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.fixture(scope="module")
def rehearsed(pack: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], int, Path]:
    """The results of some parts at tiny size, the exit status, and their folder."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("gpu")
    given = ["--device", "cpu", "--tiny", "--out", str(folder), "--plans", str(folder / "plans"), "--parts", *REHEARSED]
    try:
        assert pack.main([*given, "--make-plans"]) == 0
        status = pack.main([*given, "--here"])
    finally:
        logging.disable(logging.NOTSET)
        torch.set_num_threads(threads)
    return {part: json.loads((folder / f"{part.replace(':', '-')}.json").read_text()) for part in REHEARSED}, status, folder


def test_the_pack_runs_carried_plans_from_nothing(rehearsed):
    """Every part leaves a JSON with what it ran on; every plan is used, and every promise holds on a CPU as well."""
    found, status, folder = rehearsed
    assert {part: known.get("failed", known["left_out"]) for part, known in found.items()} == {part: [] for part in REHEARSED}
    assert status == 0
    for known in found.values():
        assert known["versions"]["torch"]
        assert known["hardware"]["processor"]
        assert known["elapsed_s"] > 0
    rows = found["peaks:gpt2"]["result"]
    assert [row["name"] for row in rows] == ["keep all", "50%", "25%"]
    assert all(row["identical"] and row["allocated_bytes"] == row["planned_bytes"] for row in rows)
    assert rows[-1]["allocated_bytes"] < rows[0]["allocated_bytes"]
    assert rows[-1]["overhead"] > 1
    rows = found["offload:gpt2"]["result"]
    assert all(row["identical"] and row["host_bytes"] == row["planned_host_bytes"] for row in rows)
    assert rows[-1]["copies"] > 0
    assert (folder / "gpt2.graph.json").exists()


def test_every_broken_promise_is_found(pack, rehearsed):
    """A peak, a bit, reserved memory, bytes on the host, a faster rival, a smaller one, a failed test."""
    peaks, copies = (rehearsed[0][part] for part in REHEARSED)
    assert pack.verdict(peaks) == pack.verdict(copies) == []
    last = peaks["result"][-1]
    changed = {
        "planned": {"allocated_bytes": last["planned_bytes"] + 65},
        "measured": {"planned_bytes": int(1.02 * last["allocated_bytes"])},
        "to the bit": {"identical": False},
        "other bits in a second step": {"bits_again": "0"},
        "predicted": {"reserved_bytes": int(1.06 * last["predicted_reserved_bytes"])},
        "on the host": {"host_bytes": last["planned_host_bytes"] + 1},
    }
    for word, change in changed.items():
        broken = pack.verdict({**peaks, "result": [*peaks["result"][:-1], {**last, **change}]})
        assert any(word in line for line in broken), word
    alone, host = {**last, "name": "10%", "time_s": 1.0}, {**last, "name": "10% host", "time_s": 1.1}
    assert "without copies" in pack.verdict({**copies, "tiny": False, "result": [alone, host]})[0]
    arena = {**peaks, "part": "reserved:gpt2", "result": [{**last, "reserved_bytes": last["planned_bytes"] + 1}]}
    assert "budget" in pack.verdict(arena)[0]
    assert "tests.log" in pack.verdict({**peaks, "part": "tests:gpu", "result": [], "facts": {"status": 1}})[0]
    ours = {"name": "ours", "ours": True, "allocated_bytes": 100, "time_s": 1.0}
    faster = {"name": "rival", "ours": False, "allocated_bytes": 100, "time_s": 0.9}
    smaller = {"name": "rival", "ours": False, "allocated_bytes": 99, "time_s": 9.0}
    assert pack.beaten([ours, {**faster, "time_s": 1.0}]) == []
    assert len(pack.beaten([ours, faster])) == len(pack.beaten([ours, smaller])) == 1
    assert pack.beaten([ours, smaller], ["ours, 99: no time left"]) == []
    failed = {"part": "reserved:gpt2", "failed": "it ended before it measured anything"}
    assert pack.verdict(failed) == ["failed: it ended before it measured anything"]


def test_the_schedule_takes_thirteen_minutes(pack):
    """No part can take more than its seconds."""
    assert sum(pack.SCHEDULE.values()) == 13 * 60
    assert set(pack.SCHEDULE) <= set(pack.PARTS)


def test_parts_without_time_are_named(pack, tmp_path, capsys):
    """A second call can run them."""
    assert pack.main(["--device", "cpu", "--tiny", "--minutes", "0", "--out", str(tmp_path), "--parts", *REHEARSED]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "still to run: --parts peaks:gpt2 offload:gpt2"


def test_wrong_usage_is_refused(pack, capsys):
    """A part that does not exist, and full size without a GPU."""
    for arguments in (["--parts", "peaks:gpt5"], ["--device", "cpu"]):
        with pytest.raises(SystemExit):
            pack.main(arguments)
    assert "peaks:gpt5" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_schedule_runs_in_processes_of_its_own(tmp_path):
    """As on a GPU: every kind of part, Inductor too, by carried plans and within 13 minutes."""
    command = [sys.executable, str(PACK / "quick.py"), "--device", "cpu", "--tiny"]
    command += ["--out", str(tmp_path), "--plans", str(tmp_path / "plans")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--make-plans"], env=environment, check=True)
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "all promises hold in these parts", done.stdout + done.stderr
    assert time.perf_counter() - began < 13 * 60
