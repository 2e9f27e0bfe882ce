"""Bad input gets one clear line and a hint, exit code 2 and never a traceback."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

import checkmate
from tests.oom.recording import failed_run
from tests.plot.graphs import AGAIN, plan
from tests.regions.test_regions import network

PLAN = ("plan", "chain.graph.json", "--budget", "5MiB")
BATCH = ("max-batch", "chain.graph.json", "--budget", "20MiB", "--batch", "1")
TWICE = ("chain.graph.json", "chain.graph.json")
OTHERS = ("chain.graph.json", "other.graph.json")

CASES = {
    "no-such-verb": (("plann",), "plann"),
    "no-budget": (("plan", "chain.graph.json"), "--budget"),
    "unknown-option": ((*PLAN, "--bugdet", "3"), "--bugdet"),
    "no-such-graph": (("plan", "none.graph.json", "--budget", "1MiB"), "none.graph.json: No such file"),
    "graph-is-a-folder": (("plan", ".", "--budget", "1MiB"), "directory"),
    "budget-unreadable": (("plan", "chain.graph.json", "--budget", "lots"), "cannot read 'lots'"),
    "budget-unknown-unit": (("plan", "chain.graph.json", "--budget", "8GB8"), "8GB8"),
    "budget-infinite": (("plan", "chain.graph.json", "--budget", "1e400"), "too much"),
    "budget-infinite-with-unit": (("plan", "chain.graph.json", "--budget", "1e308GiB"), "too much"),
    "budget-share-infinite": (("plan", "chain.graph.json", "--budget", "1e308%"), "more than 100000%"),
    "budget-a-half": (("plan", "chain.graph.json", "--budget", "0.5"), "did you mean '50%'?"),
    "host-infinite": ((*PLAN, "--host", "1e308GiB", "--device", "H100"), "too much"),
    "oom-infinite": (("oom", "infinite.log"), "no out-of-memory error of PyTorch"),
    "oom-limit-infinite": (("oom", "snapshot.pickle", "--limit", "1e308GiB"), "too much"),
    "verify-budget-infinite": (("verify", "chain.graph.json", "plan.json", "--budget", "1e308TiB"), "too much"),
    "budget-negative": (("plan", "chain.graph.json", "--budget=-5"), "-5"),
    "solver-unknown": ((*PLAN, "--solver", "autoo"), "there is no solver 'autoo'"),
    "time-zero": ((*PLAN, "--time-limit", "0"), "time_s=0.0"),
    "gap-above-one": ((*PLAN, "--gap", "2"), "gap=2.0"),
    "threads-zero": ((*PLAN, "--threads", "0"), "threads=0"),
    "recompute-unknown": ((*PLAN, "--recompute", "some"), "some"),
    "out-in-no-folder": ((*PLAN, "--out", "none/p.json"), "cannot write none/p.json"),
    "truncated": (("plan", "truncated.json", "--budget", "1MiB"), "truncated.json: not a Checkmate file, or cut short"),
    "foreign": (("plan", "foreign.json", "--budget", "1MiB"), "not a Checkmate file"),
    "newer": (("plan", "newer.json", "--budget", "1MiB"), "checkmate.graph/9"),
    "plan-for-a-graph": (("verify", "chain.graph.json", "chain.graph.json"), "has no plan"),
    "graph-for-a-plan": (("plan", "plan.json", "--budget", "1MiB"), "holds a plan, not a graph"),
    "capture-without-function": (("capture", "model.py"), "cannot read 'model.py'"),
    "capture-no-such-file": (("capture", "none.py:build"), "none.py: no such file"),
    "capture-no-such-module": (("capture", "no.such.module:build"), "ModuleNotFoundError"),
    "capture-no-such-function": (("capture", "model.py:biuld"), "has no function 'biuld'"),
    "run-no-such-script": (("run", "none.py", "--budget", "50%"), "none.py: no such file"),
    "run-budget-a-half": (("run", "model.py", "--budget", "0.5"), "'0.5' means 0 bytes"),
    "capture-raises": (("capture", "model.py:broken"), "raised KeyError at"),
    "capture-wrong-shape": (("capture", "model.py:two"), "returned a tuple of 2"),
    "plan-without-budget": (("plan", "chain.graph.json"), "--budget is missing, such as --budget 50%"),
    "fits-without-device": (("fits", "model.py:two"), "--device is missing, such as --device H100"),
    "plan-without-graph": (("plan",), "GRAPH is missing"),
    "capture-batch-not-taken": (("capture", "model.py:two", "--batch", "3"), "two(), which takes no batch size"),
    "min-budget-time": (("min-budget", "chain.graph.json", "--time-limit", "-1"), "time_s=-1.0"),
    "min-budget-no-graph": (("min-budget", "plan.json"), "holds a plan, not a graph"),
    "pareto-one-point": (("pareto", "chain.graph.json", "--points", "1"), "points=1"),
    "pareto-solver": (("pareto", "chain.graph.json", "--solver", "gurobi"), "there is no solver 'gurobi'"),
    "batch-overhead": ((*BATCH, "--max-overhead", "lots"), "lots"),
    "batch-overhead-below-one": ((*BATCH, "--max-overhead", "0.5"), "max_overhead=0.5"),
    "batch-not-a-number": ((*BATCH, "--max-overhead", "nan"), "max_overhead=nan"),
    "batch-zero": (("max-batch", "chain.graph.json", "--budget", "20MiB", "--batch", "0"), "Must be >= 1"),
    "batch-share": (("max-batch", "chain.graph.json", "--budget", "50%", "--batch", "1"), "50%"),
    "batch-one-of-two": ((*BATCH, "--large-batch", "2"), "go together"),
    "batch-not-ascending": (("max-batch", *TWICE, "--batch", "2", "--large-batch", "2", "--budget", "1GiB"), "ascending"),
    "batch-other-graph": (("max-batch", *OTHERS, "--batch", "1", "--large-batch", "2", "--budget", "1GiB"), "12 and 1 ops"),
    "explain-no-line": (("explain", "chain.graph.json", "plan.json", "--most", "0"), "Must be >= 1"),
    "explain-no-curve": (("explain", "chain.graph.json", "plan.json", "--curve", "plan.json"), "holds a plan, not a curve"),
    "explain-other-graph": (("explain", "other.graph.json", "made.plan.json"), "made for another graph"),
    "explain-broken-plan": (("explain", "chain.graph.json", "broken.plan.json"), "is not live"),
    "diff-other-graph": (("diff", "other.graph.json", "made.plan.json", "made.plan.json"), "made for another graph"),
    "diff-one-plan": (("diff", "chain.graph.json", "plan.json"), "SECOND"),
    "report-name-too-long": (("report", "x" * 300, "made.plan.json"), "File name too long"),
    "report-out-too-long": (("report", "chain.graph.json", "made.plan.json", "--out", "x" * 300), "File name too long"),
    "report-other-graph": (("report", "other.graph.json", "made.plan.json"), "made for another graph"),
    "report-other-curve": (("report", "chain.graph.json", "made.plan.json", "--curve", "other.curve.json"), "another graph"),
    "report-in-no-folder": (("report", "chain.graph.json", "made.plan.json", "--out", "none/r.html"), "cannot write none/r.html"),
    "report-budget": (("report", "chain.graph.json", "made.plan.json", "--budget", "lots"), "cannot read 'lots'"),
    "regions-no-modules": (("regions", "layers.graph.json", "--budget", "280B", "--modules", "x"), "no module matches x"),
    "regions-save": (("regions", "chain.graph.json", "--budget", "5MiB", "--save", "some"), "some"),
    "regions-other-plan": (("regions", "other.graph.json", "made.plan.json", "--budget", "5MiB"), "made for another graph"),
    "oom-no-file": (("oom", "none.pickle"), "none.pickle: No such file"),
    "oom-folder": (("oom", "."), "directory"),
    "oom-runs-code": (("oom", "hostile.pickle"), "hostile.pickle: the pickle is not read: it names posix.system"),
    "oom-other-pickle": (("oom", "list.pickle"), "list.pickle: not a memory snapshot"),
    "oom-no-error": (("oom", "foreign.json"), "no out-of-memory error of PyTorch"),
    "oom-device": (("oom", "snapshot.pickle", "--device", "3"), "nothing of device 3"),
    "oom-limit": (("oom", "snapshot.pickle", "--limit", "1KiB"), "larger than 1.00 KiB"),
    "oom-no-line": (("oom", "snapshot.pickle", "--most", "0"), "Must be >= 1"),
    "devices-unknown": (("devices", "H1OO"), "the nearest known one is 'H100'"),
    "devices-no-profile": (("devices", "foreign.json"), "foreign.json: not a device profile"),
    "devices-no-file": (("devices", "none.json"), "none.json: No such file"),
    "fits-no-device": (("fits", "model.py:two"), "--device"),
    "fits-device-unknown": (("fits", "model.py:two", "--device", "RTX 409"), "the nearest known one is 'RTX 4090'"),
    "fits-without-function": (("fits", "model.py", "--device", "H100"), "cannot read 'model.py'"),
    "fits-wrong-shape": (("fits", "model.py:two", "--device", "H100"), "returned a tuple of 2"),
    "fits-raises": (("fits", "model.py:broken", "--device", "H100"), "raised KeyError at"),
    "fits-optimizer": (("fits", "model.py:linear", "--device", "H100", "--optimizer", "adamx"), "no optimizer 'adamx'"),
    "fits-autocast": (("fits", "model.py:linear", "--device", "H100", "--autocast", "float64"), "float64"),
    "fits-memory": (("fits", "model.py:linear", "--device", "H100", "--memory", "lots"), "cannot read 'lots'"),
    "fits-no-sample": (("fits", "model.py:samples", "--device", "H100", "--batch", "0"), "example has no sample: 2 arguments"),
    "fits-no-memory": (("fits", "model.py:linear", "--device", "H100", "--memory", "1MiB"), "leave nothing"),
    "fits-headroom": (("fits", "model.py:linear", "--device", "H100", "--headroom", "2"), "headroom=2.0"),
    "completion-shell": (("completion", "tcsh"), "tcsh"),
    "solvers-too-much": (("solvers", "auto"), "auto"),
    "demo-out-is-a-file": (("demo", "--out", "chain.graph.json/there"), "cannot create chain.graph.json"),
}


@pytest.fixture
def files(tmp_path):
    (tmp_path / "truncated.json").write_text('{"format": "checkmate.graph/1", "ops": [')
    (tmp_path / "hostile.pickle").write_bytes(b"\x80\x02cposix\nsystem\nX\x05\x00\x00\x00sleep\x85R.")
    (tmp_path / "infinite.log").write_text("CUDA out of memory. Tried to allocate 1e308 GiB. GPU 0 has")
    (tmp_path / "list.pickle").write_bytes(pickle.dumps([1, 2]))
    failed_run().dump(tmp_path / "snapshot.pickle")
    checkmate.write(network(4), tmp_path / "layers.graph.json")
    (tmp_path / "foreign.json").write_text('{"nodes": 3}')
    (tmp_path / "newer.json").write_text('{"format": "checkmate.graph/9"}')
    (tmp_path / "plan.json").write_text('{"format": "checkmate.plan/1", "steps": []}')
    other = checkmate.Graph.from_dag(cost=[1], size_bytes=[1], edges=[])
    checkmate.write(other, tmp_path / "other.graph.json")
    checkmate.write(checkmate.pareto(other), tmp_path / "other.curve.json")
    checkmate.write(plan(AGAIN), tmp_path / "made.plan.json")
    checkmate.write(checkmate.Plan(plan(AGAIN).steps[1:]), tmp_path / "broken.plan.json")
    model = "def two():\n    return 1, 2\n\n\ndef broken():\n    return {}['weights']\n\n\ndef linear():\n    import torch\n\n"
    model += "    return torch.nn.Linear(2, 2), torch.nn.MSELoss(), (torch.ones(2, 2), torch.ones(2, 2))\n\n\n"
    model += "def samples(n):\n    model, loss, (x, y) = linear()\n    return model, loss, (x[:n], y[:n])\n"
    (tmp_path / "model.py").write_text(model)


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_said_in_words(run, files, tmp_path, case):
    """What was wrong is named, and what to do about it."""
    words, named = CASES[case]
    outcome = run(*words)
    assert outcome.code == 2, outcome
    assert outcome.err.startswith("error: ")
    assert named in outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.out == ""
    assert not any(path.name.startswith(".") or path.suffix == ".html" for path in tmp_path.iterdir())


@pytest.mark.parametrize("case", ["no-such-graph", "budget-unreadable", "solver-unknown"])
def test_bad_input_in_json_is_one_object(run, files, case):
    """A script reads the same on stdout."""
    words, named = CASES[case]
    outcome = run(*words, "--json")
    assert outcome.code == 2
    assert named in outcome.json["message"]
    assert set(outcome.json) == {"error", "message", "hint"}


def test_near_names_are_offered(run):
    """A misspelt solver gets the nearest."""
    assert "did you mean 'local-search'" in run(*PLAN, "--solver", "local-serch").err


@pytest.mark.parametrize(("module", "words", "extra"), [
    ("cyclopts", ("solvers",), "cli"),
    ("rich", ("solvers",), "cli"),
    ("torch", ("capture", "model.py:two"), "torch"),
    ("sklearn", ("demo",), "demo"),
])  # fmt: skip
def test_missing_extra_says_what_to_install(tmp_path, module, words, extra):
    """Exit code 2 and the command that installs it; a fresh process, for what is loaded stays loaded."""
    (tmp_path / "model.py").write_text("def two():\n    return 1, 2\n")
    code = f"import sys; sys.modules[{module!r}] = None; from checkmate.cli import main; sys.exit(main({list(words)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert module in done.stderr
    assert f'pip install "checkmate-remat[{extra}]"' in done.stderr
    assert "Traceback" not in done.stderr
