"""A budget that a refusal of `checkmate plan` names works at the first try; `hints.py` follows more of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.hints import follow


@pytest.mark.parametrize("seed", [1010])
def test_a_hint_is_followed_once(seed: int, tmp_path: Path) -> None:
    """Here the search within too small a budget comes across a plan that one within its peak does not find."""
    assert len(follow(seed, tmp_path)["hints"]) == 1
