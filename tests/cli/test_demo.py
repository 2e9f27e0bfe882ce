"""The demo keeps its promises, and does not claim what did not happen."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ET

import pytest
import torch

from checkmate import Graph, Plan
from checkmate.cli import demo, digits


@pytest.fixture(scope="module")
def small():
    """A smaller network for fewer steps, with the same checks."""
    patch = pytest.MonkeyPatch()
    for name, value in {"BATCH": 64, "EPOCHS": 1, "WIDTH": 8, "BLOCKS": 3}.items():
        patch.setattr(digits, name, value)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def trained(small):
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    outcome = digits.train("60%", epochs=1, time_limit_s=5.0, say=lambda _: None)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    return outcome


def test_every_promise_is_kept(trained):
    """Peak within the budget and as planned; losses and parameters the same to the last bit."""
    assert demo._checks(trained) == {"within_budget": True, "as_planned": True, "identical": True}
    assert trained.planned.result.peak_bytes < trained.keep_all.result.peak_bytes
    assert len(trained.planned.losses) == trained.steps


def test_one_bit_of_difference_is_seen(trained):
    """A demo that cannot fail shows nothing."""
    changed = dataclasses.replace(
        trained.planned, losses=[*trained.planned.losses[:-1], trained.planned.losses[-1] * (1 + 2**-23)]
    )
    assert not demo._checks(dataclasses.replace(trained, planned=changed))["identical"]


def test_a_byte_over_the_budget_and_a_wrong_peak_are_seen(trained):
    """Both sides of the memory promise are checked by themselves."""
    over = dataclasses.replace(trained.planned, measured_bytes=trained.planned.result.budget_bytes + 1)
    assert not demo._checks(dataclasses.replace(trained, planned=over))["within_budget"]
    below = dataclasses.replace(trained.planned, measured_bytes=int(trained.planned.result.peak_bytes * 0.98))
    assert not demo._checks(dataclasses.replace(trained, planned=below))["as_planned"]


def test_demo_prints_the_table_and_writes_one_offline_file(run, small, trained, monkeypatch):
    """The page loads nothing, and its figures are well-formed."""
    monkeypatch.setattr(digits, "train", lambda *_args, **_options: trained)
    outcome = run("demo", "--out", "there/it/is")
    assert outcome.code == 0, outcome
    assert re.search(r"^loss identical: yes", outcome.out, re.MULTILINE)
    assert all(len(line) <= 80 for line in outcome.out.splitlines() if line.startswith(("keep-all", "plan", "training")))
    from pathlib import Path

    page = Path("there/it/is/report.html").read_text()
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"(?!data:)", page)
    for figure in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(figure)
    assert "prefers-color-scheme: dark" in page


def test_the_report_is_of_the_planned_graph_alone(run, small, trained, monkeypatch):
    """Where ops run in pieces, or are measured again, the training that keeps everything has another graph."""
    other = Graph.from_dag(cost=[1], size_bytes=[1], edges=[])
    keep_all = dataclasses.replace(trained.keep_all, graph=other, plan=Plan.from_order(other, [0]))
    monkeypatch.setattr(digits, "train", lambda *_args, **_options: dataclasses.replace(trained, keep_all=keep_all))
    outcome = run("demo")
    assert outcome.code == 0, outcome


def test_demo_in_json_exits_1_if_a_promise_is_broken(run, small, trained, monkeypatch):
    """The exit code is for scripts."""
    over = dataclasses.replace(trained.planned, measured_bytes=trained.planned.result.budget_bytes + 1)
    monkeypatch.setattr(digits, "train", lambda *_args, **_options: dataclasses.replace(trained, planned=over))
    outcome = run("demo", "--json")
    assert outcome.code == 1
    assert outcome.json["holds"] is False
    assert outcome.json["within_budget"] is False
    assert outcome.json["identical"] is True
