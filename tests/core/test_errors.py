"""Errors say what is wrong and what to do, and are caught as the builtin they are."""

from __future__ import annotations

import pytest

from checkmate.core import errors
from checkmate.core.errors import CheckmateError, InfeasibleBudgetError, PlanError, PlanNotFoundError, WrongGraphError, shortened

BUILTINS = {
    "GraphError": ValueError,
    "PlanError": ValueError,
    "WrongGraphError": ValueError,
    "UnitError": ValueError,
    "OptionError": ValueError,
    "FileFormatError": ValueError,
    "InfeasibleBudgetError": ValueError,
    "PlanNotFoundError": RuntimeError,
    "SolverError": RuntimeError,
    "MissingExtraError": ImportError,
}


@pytest.mark.parametrize("name", BUILTINS)
def test_every_error_is_a_checkmate_error_and_a_builtin(name):
    """One `except` catches all of them, and code that knows nothing of Checkmate catches them too."""
    kind = getattr(errors, name)
    assert issubclass(kind, CheckmateError)
    assert issubclass(kind, BUILTINS[name])
    assert issubclass(WrongGraphError, PlanError)


def test_the_hint_follows_the_message_after_a_blank_line():
    """The first line says what is wrong; what to do about it stands apart."""
    error = CheckmateError("7 is too many", hint="take 6")
    assert str(error) == "7 is too many\n\nhint: take 6"
    assert (error.message, error.hint) == ("7 is too many", "take 6")


def test_without_a_hint_the_message_is_all():
    """An empty hint leaves no empty line."""
    error = CheckmateError("7 is too many")
    assert str(error) == "7 is too many"
    assert error.hint == ""


def test_an_infeasible_budget_carries_its_figures():
    """A program that raises the budget needs the numbers, not the text."""
    error = InfeasibleBudgetError("no", hint="more", budget_bytes=1, floor_bytes=2, smallest_bytes=3, binding_op="conv")
    assert str(error) == "no\n\nhint: more"
    assert (error.budget_bytes, error.floor_bytes, error.smallest_bytes, error.binding_op) == (1, 2, 3, "conv")


def test_figures_that_are_not_known_are_empty():
    """No smallest peak is known before a plan is found; None is not zero bytes."""
    error = InfeasibleBudgetError("no")
    assert (str(error), error.hint) == ("no", "")
    assert (error.budget_bytes, error.floor_bytes, error.smallest_bytes, error.binding_op) == (0, 0, None, "")


def test_a_plan_that_was_not_found_carries_its_figures():
    """They say which budget to try next; without them nothing is known."""
    error = PlanNotFoundError("no", hint="more", budget_bytes=1, smallest_bytes=2)
    assert (str(error), error.budget_bytes, error.smallest_bytes) == ("no\n\nhint: more", 1, 2)
    error = PlanNotFoundError("no")
    assert (str(error), error.budget_bytes, error.smallest_bytes) == ("no", 0, None)


def test_another_hint_changes_nothing_else():
    """A front end knows a better remedy for the same fault; the first error stays as it was."""
    error = PlanNotFoundError("no", hint="more", budget_bytes=1, smallest_bytes=2)
    changed = error.with_hint("less")
    assert (type(changed), str(changed), changed.message, changed.hint) == (PlanNotFoundError, "no\n\nhint: less", "no", "less")
    assert (changed.budget_bytes, changed.smallest_bytes) == (1, 2)
    assert str(error) == "no\n\nhint: more"


def test_a_message_shows_what_cannot_be_printed_as_an_escape():
    """A name from a file must not move the cursor or turn text round; lines of a message stay lines."""
    error = CheckmateError("op 'caf\u00e9\x1b[2J\u202e\tx'\nof the file", hint="rename it")
    assert str(error) == "op 'caf\u00e9\\x1b[2J\\u202e\\tx'\nof the file\n\nhint: rename it"


def test_a_long_name_is_shortened_to_its_two_ends():
    """As long as is allowed it stays whole; one letter more and its middle goes."""
    assert [shortened("0123456789", most=most) for most in (10, 9, 8)] == ["0123456789", "0123…6789", "012…789"]
    assert (len(shortened("x" * 256)), shortened("x" * 257)) == (256, "x" * 127 + "…" + "x" * 127)
