"""Output of verbs: data to stdout, messages to stderr. This module makes all text safe for a terminal.

Signals that ask a verb to stop act like Ctrl-C: the best plan so far is kept.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import IO, Annotated, Any, Final, TextIO, cast

from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from checkmate.core.errors import OptionError, printable
from checkmate.frontend.progress import redirected

Json = Annotated[bool, Parameter(name="--json", negative="")]


class _Stream(io.TextIOBase):
    """Standard output or standard error: its reader may leave, its disk may be full, its encoding may lack letters.

    Text that no reader takes is dropped, and the verb still ends with its own exit code.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._stream: TextIO | None = getattr(sys, name)  # None if the stream was closed at the start

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation
        return self._stream.fileno()

    def write(self, text: str, /) -> int:
        """Write text, with escapes for letters that the encoding lacks."""
        with self._faults():
            if self._stream is not None:
                self._stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
        return len(text)

    def flush(self) -> None:
        with self._faults():
            if self._stream is not None:
                self._stream.flush()

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Drop text that a pipe to `head` or a closed terminal does not read; a full disk under stdout is an error."""
        try:
            yield
        except OSError as error:
            assert self._stream is not None
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:  # noqa: PTH123
                # The buffer still has the failed text, and Python writes it again at exit.
                os.dup2(nothing.fileno(), self._stream.fileno())
            if self.name == "stdout" and error.errno not in (errno.EPIPE, errno.EIO, errno.EBADF):
                raise OptionError(
                    f"cannot write to {self.name}: {error.strerror or error}",
                    hint="choose a disk with space for stdout; files given by options such as --out are written",
                ) from error


@dataclass(frozen=True, kw_only=True)
class VerbOutput:
    """The output of a verb: one JSON object, or facts, a table and lines; the written files and a hint go to stderr."""

    data: Mapping[str, Any]
    facts: Sequence[tuple[str, str]] = ()
    header: Sequence[str] = ()  # a column whose name begins with "<" is text, the others are numbers
    rows: Sequence[Iterable[str]] = ()
    lines: Iterable[str] = ()
    wrote: Iterable[object] = ()  # paths; None for a file that was not asked for
    hint: str = ""
    code: int = 0

    def show(self, as_json: bool) -> int:
        """Print the output, and return the exit code."""
        if as_json:
            emit(self.data)
            return self.code
        width = max((len(name) for name, _ in self.facts), default=0) + 2
        for name, text in self.facts:
            _print(data(), (f"{name:<{width}}", "bold"), printable(text))
        if self.rows:
            _table(self.header, self.rows)
        say(*self.lines)
        for path in self.wrote:
            if path is not None:
                _print(messages(), (f"{'wrote':<8}", "bold"), printable(str(path)))
        if self.hint:
            messages().print()
            _print(messages(), ("hint", "bold"), f": {printable(self.hint)}")
        return self.code


def data() -> Console:
    """Console for data, on stdout."""
    return Console(file=cast("IO[str]", _Stream("stdout")), highlight=False, markup=False)


def messages() -> Console:
    """Console for progress, remarks and errors, on stderr."""
    return Console(file=cast("IO[str]", _Stream("stderr")), stderr=True, highlight=False, markup=False)


def emit(value: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    write(json.dumps(value, allow_nan=False) + "\n")


def picked(value: object, *names: str) -> dict[str, Any]:
    """Attributes of a value by name, for JSON."""
    return {name: getattr(value, name) for name in names}


def write(text: str) -> None:
    """Print text of this program on stdout as it is."""
    stream = _Stream("stdout")
    stream.write(text)
    stream.flush()


def say(*lines: str) -> None:
    """Print lines on stdout."""
    for line in lines:
        _print(data(), printable(line))


def warn(*lines: str) -> None:
    """Print lines on stderr."""
    for line in lines:
        _print(messages(), printable(line))


def say_error(message: str, hint: str = "") -> None:
    """Print an error message and, after a blank line, its hint."""
    _print(messages(), ("error", "bold red"), f": {printable(message)}")
    if hint:
        messages().print()
        _print(messages(), ("hint", "bold"), f": {printable(hint)}")


def command(verb: str, *words: object) -> str:
    """A command line of Checkmate in backquotes, with the quotes that a shell needs around names of files.

    Examples:
        >>> command("plan", "my model.json", "--budget", "50%")
        "`checkmate plan 'my model.json' --budget 50%`"
    """
    return f"`{shlex.join(('checkmate', verb, *map(str, words)))}`"


@contextmanager
def drawn(text: str) -> Iterator[Callable[[str], None]]:
    """Draw a spinner, a clock and a line of text on a terminal during the block; yields a function that replaces the text."""
    console = messages()
    if not console.is_terminal:
        with redirected(lambda _text: None):
            yield lambda _text: None
        return
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text)

        def replace(text: str) -> None:
            bar.update(task, description=printable(text))

        with redirected(replace):
            yield replace


def _print(console: Console, *parts: str | tuple[str, str]) -> None:
    console.print(Text.assemble(*parts), soft_wrap=True)


def _table(header: Sequence[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table without boxes."""
    console = data()
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for name in header:
        grid.add_column(Text(name.removeprefix("<")), justify="left" if name.startswith("<") else "right", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    console.print()
    with console.capture() as capture:
        console.print(grid)
    console.print("\n".join(line.rstrip() for line in capture.get().splitlines()) if not console.is_terminal else grid)
    console.print()


_STOPPING: Final = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def _handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[None]:
    """Handle signals in the main thread during the block."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            if previous is not None:  # None: the handler was not set by Python
                signal.signal(number, previous)


@contextmanager
def stopping_as_interrupts() -> Iterator[None]:
    """During the block SIGTERM and SIGHUP raise `KeyboardInterrupt` instead of ending the program, unless they are ignored."""
    last = -1.0

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        repeated, last = now - last < 1, now  # one request within a second: a closing terminal sends several signals
        if not repeated:
            raise KeyboardInterrupt

    with _handled([number for number in _STOPPING if signal.getsignal(number) is signal.SIG_DFL], interrupt):
        yield


@contextmanager
def signals_as_in_python() -> Iterator[None]:
    """Let the signals end the program, as they do without this package, during a block that runs another program's code."""
    with _handled([number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN], signal.SIG_DFL):
        yield


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore the signals during a block that writes the results, after which the verb ends anyway.

    Handlers are replaced, because a mask would apply to this thread only, and threads of engines take signals.
    """
    with _handled((signal.SIGINT, *_STOPPING), lambda _number, _frame: None):
        yield
