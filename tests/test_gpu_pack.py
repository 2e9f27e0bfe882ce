"""The measurements for a GPU run from nothing on a CPU, by plans that are carried, and find a broken promise."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import checkmate
from checkmate import Plan, load_device
from checkmate.core import files
from tests.test_gpu_history import Recorder

ROOT = Path(__file__).parent.parent
PACK = ROOT / "benchmarks" / "gpu"
REHEARSED = ("peaks:gpt2", "offload:gpt2", "costs:gpt2")
"""Parts that run every time."""


@pytest.fixture(scope="module")
def pack() -> Iterator[Any]:
    """The runner; its modules have names that others have too."""
    names = ("quick", "parts", "cases", "measure", "fresh", "generate", "models", "steps", "history", "table")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    path = list(sys.path)
    sys.path.insert(0, str(PACK))
    yield importlib.import_module("quick")
    sys.path[:] = path
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.fixture
def seeming(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let functions of a module be those of a test, where there is no GPU."""

    def seem(module: Any, **functions: Callable[..., Any]) -> None:
        for name, function in functions.items():
            monkeypatch.setattr(module, name, function)

    return seem


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
    found, status, _ = rehearsed
    assert {part: known.get("failed", known["left_out"]) for part, known in found.items()} == {part: [] for part in REHEARSED}
    assert status == 0
    for known in found.values():
        assert known["versions"]["torch"]
        assert known["hardware"]["processor"]
        assert known["elapsed_s"] > 0
    rows = found["peaks:gpt2"]["result"]
    assert [row["name"] for row in rows] == ["keep all", "25%", "50%"]
    assert all(row["identical"] and row["allocated_bytes"] == row["planned_bytes"] for row in rows)
    assert rows[1]["allocated_bytes"] < rows[0]["allocated_bytes"]
    assert rows[1]["overhead"] > 1
    rows = found["offload:gpt2"]["result"]
    assert all(row["identical"] and row["host_bytes"] == row["planned_host_bytes"] for row in rows)
    assert rows[-1]["copies"] > 0


def test_every_row_is_in_the_tables(pack, rehearsed, capsys):
    """By the part and the name of the row, with its sizes in MiB and the facts of the part."""
    importlib.import_module("table").show(rehearsed[0]["peaks:gpt2"])
    lines = {line.split(" | ")[0]: line for line in capsys.readouterr().out.splitlines()}
    for row in rehearsed[0]["peaks:gpt2"]["result"]:
        line = lines[f"| peaks:gpt2 result {row['name']}"]
        assert f" {row['planned_bytes'] / 2**20:.2f} " in line
        assert f" {row['time_ratio']:.4g} " in line
    assert "| peaks:gpt2 facts" in lines


def test_costs_measured_there_are_those_of_plans_made_here(pack, rehearsed, tmp_path):
    """A run leaves a device profile with the cost of every op of the step, by which other ops are recomputed."""
    parts, cases = importlib.import_module("parts"), importlib.import_module("cases")
    found, _, folder = rehearsed
    profile = load_device(folder / "measured.device.json")
    case = cases.build("gpt2", "cpu", True)
    graph = checkmate.torch.capture(case.model, example=case.batch, device=profile)
    assert graph.cost == pytest.approx(1e9 * found["costs:gpt2"]["facts"]["ops_s"])
    changed = {op: (1 if "mm." in op else 10**6, bytes_) for op, (_, bytes_) in profile.measured.items()}
    again = list[set[int]]()
    for k, known in enumerate((profile, msgspec.structs.replace(profile, measured=changed))):
        parts.make_plans(tmp_path / str(k), ["peaks:gpt2"], known, "cpu", tiny=True, time_s=0.2)
        order = files.read_as(tmp_path / str(k) / "gpt2-50%.plan.json", Plan).order
        again.append({op for op in order if order.count(op) > 1})
    assert again[0] != again[1]


def test_models_are_built_once_and_copied_to_a_device(pack):
    """A GPU waits for none of them: random numbers repeat, and a copy has blocks and batch of its own."""
    torch, cases = importlib.import_module("torch"), importlib.import_module("cases")
    one, two = (cases.build("gpt2", "meta", True) for _ in range(2))
    assert cases.built.cache_info().hits
    assert {t.device.type for t in (*one.model.parameters(), *one.batch.values())} == {"meta"}
    assert set(one.blocks) <= set(one.model.modules())
    assert not set(one.model.modules()) & set(two.model.modules())
    with cases.RepeatedNumbers():
        numbers = torch.empty(3, 1 << 19).normal_(2.0, 0.5)
    assert torch.equal(numbers[0], numbers[2])
    assert not torch.equal(numbers[0], numbers[1])
    assert abs(numbers.mean() - 2) < 0.01


def test_any_bit_and_any_order_has_another_fingerprint(pack):
    """Of numbers, their signs and their places; equal tensors have the same."""
    torch, measure = importlib.import_module("torch"), importlib.import_module("measure")
    plain = torch.arange(7, dtype=torch.bfloat16)
    others = [plain.flip(0), plain * torch.tensor([-1.0, *[1.0] * 6]), plain + torch.tensor([0.0] * 6 + [2**-5]), plain[:6]]
    found = {int(measure.fingerprint(t)) for t in (plain, plain.clone(), *(o.bfloat16() for o in others))}
    assert len(found) == 5
    assert measure.fingerprint(None) is None


def test_a_history_is_recorded_of_a_gpu_and_replayed(pack, seeming, tmp_path, capsys):
    """Of the two steps of a peak, without stacks; the device is one that only counts."""
    torch, measure = importlib.import_module("torch"), importlib.import_module("measure")
    recorder, settings = Recorder(), list[dict[str, Any]]()

    def record(*args: Any, **kwargs: Any) -> None:
        settings.append(inspect.signature(torch.cuda.memory._record_memory_history_impl).bind(*args, **kwargs).arguments)

    def dump(path: str) -> None:
        Path(path).write_bytes(pickle.dumps(recorder.raw()))

    seeming(torch.cuda.memory, _record_memory_history=record, _dump_snapshot=dump)
    stats = dict.fromkeys((f"{kind}_bytes.all.peak" for kind in ("allocated", "requested", "reserved")), 0)
    nothing = dict.fromkeys(("synchronize", "empty_cache", "reset_peak_memory_stats"), lambda: None)
    seeming(torch.cuda, **nothing, memory_stats=lambda: stats)

    def step() -> None:
        recorder.free(recorder.allocate(3 << 20))

    measure.peaks(step, torch.nn.Linear(1, 1), (), "cuda", record=f"{tmp_path / 'tiny'}.peaks")
    assert settings == [{"context": None, "max_entries": 1_000_000}, {"enabled": None}]
    assert sum(event["action"] == "alloc" for event in recorder.events) == 2
    assert importlib.import_module("history").main([str(tmp_path / "tiny.peaks.history.pickle")]) is None
    assert f"recorded_bytes {20 << 20} modelled_bytes {20 << 20} differs_at None" in capsys.readouterr().out


def test_every_broken_promise_is_found(pack, rehearsed):
    """A peak, a bit, reserved memory, bytes on the host, a faster rival, a smaller one, a failed test."""
    peaks, copies = (rehearsed[0][part] for part in REHEARSED[:2])
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
    assert capsys.readouterr().out.splitlines()[-1] == f"still to run: --parts {' '.join(REHEARSED)}"


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
