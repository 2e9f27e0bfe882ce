"""Assemble the verbs, and turn every error into one line and an exit code."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

from cyclopts import App, CycloptsError, MissingArgumentError
from cyclopts.help import DefaultFormatter, PanelSpec
from rich.box import Box

from checkmate.cli import (
    capture,
    completion,
    demo,
    devices,
    diff,
    doctor,
    explain,
    fits,
    max_batch,
    min_budget,
    oom,
    pareto,
    plan,
    regions,
    report,
    signals,
    solvers,
    terminal,
    verify,
)
from checkmate.cli.run import arranged, misspelt
from checkmate.cli.run import run as run_script
from checkmate.core.errors import CheckmateError, InfeasibleBudgetError, PlanNotFoundError, SolverError

_NO_BOX = Box("    \n" * 8)
_SUCH_AS = {"--budget": "50%", "--device": "H100", "--batch": "8"}
"""A value of each option that a verb needs."""
OK, NO_PLAN, BAD_INPUT, INTERNAL = 0, 1, 2, 3
_VERBS = (
    demo.demo,
    run_script,
    doctor.doctor,
    capture.capture,
    plan.plan,
    verify.verify,
    min_budget.min_budget,
    pareto.pareto,
    max_batch.max_batch,
    fits.fits,
    oom.oom,
    regions.regions,
    explain.explain,
    diff.diff,
    report.report,
    solvers.solvers,
    devices.devices,
)


def application() -> App:
    """The command-line application with all verbs."""
    import checkmate

    app = App(
        name="checkmate",
        help="Run a training step within a memory budget: the cheapest plan that fits, with a proven optimality gap.",
        version=checkmate.__version__,
        help_formatter=DefaultFormatter(panel_spec=PanelSpec(box=_NO_BOX, padding=(0, 0))),
        help_format="markdown",
        suppress_keyboard_interrupt=False,
    )
    for verb in (*_VERBS, completion.completion_for(application)):
        app.command(verb)
    return app


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    if argv[:1] == ["run"]:
        argv = ["run", *arranged(argv[1:])]
    as_json = "--json" in (argv[: argv.index("--")] if "--" in argv else argv)
    try:
        with signals.stopping_as_interrupts():
            code = application()(list(argv), exit_on_error=False, print_error=False, result_action="return_value")
    except MissingArgumentError as error:
        name = "an argument" if error.argument is None else error.argument.name
        such_as = f"{name} {_SUCH_AS[name]}" if name in _SUCH_AS else ""
        near = misspelt(name, argv)
        message = f"{name} is missing{f', such as {such_as}' if such_as else ''}"
        usage = f"run `checkmate {' '.join(error.command_chain or ())} --help` to see the usage"
        hint = f"write {name} for {near}" if near else f"add {such_as}" if such_as else usage
        return _fail(BAD_INPUT, type(error).__name__, message, hint, as_json)
    except CycloptsError as error:
        return _fail(BAD_INPUT, type(error).__name__, str(error), "run `checkmate --help` to see the usage", as_json)
    except (InfeasibleBudgetError, PlanNotFoundError) as error:
        return _fail(NO_PLAN, type(error).__name__, error.message, error.hint, as_json, _numbers(error))
    except SolverError as error:
        notes = "; ".join([error.message, *getattr(error, "__notes__", ())])
        return _fail(INTERNAL, "SolverError", notes, "report this bug of the solver, with the graph file", as_json)
    except CheckmateError as error:
        return _fail(BAD_INPUT, type(error).__name__, error.message, error.hint, as_json)
    except KeyboardInterrupt:
        return _fail(NO_PLAN, "KeyboardInterrupt", "interrupted before a plan was found", "", as_json)
    except Exception as error:  # noqa: BLE001  (the edge of the program: every unexpected error becomes exit code 3)
        terminal.warn(*traceback.format_exc().split("\n"))
        message = f"{type(error).__name__}: {error}"
        return _fail(INTERNAL, type(error).__name__, message, "report this bug, with the lines above", as_json)
    return code if isinstance(code, int) else OK


def _fail(code: int, kind: str, message: str, hint: str, as_json: bool, facts: dict[str, Any] | None = None) -> int:
    terminal.say_error(message, hint)
    if as_json:
        terminal.emit({"error": kind, "message": message, "hint": hint, **(facts or {})})
    return code


def _numbers(error: InfeasibleBudgetError | PlanNotFoundError) -> dict[str, Any]:
    names = ("budget_bytes", "floor_bytes", "smallest_bytes", "binding_op")
    return {name: getattr(error, name) for name in names if hasattr(error, name)}
