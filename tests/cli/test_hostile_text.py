"""Text of files reaches the terminal without control characters, and forges no line of output."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import msgspec
import pytest

import checkmate
from checkmate.core.errors import printable, printable_lines
from tests.cli.test_capture import MODEL
from tests.plot.graphs import AGAIN, KEEP_ALL, chain

BAD = "\x1b]0;title\x07\x1b[2J\nFORGED line\r\x9b31m\u202e\u2028"
BAD_PATH = os.fsdecode(b"a\x1b]0;title\x07\nFORGED\xff.json")


def hostile() -> checkmate.Graph:
    """The chain with a hostile text in every field that takes one."""
    graph = chain()
    ops = [msgspec.structs.replace(op, name=f"{BAD}{o}", kind=BAD, source=BAD) for o, op in enumerate(graph.ops)]
    values = [msgspec.structs.replace(value, name=f"{BAD}{v}") for v, value in enumerate(graph.values)]
    return msgspec.structs.replace(graph, ops=tuple(ops), values=tuple(values), name=BAD, cost_unit=BAD)


def check(outcome) -> None:
    for text in (outcome.out, outcome.err):
        for line in text.split("\n"):
            assert line.isprintable(), ascii(line)
            assert not line.startswith("FORGED"), ascii(line)


CASES = {
    "verify": (("verify", "bad.json", "again.json", "--budget", "5MiB"), 1),
    "verify-broken": (("verify", "bad.json", "broken.json"), 1),
    "verify-digest": (("verify", "bad.json", "digest.json"), 1),
    "explain": (("explain", "bad.json", "again.json"), 0),
    "explain-curve": (("explain", "bad.json", "again.json", "--curve", "curve.json"), 0),
    "explain-broken": (("explain", "bad.json", "broken.json"), 2),
    "explain-digest": (("explain", "bad.json", "digest.json"), 2),
    "diff": (("diff", "bad.json", "all.json", "again.json"), 0),
    "plan": (("plan", "bad.json", "--budget", "5.5MiB"), 0),
    "plan-infeasible": (("plan", "bad.json", "--budget", "2MiB"), 1),
    "min-budget": (("min-budget", "bad.json"), 0),
    "pareto": (("pareto", "bad.json", "--points", "2"), 0),
    "max-batch": (("max-batch", "bad.json", "--batch", "1", "--budget", "20MiB"), 0),
    "report": (("report", "bad.json", "again.json"), 0),
    "graph-error": (("plan", "views.json", "--budget", "1MiB"), 2),
    "format": (("plan", "format.json", "--budget", "1MiB"), 2),
    "path": (("verify", BAD_PATH, "again.json"), 0),
    "path-missing": (("verify", "none" + BAD_PATH, "again.json"), 2),
    "path-out": (("plan", "bad.json", "--budget", "5.5MiB", "--out", "new" + BAD_PATH), 0),
    "path-report": (("report", "bad.json", "again.json", "--out", "new" + BAD_PATH), 0),
    "path-title": (("report", "bad.json", "p" + BAD_PATH), 0),
    "device": (("devices", "device.json"), 0),
    "device-error": (("devices", "bad.json"), 2),
    "device-fits": (("fits", "model.py:build", "--device", "device.json", "--time-limit", "0.1"), None),
    "device-name": (("devices", BAD), 2),
    "option": (("plan", BAD, "--budget", BAD, f"--{BAD}"), 2),
    "solver": (("plan", "bad.json", "--budget", "5MiB", "--solver", BAD), 2),
    "function": (("capture", f"model.py:{BAD}"), 2),
    "raises": (("capture", "model.py:hostile"), 2),
}  # fmt: skip


@pytest.fixture(scope="module")
def curve() -> checkmate.Curve:
    return checkmate.pareto(hostile(), points=2)


@pytest.mark.parametrize("case", CASES)
def test_no_control_character_reaches_the_terminal(run, curve, case):
    """Neither from a name, nor a path, nor a message; the same in JSON."""
    graph = hostile()
    checkmate.write(graph, "bad.json")
    checkmate.write(graph, BAD_PATH)
    for name, order in (("all", KEEP_ALL), ("again", AGAIN)):
        checkmate.write(checkmate.Plan.from_order(graph, order), f"{name}.json")
    again = checkmate.Plan.from_order(graph, AGAIN)
    checkmate.write(again, "p" + BAD_PATH)
    checkmate.write(checkmate.Plan(again.steps[1:], again.graph_digest), "broken.json")
    checkmate.write(checkmate.Plan(again.steps, BAD), "digest.json")
    checkmate.write(msgspec.structs.replace(curve, cost_unit=BAD, solver=BAD), "curve.json")
    document = json.loads(Path("bad.json").read_text())
    document["values"][0]["base"] = 1
    Path("views.json").write_text(json.dumps(document))
    Path("format.json").write_text(json.dumps({"format": BAD}))
    Path("model.py").write_text(MODEL + f"\n\ndef hostile():\n    raise ValueError({BAD!r})\n")
    device = json.loads(run("devices", "H100", "--json").out)
    device |= {"name": BAD, "about": BAD, "sources": {BAD: BAD}, "assumed": {"launch_ns": BAD}}
    Path("device.json").write_text(json.dumps(device))
    words, code = CASES[case]
    for more in ((), ("--json",)):
        outcome = run(*words, *more)
        assert code in (None, outcome.code), outcome
        check(outcome)
    sys.modules.pop("model", None)


def test_a_message_of_an_error_is_safe_in_a_traceback(run):
    """A Python program prints it without the command line; its own lines stay lines."""
    with pytest.raises(checkmate.WrongGraphError) as caught:
        checkmate.simulate(hostile(), checkmate.Plan((), BAD))
    assert printable_lines(str(caught.value)) == str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert "\nhint: " in str(checkmate.OptionError("a", hint="b"))


def test_what_explains_a_plan_is_safe_to_print():
    """`print(explain(...))` in a notebook of somebody else's graph."""
    graph = hostile()
    found = checkmate.explain(graph, checkmate.Plan.from_order(graph, AGAIN))
    assert not any("FORGED" in line[:6] or not line.isprintable() for line in str(found).split("\n"))


@pytest.mark.parametrize(("text", "shown"), [
    ("conv1.weight [µ] 层", "conv1.weight [µ] 层"),
    ("a\tb\x00", r"a\tb\x00"),
    ("\x1b[31m", r"\x1b[31m"),
    ("\x9b31m", r"\x9b31m"),
    ("a\u202eb\u2028", r"a\u202eb\u2028"),
    (os.fsdecode(b"\xff"), r"\udcff"),
])  # fmt: skip
def test_escapes_are_those_of_python(text, shown):
    """Letters of any script stay; what is escaped can be read."""
    assert printable(text) == shown
