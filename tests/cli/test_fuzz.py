"""Damaged files get exit code 0, 1 or 2: never a traceback, a lost file, an escape sequence or a script that runs."""

from __future__ import annotations

import pytest

from tests.cli.fuzz import Tally, fuzz
from tests.report.conftest import start


def check(tally: Tally, cases: int) -> None:
    """Most files are refused, and some still make sense."""
    assert sum(tally.codes.values()) == cases
    assert sum(count for (_, code), count in tally.codes.items() if code == 2) > cases // 4
    assert sum(count for (_, code), count in tally.codes.items() if code == 0) > cases // 10
    assert tally.pages


@pytest.mark.slow
def test_damaged_files():
    """What is wrong is said in one line, and nothing else happens."""
    check(fuzz(150, 1), 150)


@pytest.mark.slow
def test_ten_thousand_damaged_files():
    """Every verb that reads a file; every page is opened in Chromium."""
    browser = start()
    try:
        check(fuzz(10_000, 0, browser), 10_000)
    finally:
        browser.quit()
