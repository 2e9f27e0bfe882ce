"""The measurements for a GPU run from nothing on a CPU, continue where they ended, and find a broken promise."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACK = ROOT / "benchmarks" / "gpu"
REHEARSED = ("peaks:gpt2",)
"""The part that runs every time."""


@pytest.fixture(scope="module")
def pack() -> Iterator[Any]:
    """The runner; its modules have names that others have too."""
    names = ("run", "parts", "cases", "measure", "fresh", "models", "steps")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    path = list(sys.path)
    sys.path.insert(0, str(PACK))
    yield importlib.import_module("run")
    sys.path[:] = path
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.fixture(scope="module")
def rehearsed(pack: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The results of some parts at tiny size, and the exit status."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("gpu")
    try:
        status = pack.main(["--device", "cpu", "--tiny", "--here", "--out", str(folder), "--parts", *REHEARSED])
    finally:
        import logging

        logging.disable(logging.NOTSET)
        torch.set_num_threads(threads)
    return folder, status


def test_the_pack_runs_from_nothing(pack, rehearsed):
    """Every kind of part leaves a JSON with what it ran on, and every promise holds on a CPU as well."""
    folder, status = rehearsed
    found = {part: pack.read(folder, part) for part in REHEARSED}
    assert {part: known.get("failed", known["left_out"]) for part, known in found.items()} == {part: [] for part in REHEARSED}
    assert status == 0
    for known in found.values():
        assert known["versions"]["torch"]
        assert known["hardware"]["processor"]
        assert known["elapsed_s"] > 0
    points = found["peaks:gpt2"]["result"]["points"]
    assert points[0]["budget"] == "keep all"
    assert all(p["identical"] and p["allocated_bytes"] == p["planned_bytes"] for p in points)
    assert points[-1]["allocated_bytes"] < points[0]["allocated_bytes"]


def test_a_second_call_runs_nothing(pack, rehearsed):
    """A part that is done is not done again; one from another version is."""
    folder, _ = rehearsed
    before = pack.path_of(folder, "peaks:gpt2").stat().st_mtime_ns
    assert pack.main(["--device", "cpu", "--tiny", "--out", str(folder), "--parts", *REHEARSED]) == 0
    assert pack.path_of(folder, "peaks:gpt2").stat().st_mtime_ns == before
    known, options = pack.read(folder, "peaks:gpt2"), argparse.Namespace(device="cpu", tiny=True)
    assert pack.same_setting(known, options)
    assert not pack.same_setting({**known, "versions": {"torch": "2.0"}}, options)


def test_every_broken_promise_is_found(pack, rehearsed):
    """A budget, a peak, a bit, reserved memory, a faster rival, a smaller one."""
    folder, _ = rehearsed
    peaks = pack.read(folder, "peaks:gpt2")
    assert pack.verdict(peaks) == []
    last = peaks["result"]["points"][-1]
    changed = {
        "budget": {"allocated_bytes": last["budget_bytes"] + 1},
        "planned": {"planned_bytes": int(0.98 * last["allocated_bytes"])},
        "bit": {"identical": False},
        "other bits in a second step": {"bits_again": "0"},
        "reserved": {"reserved_bytes": int(1.06 * last["planned_bytes"])},
    }
    for word, change in changed.items():
        points = [*peaks["result"]["points"][:-1], {**last, **change}]
        assert any(word in line for line in pack.verdict({**peaks, "result": {"points": points}})), word
    alone, last = (
        {**last, "name": f"10%, {kind}", "time_s": 1.0, "host_bytes": 8, "planned_host_bytes": 8} for kind in ("alone", "host")
    )
    assert pack.copied([alone, last], tiny=False) == []
    changed = {
        "budget": {"allocated_bytes": last["budget_bytes"] + 1},
        "planned": {"planned_bytes": int(0.98 * last["allocated_bytes"])},
        "bit": {"identical": False},
        "on the host": {"host_bytes": last["planned_host_bytes"] + 1},
        "without copies": {"time_s": 1.1 * alone["time_s"]},
    }
    for word, change in changed.items():
        assert any(word in line for line in pack.copied([alone, {**last, **change}], tiny=False)), word
    ours = {"name": "ours", "ours": True, "allocated_bytes": 100, "time_s": 1.0}
    faster = {"name": "rival", "allocated_bytes": 100, "time_s": 0.9}
    smaller = {"name": "rival", "allocated_bytes": 99, "time_s": 9.0}
    assert pack.beaten([ours, {**faster, "time_s": 1.0}]) == []
    assert len(pack.beaten([ours, faster])) == len(pack.beaten([ours, smaller])) == 1
    assert pack.beaten([ours, smaller], ["ours, 99: no time left"]) == []
    assert len(pack.beaten([ours, faster], ["ours, 100: no time left"])) == 1
    failed = {"part": "reserved:gpt2", "failed": "it took more than 8 minutes"}
    assert pack.verdict(failed) == ["failed: it took more than 8 minutes"]


def test_wrong_usage_is_refused(pack, capsys):
    """A part that does not exist, and full size without a GPU."""
    for arguments in (["--parts", "peaks:gpt5"], ["--device", "cpu"]):
        with pytest.raises(SystemExit):
            pack.main(arguments)
    assert "no part 'peaks:gpt5'" in capsys.readouterr().err


@pytest.mark.slow
def test_every_part_runs_in_a_process_of_its_own(pack, tmp_path):
    """As on a GPU: all kinds and all models, Inductor too."""
    command = [sys.executable, str(PACK / "run.py"), "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1].startswith("all promises hold"), done.stdout + done.stderr
    assert done.returncode == 0
    points = pack.read(tmp_path, "offload:gpt2")["result"]["points"]
    assert all(p["identical"] and p["host_bytes"] == p["planned_host_bytes"] for p in points[1:])
    assert points[-1]["copies"] > 0
    names = [v["name"] for v in pack.read(tmp_path, "front:gpt2")["result"]["variants"]]
    assert names[:3] == ["eager", "activation checkpointing", "selective checkpointing"]
