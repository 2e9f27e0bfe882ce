"""Every error that Checkmate raises, each also a builtin exception, and text from files made safe for messages."""

from __future__ import annotations

import copy
from typing import Self


class CheckmateError(Exception):
    """Root of all errors of this package.

    Args:
        message: The fault: the argument, its value and the limit, in the user's units.
        hint: The remedy; printed after a blank line.

    Examples:
        >>> raise GraphError("op 3 reads value 9, which no op makes", hint="list the ops in a topological order")
        Traceback (most recent call last):
            ...
        checkmate.core.errors.GraphError: op 3 reads value 9, which no op makes
        <BLANKLINE>
        hint: list the ops in a topological order
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message = message
        self.hint = hint
        super().__init__(printable_lines(f"{message}\n\nhint: {hint}" if hint else message))

    def with_hint(self, hint: str) -> Self:
        """The same error with another hint.

        Args:
            hint: The hint.
        """
        changed = copy.copy(self)
        CheckmateError.__init__(changed, self.message, hint=hint)
        return changed


class GraphError(CheckmateError, ValueError):
    """A graph that is not a valid DAG of ops and values."""


class PlanError(CheckmateError, ValueError):
    """A plan that cannot be run on its graph."""


class WrongGraphError(PlanError):
    """A plan that was made for another graph."""


class UnitError(CheckmateError, ValueError):
    """Text or a number that is not an amount of memory."""


class OptionError(CheckmateError, ValueError):
    """An option with an unknown name or an unusable value."""


class FileFormatError(CheckmateError, ValueError):
    """A file that is truncated, has another format, or has a version that this release does not read."""


class InfeasibleBudgetError(CheckmateError, ValueError):
    """A budget that no plan can keep.

    Attributes:
        budget_bytes: The budget that was asked for, resident bytes included.
        floor_bytes: Proven lower bound on the peak of every plan of this graph, resident bytes included.
        smallest_bytes: The smallest budget that a plan was found for, or None.
        binding_op: Name of the op that sets the floor.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        budget_bytes: int = 0,
        floor_bytes: int = 0,
        smallest_bytes: int | None = None,
        binding_op: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        self.smallest_bytes = smallest_bytes
        self.binding_op = binding_op


class PlanNotFoundError(CheckmateError, RuntimeError):
    """A solver stopped before it found a plan or proved that none exists.

    Attributes:
        budget_bytes: The budget that was asked for, resident bytes included; 0 if it is not known.
        smallest_bytes: The smallest peak that a plan was found for, or None.
    """

    def __init__(self, message: str, *, hint: str = "", budget_bytes: int = 0, smallest_bytes: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes


class SolverError(CheckmateError, RuntimeError):
    """A solver returned a wrong plan or bound: a bug of the solver."""


class MissingExtraError(CheckmateError, ImportError):
    """An optional dependency that a call needs is not installed."""


def printable(text: str) -> str:
    r"""Text with escapes for unprintable characters: control characters, line ends, marks that reverse the direction of text.

    Examples:
        >>> printable("conv1"), printable("\x1b]0;title\x07"), printable("a\nerror: b")
        ('conv1', '\\x1b]0;title\\x07', 'a\\nerror: b')
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def printable_lines(text: str) -> str:
    """As `printable`, for text of several lines, with line ends kept."""
    return "\n".join(printable(line) for line in text.split("\n"))


def shortened(text: str, most: int = 256) -> str:
    """A text, or only its two ends if it is too long.

    Reports, traces and messages repeat a name each time that a plan computes its op or its line of code allocates. One long name
    in a small file would fill a disk.

    Examples:
        >>> shortened("conv1"), shortened("0123456789", most=5)
        ('conv1', '01…89')
    """
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"
