"""``checkmate run``: run an unchanged training script within a budget."""

from __future__ import annotations

import contextlib
import runpy
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from checkmate.cli import terminal
from checkmate.cli.targets import needs
from checkmate.core.errors import CheckmateError, OptionError
from checkmate.frontend.options import BUDGET_VARIABLE, budget_of_environment, parsed


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
    """
    budget = budget or budget_of_environment()
    if not budget:
        raise OptionError(f"neither --budget nor {BUDGET_VARIABLE} is given", hint="add a budget, such as --budget 20GiB")
    parsed(budget)  # before importing torch, which takes seconds
    _check_script(script, arguments)
    needs("torch", "torch")
    from checkmate.torch.integrations.script import training_within

    printed = contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext()
    with printed, training_within(budget, time_limit_s=time_limit) as report, terminal.signals_as_in_python():
        code = _run(script, arguments)
    if json:
        names = ("compiled", "optimizers", "steps", "announced_bytes", "measured_bytes")
        figures = report.planned.items()
        plans = [
            {"first": first, "last": last, "count": count, **asdict(plan), "step_s": report.step_s(plan)}
            for plan, (count, first, last) in figures
        ]
        planned = {"planned": plans, "advice": report.advice()}
        terminal.emit({"exit_code": code, "budget": str(report.budget), **terminal.picked(report, *names), **planned})
        return code
    if code in (0, 130) or report.optimizers:  # otherwise the script ended before any training
        terminal.warn("", "checkmate: interrupted; so far:" if code == 130 else "checkmate:", *report.lines())
    return code


def _check_script(script: str, arguments: Sequence[str]) -> None:
    hint = "give a script and a budget, such as `checkmate run train.py --budget 20GiB`, and after them the script's arguments"
    if script == "-m" and not arguments:
        raise OptionError("-m without a module", hint=hint)
    if script != "-m" and not Path(script).is_file():
        raise OptionError(f"{script} is a folder" if Path(script).is_dir() else f"{script}: no such file", hint=hint)


def arranged(tokens: Sequence[str]) -> list[str]:
    """Arguments of the verb with the options before the script, and a `--` between the options and the script.

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
    """Run a script or module as python does, and return its exit code; errors of Checkmate are raised."""
    as_module = script == "-m"
    name, arguments = (arguments[0], arguments[1:]) if as_module else (script, arguments)
    before, sys.argv = sys.argv, [name, *arguments]
    # The folder stays on the path of imports, for code that runs at exit.
    sys.path.insert(0, str(Path.cwd()) if as_module else str(Path(name).resolve().parent))
    try:
        if as_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        terminal.warn(str(stop.code))
        return 1
    except CheckmateError:
        raise
    except KeyboardInterrupt:
        return 130
    except BaseException as error:  # noqa: BLE001 - as python does for whatever a script raises
        _show(error)
        return 1
    finally:
        sys.argv = before
    return 0


def _show(error: BaseException) -> None:
    """Print the traceback as python does, from the script's first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    terminal.warn(*"".join(traceback.format_exception(type(error), error, trace)).rstrip().split("\n"))
