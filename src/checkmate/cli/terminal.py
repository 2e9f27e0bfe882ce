"""Output of verbs: data to stdout, messages to stderr. All text goes through here, where it becomes safe for a terminal."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Annotated, Any, Final, TextIO, cast

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from checkmate.core.errors import OptionError, printable

Json = Annotated[bool, Parameter(name="--json", negative="")]
_GONE: Final = (errno.EPIPE, errno.EIO, errno.EBADF)
"""Errors of a stream that is not read any more: a pipe to `head`, a terminal that was closed."""


class _Stream(io.TextIOBase):
    """Standard output or standard error: its reader may leave, its disk may be full, its encoding may lack letters.

    What is not read is dropped, so that the verb still ends with its own exit code.

    Args:
        name: `stdout` or `stderr`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._stream: TextIO | None = getattr(sys, name)  # None if the program was started with it closed

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Encoding of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        """Its file descriptor."""
        if self._stream is None:
            raise io.UnsupportedOperation
        return self._stream.fileno()

    def write(self, text: str, /) -> int:
        """Write text, with escapes for letters that the encoding lacks.

        Raises:
            OptionError: Standard output takes no more.
        """
        if self._stream is not None:
            try:
                self._stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
            except OSError as error:
                self._fail(error)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered.

        Raises:
            OptionError: Standard output takes no more.
        """
        if self._stream is not None:
            try:
                self._stream.flush()
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        assert self._stream is not None
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:  # noqa: PTH123
            # The buffer still has what failed, and Python writes it again at exit.
            os.dup2(nothing.fileno(), self._stream.fileno())
        if self.name == "stdout" and error.errno not in _GONE:
            raise OptionError(
                f"cannot write to {self.name}: {error.strerror or error}",
                hint="choose a disk with space for stdout; files given by options such as --out are written",
            ) from error


def data() -> Console:
    """Console for data, on stdout."""
    return Console(file=cast("IO[str]", _Stream("stdout")), highlight=False, markup=False)


def messages() -> Console:
    """Console for progress, remarks and errors, on stderr."""
    return Console(file=cast("IO[str]", _Stream("stderr")), stderr=True, highlight=False, markup=False)


def emit(value: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    write(json.dumps(value, allow_nan=False) + "\n")


def write(text: str) -> None:
    """Print text of this program on stdout as it is."""
    stream = _Stream("stdout")
    stream.write(text)
    stream.flush()


def say(*lines: str) -> None:
    """Print lines on stdout."""
    console = data()
    for line in lines:
        console.print(Text(printable(line)), soft_wrap=True)


def warn(*lines: str) -> None:
    """Print lines on stderr."""
    console = messages()
    for line in lines:
        console.print(Text(printable(line)), soft_wrap=True)


def say_error(message: str, hint: str = "") -> None:
    """Print an error message and, after a blank line, its hint."""
    console = messages()
    console.print(Text.assemble(("error", "bold red"), f": {printable(message)}"), soft_wrap=True)
    if hint:
        console.print()
        console.print(Text.assemble(("hint", "bold"), f": {printable(hint)}"), soft_wrap=True)


def facts(rows: Sequence[tuple[str, str]]) -> None:
    """Print names and texts in two columns."""
    console = data()
    width = max(len(name) for name, _ in rows) + 2
    for name, text in rows:
        console.print(Text.assemble((f"{name:<{width}}", "bold"), printable(text)), soft_wrap=True)


def table(header: Iterable[tuple[str, bool]], rows: Iterable[Iterable[str]]) -> None:
    """Print a table without boxes.

    Args:
        header: Name of each column, and whether it is right-aligned, as numbers are.
        rows: Text of the cells.
    """
    console = data()
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for name, right in header:
        grid.add_column(Text(name), justify="right" if right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    console.print()
    with console.capture() as capture:
        console.print(grid)
    console.print("\n".join(line.rstrip() for line in capture.get().splitlines()) if not console.is_terminal else grid)
    console.print()


def closing(wrote: Iterable[object], hint: str = "") -> None:
    """Print the files that were written and a hint on the next command."""
    console = messages()
    for path in wrote:
        console.print(Text.assemble((f"{'wrote':<8}", "bold"), printable(str(path))), soft_wrap=True)
    if hint:
        console.print()
        console.print(Text.assemble(("hint", "bold"), f": {printable(hint)}"), soft_wrap=True)


def command(verb: str, *words: object) -> str:
    """A command line of Checkmate in backquotes, with the quotes that a shell needs around names of files.

    Examples:
        >>> command("plan", "my model.json", "--budget", "50%")
        "`checkmate plan 'my model.json' --budget 50%`"
    """
    return f"`{shlex.join(('checkmate', verb, *map(str, words)))}`"
