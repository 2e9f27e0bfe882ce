"""The ``checkmate`` command: verbs are commands, their arguments are files.

Data goes to stdout (``--json`` on every verb), messages to stderr. Exit codes: 0 success, 1 no plan within the budget or an
invalid plan, 2 wrong usage or bad input, 3 internal error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line, by default the program's own, and return the exit code."""
    try:
        from checkmate.cli.app import run
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("cyclopts", "rich"):
            raise
        sys.stderr.write(
            f'error: the command line needs {missing}, which is not installed\n\nhint: pip install "checkmate-remat[cli]"\n'
        )
        return 2
    return run(sys.argv[1:] if argv is None else argv)
