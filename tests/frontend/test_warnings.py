"""Warnings reach a user who configured no logging, and follow the configuration of one who did."""

from __future__ import annotations

import subprocess
import sys

import pytest

SAY = "log = logging.getLogger('checkmate.torch'); log.warning('over by %d', 3); log.warning('over by %d', 3); log.info('quiet')"


def stderr_of(*lines: str) -> str:
    code = "\n".join(["import logging, sys", *lines])
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True).stderr


def test_a_warning_is_printed_once_without_configuration() -> None:
    """Most training scripts configure no logging; a step's warning would come again with every step."""
    assert stderr_of("import checkmate", SAY) == "checkmate: warning: over by 3\n"


@pytest.mark.parametrize(
    ("configure", "printed"),
    [
        ("logging.basicConfig(format='ROOT %(message)s')", "ROOT over by 3\nROOT over by 3\n"),
        ("logging.getLogger('checkmate').addHandler(logging.StreamHandler())", "over by 3\nover by 3\n"),
        ("logging.getLogger('checkmate.torch').addHandler(logging.StreamHandler())", "over by 3\nover by 3\n"),
        ("logging.getLogger('checkmate').addHandler(logging.NullHandler())", ""),
        ("logging.getLogger('checkmate').setLevel(logging.ERROR)", ""),
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["before_import", "after_import"])
def test_configured_logging_decides(configure: str, printed: str, first: bool) -> None:
    """Where a program has said what becomes of records, nothing is printed beside it."""
    lines = [configure, "import checkmate"] if first else ["import checkmate", configure]
    assert stderr_of(*lines, SAY) == printed


def test_another_text_is_printed_too() -> None:
    """Only a repetition is left out: a second shape without a plan is another fact."""
    second = "logging.getLogger('checkmate.torch').warning('over by %d', 4)"
    assert stderr_of("import checkmate", SAY, second) == "checkmate: warning: over by 3\ncheckmate: warning: over by 4\n"


def test_a_closed_stderr_raises_nothing() -> None:
    """A warning must not end the training that it is about."""
    assert stderr_of("import checkmate", "logging.raiseExceptions = False; sys.stderr.close()", SAY) == ""
