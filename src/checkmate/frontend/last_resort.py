"""Warnings on stderr for programs that have not configured logging.

Python's handler of last resort prints messages without a name, each time they are logged. Most training scripts configure no
logging, and a warning that a budget is not kept has to reach their users.
"""

from __future__ import annotations

import logging
import sys

from checkmate.core.errors import printable_lines
from checkmate.frontend import progress

_LOGGER = "checkmate"


class LastResort(logging.Handler):
    """Prints each warning once on stderr, if no other handler takes it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, unless another handler takes it, or its text was printed before."""
        if self._has_other_handler(record.name):
            return
        text = printable_lines(record.getMessage())
        if text in self._printed:
            return
        self._printed.add(text)
        progress.erase()
        try:
            sys.stderr.write(f"{_LOGGER}: {record.levelname.lower()}: {text}\n")
        except Exception:  # noqa: BLE001 - as in every handler of the standard library: logging never fails
            self.handleError(record)

    def _has_other_handler(self, name: str) -> bool:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


def install() -> None:
    """Add the handler to the logger of this package, once."""
    logger = logging.getLogger(_LOGGER)
    if not any(isinstance(handler, LastResort) for handler in logger.handlers):
        logger.addHandler(LastResort())
