"""Time limits hold when the time of day is set while a solver runs."""

from __future__ import annotations

import ast
import itertools
import time
from pathlib import Path

import pytest

import checkmate
from checkmate import Limits, Problem, solve
from tests.solvers.generators import transformer


def test_no_clock_that_can_be_set_is_read():
    """`time.time` and `datetime.now` jump with the time of day; `time.monotonic` and `time.perf_counter` do not."""
    for path in Path(checkmate.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) not in ("time.time", "time.time_ns", "datetime.now", "datetime.datetime.now"), (
                    f"{path.name}:{node.lineno}"
                )


@pytest.mark.parametrize("step_s", [-3600, 3600])
def test_a_limit_holds_when_the_clock_is_set(monkeypatch, step_s):
    """Neither an hour more nor none at all: the time of day jumps at every look at it."""
    day = itertools.count(10**9, step_s)
    monkeypatch.setattr(time, "time", lambda: next(day))
    result = solve(Problem(transformer(2), "40%"), limits=Limits(time_s=2.0, gap=0.0))
    assert result.elapsed_s < 20
    assert result.plan is not None
