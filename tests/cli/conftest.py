"""Run one command line in an empty folder that holds a small graph."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import checkmate
from checkmate.cli import main
from tests.plot.graphs import chain


@pytest.fixture
def use(monkeypatch) -> Callable[[object], None]:
    """Let every verb search with a solver of the test."""

    def replaced(solver: object) -> None:
        for place in ("options", "studies"):
            monkeypatch.setattr(f"checkmate.cli.{place}.by_name", lambda _name: solver)

    return replaced


GOLDEN = Path(__file__).parent / "golden"


class Outcome(NamedTuple):
    """What one command line did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


@pytest.fixture
def run(inside, environ, capsys) -> Callable[..., Outcome]:
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "TERM"):
        environ.pop(name, None)
    checkmate.write(chain(), inside / "chain.graph.json")

    def run(*words: str) -> Outcome:
        code = main(list(words))
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def golden(request) -> Callable[[str, str], None]:
    """Compare with a file, the times in it replaced; `--regen` writes it anew."""

    def compare(name: str, text: str) -> None:
        text = re.sub(r"\d+\.\d s\b", "0.0 s", "".join(f"{line.rstrip()}\n" for line in text.splitlines()))
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--regen"):
            path.write_text(text)
        assert text == path.read_text()

    return compare
