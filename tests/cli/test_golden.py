"""What the verbs print, to the letter; `pytest tests/cli --regen` writes it anew."""

from __future__ import annotations

import re

import pytest


def both(outcome):
    return f"{outcome.out}--- stderr\n{outcome.err}--- exit code {outcome.code}\n"


VERBS = ("demo", "capture", "plan", "verify", "solvers")


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


@pytest.mark.parametrize("words", [("plan", "chain.graph.json", "--budget", "5.5MiB"), ("solvers",)], ids=lambda words: words[0])
def test_output_fits_80_columns_and_has_no_colour(run, words):
    """In a pipe nobody wraps lines or reads escapes; only lines of words may be longer."""
    out = run(*words).out
    assert "\x1b" not in out
    assert all(len(line) <= 80 for line in out.splitlines() if "  " in line.strip())


def test_progress_is_drawn_on_stderr_of_a_terminal_only(run, monkeypatch):
    """It never gets into the data, and with NO_COLOR nothing is coloured."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes this for a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    outcome = run("plan", "chain.graph.json", "--budget", "5.5MiB")
    assert re.search(r"looking for a plan|best 20.0 ms", outcome.err)
    assert "looking for" not in outcome.out
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", outcome.out + outcome.err)
