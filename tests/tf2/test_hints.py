"""A refusal that is followed works, whatever the network."""

from __future__ import annotations

import pytest

from tests.tf2.hints import follow

QUICK = (8,)
"""Seed of a small network."""


@pytest.mark.parametrize("seed", [seed if seed in QUICK else pytest.param(seed, marks=pytest.mark.slow) for seed in range(24)])
def test_the_budget_of_a_hint_is_kept_at_the_first_try(seed):
    """A user who follows a hint and is refused again does not try a third time."""
    assert len(follow(seed)["hints"]) <= 1
