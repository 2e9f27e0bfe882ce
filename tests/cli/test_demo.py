"""The demo keeps its promises, and does not claim what did not happen."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from checkmate.cli import demo
from checkmate.doctor import digits


@pytest.fixture(scope="module")
def trained():
    """A smaller network for fewer steps, with the same checks."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    outcome = digits.train("60%", time_limit_s=1.0, say=lambda _: None, model=digits.network(8, 3), epochs=1)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    return outcome


@pytest.fixture
def training(monkeypatch):
    """Let the demo end as a training that has been run."""
    return lambda outcome: monkeypatch.setattr(digits, "train", lambda *_args, **_options: outcome)


CHECKS = ("within_budget", "as_planned", "identical")


def test_every_promise_is_kept(trained):
    """Peak within the budget and as planned; losses and parameters the same to the last bit."""
    outcome = demo.outcome_of(trained)
    assert outcome["holds"] and all(outcome[name] for name in CHECKS)
    assert trained.planned.result.peak_bytes < trained.keep_all.result.peak_bytes
    assert len(trained.planned.losses) == len(trained.keep_all.losses) == outcome["steps"]


def test_each_broken_promise_is_seen(trained):
    """A demo that cannot fail shows nothing: other bits, a byte over the budget, another peak than planned."""
    planned = trained.planned
    for name, changed in {
        "identical": dataclasses.replace(planned, state=(planned.state[0] + 1, *planned.state[1:])),
        "within_budget": dataclasses.replace(planned, peak_bytes=planned.result.budget_bytes + 1),
        "as_planned": dataclasses.replace(planned, peak_bytes=int(planned.result.peak_bytes * 0.98)),
    }.items():
        outcome = demo.outcome_of(dataclasses.replace(trained, planned=changed))
        assert not outcome["holds"] and not outcome[name]


def test_demo_prints_the_table_and_writes_one_offline_file(run, training, trained):
    """The page loads nothing, and its figures are well-formed."""
    training(trained)
    outcome = run("demo", "--out", "there/it/is")
    assert outcome.code == 0, outcome
    assert re.search(r"^yes  losses and parameters bitwise equal", outcome.out, re.MULTILINE)
    measured_ns = 1e9 * sum(trained.planned.seconds) / len(trained.planned.seconds)
    beside = f"op costs sum to {trained.planned.result.cost / measured_ns:.2f} of the measured "
    assert beside in outcome.out  # a bound on the costs is worth as much as the costs are
    assert all(len(line) <= 80 for line in outcome.out.splitlines() if line.startswith(("keep-all", "plan", "training")))
    page = Path("there/it/is/report.html").read_text()
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"(?!data:)", page)
    assert "prefers-color-scheme: dark" in page


def test_demo_in_json_exits_1_if_a_promise_is_broken(run, training, trained):
    """The exit code is for scripts."""
    over = dataclasses.replace(trained.planned, peak_bytes=trained.planned.result.budget_bytes + 1)
    training(dataclasses.replace(trained, planned=over))
    outcome = run("demo", "--json")
    assert outcome.code == 1
    assert outcome.json["holds"] is False
    assert outcome.json["within_budget"] is False
    assert outcome.json["identical"] is True
