"""Engines in child processes.

OR-Tools and highspy define the same HiGHS symbols and cannot be loaded into one process, in either order (measured with
OR-Tools 9.15 and highspy 1.15.1).

The parent writes one line of JSON, the job; the child answers with lines of JSON, messages first and one
reply last. The child ends when its input is closed, so that none is left behind, whatever ends the
parent; the parent ends the child when the time is up, so that limits are hard and a crash is harmless.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, Final

from checkmate.core.errors import MissingExtraError, SolverError

GRACE_S: Final = 0.8
"""Seconds that an engine has beyond its limit to send its reply."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How a child ended.

    Attributes:
        reply: Its reply, or None if it ended without one.
        detail: Why there is none, in words.
    """

    reply: dict[str, Any] | None
    detail: str = ""


def require_ortools() -> None:
    """Check that OR-Tools is installed, without importing it.

    Raises:
        MissingExtraError: It is not installed; the hint has the command that installs it.
    """
    if importlib.util.find_spec("ortools") is None:
        raise MissingExtraError(
            "this engine needs OR-Tools, which is not installed", hint='pip install "checkmate-remat[solvers]"'
        )


def ask(module: str, job: dict[str, Any], *, time_s: float | None, on_message: Callable[[Any], None]) -> Answer:
    """Run a module as a child process and pass on its messages.

    Args:
        module: Module whose main part calls `serve`.
        job: The job; ``"until"`` is added to it, the time of `time.monotonic` to stop at, or None.
        time_s: Seconds for everything, start included; None for no limit.
        on_message: Called in this process with every message. An exception that it raises ends the child.

    Raises:
        SolverError: The child wrote a line that is not a message.
    """
    # A clock that is the same in all processes of the machine, and that stays right when the time of day is set.
    until = None if time_s is None else time.monotonic() + time_s
    with tempfile.TemporaryFile() as talk:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", module],  # -P: import nothing from the current folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=talk,
            start_new_session=True,  # Ctrl-C is for the parent, which then ends the child
        )
        try:
            assert child.stdin is not None and child.stdout is not None
            lines: queue.Queue[bytes] = queue.Queue()
            threading.Thread(target=_read, args=(child.stdout, lines), daemon=True).start()
            try:
                child.stdin.write(json.dumps({**job, "until": until}).encode() + b"\n")
                child.stdin.flush()
            except BrokenPipeError:
                return Answer(None, _last_words(child, talk))
            return _listen(module, child, talk, lines, until, on_message)
        finally:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    _close(pipe)


def _listen(
    module: str,
    child: subprocess.Popen[bytes],
    talk: IO[bytes],
    lines: queue.Queue[bytes],
    until: float | None,
    on_message: Callable[[Any], None],
) -> Answer:
    while True:
        left = None if until is None else until + GRACE_S - time.monotonic()
        if left is not None and left <= 0:
            return Answer(None, "the engine did not stop at its time limit and was ended")
        try:
            line = lines.get(timeout=left)
        except queue.Empty:
            continue
        if not line:
            return Answer(None, _last_words(child, talk))
        try:
            said = json.loads(line)
            is_reply, content = bool(said["reply"]), said["content"]
        except (ValueError, TypeError, KeyError):
            raise SolverError(f"{module} wrote a line that is not a message: {line[:80]!r}") from None
        if is_reply:
            return Answer(content)
        on_message(content)


def _read(pipe: IO[bytes], lines: queue.Queue[bytes]) -> None:
    """Pass on lines, and an empty one at the end."""
    with contextlib.suppress(ValueError):  # the parent has closed the pipe, and reads no more
        for line in pipe:
            lines.put(line)
    lines.put(b"")


def _close(pipe: IO[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):
        pipe.close()


def _last_words(child: subprocess.Popen[bytes], talk: IO[bytes]) -> str:
    code = child.wait()
    talk.seek(0)
    said = talk.read().decode(errors="replace").strip().splitlines()
    return f"the engine's process ended with exit code {code}" + (f": {said[-1]}" if said else "")


def serve(work: Callable[[dict[str, Any], Callable[[Any], None]], dict[str, Any]]) -> None:
    """The child's side: read the job, do it, send the reply.

    Args:
        work: Called with the job and a function that sends a message; returns the reply.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # engines print to standard output, which would mix with the messages
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    lock = threading.Lock()

    def say(content: Any, *, reply: bool = False) -> None:
        with lock:
            answers.write(json.dumps({"reply": reply, "content": content}) + "\n")
            answers.flush()

    say(work(job, say), reply=True)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)
