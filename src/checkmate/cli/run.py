"""``checkmate run``: run an unchanged training script within a budget."""

from __future__ import annotations

import contextlib
import difflib
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from checkmate.cli import signals, terminal
from checkmate.cli.targets import needs
from checkmate.core.errors import CheckmateError, OptionError
from checkmate.frontend.options import BUDGET_VARIABLE, budget_of_environment, parsed

_INTERRUPTED = 130
_HINT = "give a script and a budget, such as `checkmate run train.py --budget 20GiB`, and after them the script's arguments"


def run(
    script: str,
    /,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    budget: str | None = None,
    time_limit: float = 30.0,
    json: terminal.Json = False,
) -> int:
    """Run an unchanged training script of PyTorch within a budget: `checkmate run train.py --budget 20GiB --epochs 3`.

    What an optimizer of the script owns is compiled within the budget when the script first calls it to be trained, and a
    report follows at the end, on stderr. Options are given before the script; of what follows it only the budget is
    Checkmate's, and all else is passed to the script.

    Args:
        script: File of the script, or -m MODULE as for python.
        arguments: Arguments of the script.
        budget: Total such as 20GiB, or a share such as 50%; the environment variable CHECKMATE_BUDGET by default.
        time_limit: Time limit of planning a step, in seconds.
        json: Print the report as one JSON object on stdout; what the script prints goes to stderr.

    Returns:
        The exit code of the script: 1 after an exception, 1 or 2 after an error of Checkmate.
    """
    budget = budget or budget_of_environment()
    if not budget:
        written = misspelt("--budget", arguments)
        hint = f"write --budget instead of {written}" if written else "add a budget, such as --budget 20GiB"
        raise OptionError(f"neither --budget nor {BUDGET_VARIABLE} is given", hint=hint)
    parsed(budget)  # now: importing torch takes seconds
    if script == "-m" and not arguments:
        raise OptionError("-m without a module", hint=_HINT)
    if script != "-m" and not Path(script).is_file():
        is_python = Path(script).name.startswith("python") and bool(arguments)
        hint = f"leave out {script}: the script is {arguments[0]}" if is_python else _HINT
        raise OptionError(f"{script} is a folder" if Path(script).is_dir() else f"{script}: no such file", hint=hint)
    needs("torch", "torch")
    from checkmate.torch.integrations.script import training_within

    printed = contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext()
    with printed, training_within(budget, time_limit_s=time_limit) as report, signals.as_in_python():
        code = _run(script, arguments)
    if json:
        terminal.emit(_as_json(report, code))
        return code
    if code not in (0, _INTERRUPTED) and not report.optimizers:
        return code  # it ended before it had anything to train
    heading = "checkmate: interrupted; so far:" if code == _INTERRUPTED else "checkmate:"
    terminal.warn("", heading, *report.lines())
    return code


def misspelt(option: str, words: Sequence[str]) -> str:
    """The first word that may be meant to be an option; empty if there is none.

    Args:
        option: The option, such as ``--budget``.
        words: What was typed.
    """
    names = (word.partition("=")[0] for word in words)
    return next((name for name in names if name != option and difflib.get_close_matches(name, [option])), "")


def arranged(tokens: Sequence[str]) -> list[str]:
    """Arguments of the verb with the options before the script, and a `--` between them and what is the script's.

    Args:
        tokens: The arguments as typed.

    Examples:
        >>> arranged(["train.py", "--lr", "0.1", "--budget", "20GiB"])
        ['--budget', '20GiB', '--', 'train.py', '--lr', '0.1']
        >>> arranged(["--budget=20GiB", "-m", "package.train", "--budget", "3"])
        ['--budget=20GiB', '--', '-m', 'package.train', '--budget', '3']
    """
    first = 0
    while first < len(tokens) and tokens[first].startswith("-") and tokens[first] not in ("-m", "--"):
        first += 1 if "=" in tokens[first] or tokens[first] in ("--json", "--help", "-h", "--version") else 2
    own, rest = list(tokens[:first]), list(tokens[first:])
    if rest[:1] == ["--"]:
        return [*own, *rest]
    if not any(token.partition("=")[0] == "--budget" for token in own):
        for k, token in enumerate(rest):
            if token == "--budget" or token.startswith("--budget="):
                own += rest[k : k + (1 if "=" in token else 2)]
                del rest[k : k + (1 if "=" in token else 2)]
                break
    return [*own, "--", *rest] if rest else own


def _run(script: str, arguments: Sequence[str]) -> int:
    """Run a script or module as python does.

    Returns:
        Its exit code.

    Raises:
        CheckmateError: No plan keeps the budget, or an option of the script's is wrong.
    """
    as_module = script == "-m"
    name, arguments = (arguments[0], arguments[1:]) if as_module else (script, arguments)
    with _argv([name, *arguments], str(Path.cwd()) if as_module else str(Path(name).resolve().parent)):
        try:
            if as_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
        except SystemExit as stop:
            return _code(stop.code)
        except CheckmateError:
            raise
        except KeyboardInterrupt:
            return _INTERRUPTED
        except BaseException as error:  # noqa: BLE001 - as python does for whatever a script raises
            _show(error)
            return 1
    return 0


@contextlib.contextmanager
def _argv(argv: Sequence[str], folder: str) -> Iterator[None]:
    """Arguments and path of imports as a script sees them; the folder stays on the path, for what runs at exit."""
    before = sys.argv
    sys.argv = list(argv)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv = before


def _code(code: object) -> int:
    if code is None or isinstance(code, int):
        return code or 0
    terminal.warn(str(code))
    return 1


def _show(error: BaseException) -> None:
    """Print the traceback as python does, from the script's first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    terminal.warn(*"".join(traceback.format_exception(type(error), error, trace)).rstrip().split("\n"))


def _as_json(report: Any, code: int) -> dict[str, Any]:
    return {
        "exit_code": code,
        "budget": str(report.budget),
        "compiled": report.compiled,
        "optimizers": report.optimizers,
        "steps": report.steps,
        "planned": [asdict(planned) for planned in report.planned],
        "announced_bytes": report.announced_bytes,
        "measured_bytes": report.measured_bytes,
        "advice": report.advice(),
    }
