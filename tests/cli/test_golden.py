"""What the verbs print, to the letter; `pytest tests/cli --regen` writes it anew."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.metadata import EntryPoint

import pytest

import checkmate
from checkmate.solvers.registry import GROUP
from tests.cli.test_capture import MODEL
from tests.oom.recording import failed_run
from tests.oom.test_answer import NEW
from tests.plot.graphs import AGAIN, KEEP_ALL, plan
from tests.regions.test_regions import network


def both(outcome):
    return f"{outcome.out}--- stderr\n{outcome.err}--- exit code {outcome.code}\n"


VERBS = ("demo", "capture", "plan", "verify", "min-budget", "pareto", "max-batch", "explain", "diff", "report", "solvers")
VERBS += ("completion", "fits", "devices", "oom", "regions", "doctor", "run")


@pytest.fixture
def planned(run, tmp_path):
    """Two plans beside the graph: one keeps everything, one computes three ops again."""
    checkmate.write(plan(KEEP_ALL), tmp_path / "all.plan.json")
    checkmate.write(plan(AGAIN), tmp_path / "again.plan.json")
    failed_run().dump(tmp_path / "snapshot.pickle")
    checkmate.write(network(4), tmp_path / "layers.graph.json")


@pytest.mark.parametrize("words", [(), *((verb,) for verb in VERBS)], ids=lambda words: "-".join(words) or "checkmate")
def test_help(run, golden, words):
    """The help is made from docstrings: it must read as help."""
    golden(f"help-{'-'.join(words) or 'checkmate'}", both(run(*words, "--help")))


def test_plan(run, golden):
    """The shape of all output: facts, a table, a conclusion, what was written and what to try next."""
    golden("plan", both(run("plan", "chain.graph.json", "--budget", "5.5MiB")))


def test_plan_that_keeps_all(run, golden):
    """Nothing is recomputed where everything fits."""
    golden("plan-keep-all", both(run("plan", "chain.graph.json", "--budget", "1GiB", "--out", "all.plan.json")))


def test_verify(run, golden):
    """A plan that holds says so, with its peak and its cost."""
    run("plan", "chain.graph.json", "--budget", "5.5MiB", "--out", "p.json")
    golden("verify", both(run("verify", "chain.graph.json", "p.json", "--budget", "5.5MiB")))


def test_verify_over_budget(run, golden):
    """A plan that does not hold says where and why."""
    run("plan", "chain.graph.json", "--budget", "1GiB", "--out", "p.json")
    golden("verify-over-budget", both(run("verify", "chain.graph.json", "p.json", "--budget", "5.5MiB")))


def test_infeasible(run, golden):
    """A budget that nothing can keep: what would be enough, and which op binds."""
    golden("infeasible", both(run("plan", "chain.graph.json", "--budget", "2MiB")))


def test_capture(run, golden, tmp_path):
    """What the graph holds, and what keeping everything takes. The digest depends on how PyTorch traces."""
    (tmp_path / "tiny.py").write_text(MODEL)
    said = both(run("capture", "tiny.py:build", "--batch", "4"))
    golden("capture", re.sub(r"sha256 \w+|[\d.]+ (µs|ms|ns)\b", "...", said))


def test_min_budget(run, golden):
    """The smallest peak found, the floor, and what sets it."""
    golden("min-budget", both(run("min-budget", "chain.graph.json")))


def test_pareto(run, golden):
    """A point a line, with what is proven of it."""
    golden("pareto", both(run("pareto", "chain.graph.json", "--points", "4")))


def test_max_batch(run, golden):
    """The largest batch, and why no larger one fits; how far the last bound got depends on the time."""
    said = both(run("max-batch", "chain.graph.json", "--batch", "1", "--budget", "20MiB"))
    golden("max-batch", re.sub(r"overhead of [\d.]+", "overhead of ...", said))


def test_explain(run, golden, planned):
    """What is held at the peak sums to the peak."""
    golden("explain", both(run("explain", "chain.graph.json", "again.plan.json", "--most", "4")))


def test_diff(run, golden, planned):
    """What one plan computes more often, and what the other holds instead."""
    golden("diff", both(run("diff", "chain.graph.json", "all.plan.json", "again.plan.json")))


def test_report(run, golden, planned):
    """What was written, and how large it is."""
    said = both(run("report", "chain.graph.json", "again.plan.json", "--perfetto", "t.json"))
    golden("report", re.sub(r"[\d.]+ KiB", "... KiB", said))


def test_oom(run, golden, tmp_path):
    """What filled the memory, why the allocation failed, and the line to add."""
    failed_run().dump(tmp_path / "snapshot.pickle")
    golden("oom", both(run("oom", "snapshot.pickle")))


def test_oom_of_a_log(run, golden, tmp_path):
    """The figures of the last error in the output of a run."""
    (tmp_path / "train.log").write_text(f"step 17 loss 2.31\ntorch.OutOfMemoryError: {NEW}\n")
    golden("oom-log", both(run("oom", "train.log")))


def test_regions(run, golden, tmp_path):
    """Which modules to checkpoint, what they save, and what that costs beside a plan."""
    checkmate.write(network(4), tmp_path / "layers.graph.json")
    words = ("--budget", "280B", "--save", "modules", "--time-limit", "4", "--out", "p.json")
    golden("regions", both(run("regions", "layers.graph.json", *words)))


def test_solvers(run, golden, plugged_in):
    """A line of words and the options of each; other packages' solvers are not in this list."""
    solvers = {"auto": "auto:Auto", "keep-all": "baselines.keep_all:KeepAll"}
    plugged_in(*(EntryPoint(name, f"checkmate.solvers.{place}", GROUP) for name, place in solvers.items()))
    golden("solvers", both(run("solvers")))


def test_devices(run, golden):
    """A line a device; what a dash stands for is computed as float32."""
    golden("devices", both(run("devices")))


def test_device(run, golden):
    """Every figure, and where it is from."""
    golden("device", both(run("devices", "rtx-4090")))


def test_fits(run, golden, tmp_path):
    """Whether it fits, why, and what is not known; how far the largest batch got depends on the time."""
    (tmp_path / "tiny.py").write_text(MODEL)
    said = both(
        run("fits", "tiny.py:build", "--device", "H100", "--optimizer", "adamw", "--time-limit", "0.1", "--out", "g.json")
    )
    golden("fits", re.sub(r"\d+ B|[\d.]+ (µs|ms|ns|KiB)\b", "...", said))


def test_fits_not(run, golden, tmp_path):
    """Exit code 1 where it does not fit, with what it would take."""
    (tmp_path / "tiny.py").write_text(MODEL)
    said = both(run("fits", "tiny.py:build", "--device", "T4", "--memory", "515MiB", "--headroom", "0", "--time-limit", "0.1"))
    golden("fits-not", re.sub(r"\d+ B|[\d.]+ (µs|ms|ns|KiB)\b", "...", said))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_verb(run, shell):
    """The script is cyclopts' own; a shell that gets it completes what there is."""
    outcome = run("completion", shell)
    assert outcome.code == 0
    assert all(verb in outcome.out for verb in VERBS)
    assert "hint: write the script to" in outcome.err


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_accepts_the_completion_script(run, tmp_path):
    """Sourced and asked for what begins with `ver`, bash offers `verify`."""
    (tmp_path / "script").write_text(run("completion", "bash").out)
    words = "COMP_WORDS=(checkmate ver); COMP_CWORD=1; COMP_LINE='checkmate ver'; COMP_POINT=13; _checkmate; echo ${COMPREPLY[@]}"
    done = subprocess.run(["bash", "-c", f". ./script; {words}"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "verify" in done.stdout.split()


EVERY = [
    ("plan", "chain.graph.json", "--budget", "5.5MiB"),
    ("verify", "chain.graph.json", "again.plan.json"),
    ("min-budget", "chain.graph.json"),
    ("pareto", "chain.graph.json", "--points", "3"),
    ("max-batch", "chain.graph.json", "--batch", "1", "--budget", "20MiB"),
    ("explain", "chain.graph.json", "again.plan.json"),
    ("diff", "chain.graph.json", "all.plan.json", "again.plan.json"),
    ("report", "chain.graph.json", "again.plan.json"),
    ("oom", "snapshot.pickle"),
    ("regions", "layers.graph.json", "--budget", "280B", "--time-limit", "2"),
    ("solvers",),
    ("devices",),
    ("completion", "bash"),
]


@pytest.mark.parametrize("words", EVERY, ids=lambda words: "-".join(words[:2]))
def test_json_is_one_object_and_nothing_else(run, planned, words):
    """A script reads stdout whole; talk is for people and stays out of it."""
    outcome = run(*words, "--json")
    assert outcome.code == 0, outcome
    assert isinstance(outcome.json, dict)
    assert outcome.err == ""


@pytest.mark.parametrize("words", EVERY[:-1], ids=lambda words: "-".join(words[:2]))
def test_output_fits_80_columns_and_has_no_colour(run, planned, words):
    """In a pipe nobody wraps lines or reads escapes; only lines of words may be longer."""
    out = run(*words).out
    assert "\x1b" not in out
    tables = [line for line in out.splitlines() if "  " in line.strip() and "`" not in line]
    assert all(len(line) <= 80 for line in tables), tables


def test_progress_is_drawn_on_stderr_of_a_terminal_only(run, environ):
    """It never gets into the data, and with NO_COLOR nothing is coloured."""
    environ.update(FORCE_COLOR="1", NO_COLOR="1", TERM="xterm-256color")  # rich takes the first for a terminal
    outcome = run("plan", "chain.graph.json", "--budget", "5.5MiB")
    assert re.search(r"looking for a plan|best 20.0 ms", outcome.err)
    assert "looking for" not in outcome.out
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", outcome.out + outcome.err)
