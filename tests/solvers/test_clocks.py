"""Time limits hold when the time of day is set while a solver runs."""

from __future__ import annotations

import ast
from pathlib import Path

import checkmate


def test_no_clock_that_can_be_set_is_read():
    """`time.time` and `datetime.now` jump with the time of day; `time.monotonic` and `time.perf_counter` do not."""
    for path in Path(checkmate.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) not in ("time.time", "time.time_ns", "datetime.now", "datetime.datetime.now"), (
                    f"{path.name}:{node.lineno}"
                )
