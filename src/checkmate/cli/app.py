"""Assemble the verbs, and turn every error into one line and an exit code."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any, Literal

from cyclopts import App, CycloptsError, MissingArgumentError
from cyclopts.help import DefaultFormatter, PanelSpec
from rich.box import Box

from checkmate.cli import demo, diagnosis, plans, steps, studies, terminal, views
from checkmate.cli.run import arranged
from checkmate.cli.run import run as run_script
from checkmate.core.errors import CheckmateError, InfeasibleBudgetError, PlanNotFoundError, SolverError

OK, NO_PLAN, BAD_INPUT, INTERNAL = 0, 1, 2, 3
_EXAMPLES = {"--budget": "50%", "--device": "H100", "--batch": "8"}
"""An example of a value for each option that a verb requires."""


def completion(shell: Literal["bash", "zsh", "fish"], /, *, json: terminal.Json = False) -> int:
    """Print the completion script for a shell.

    Args:
        shell: The shell.
        json: Print one JSON object on stdout.
    """
    script = application().generate_completion(prog_name="checkmate", shell=shell)
    places = {
        "bash": "~/.local/share/bash-completion/completions/checkmate",
        "zsh": "a file _checkmate in a folder of $fpath",
        "fish": "~/.config/fish/completions/checkmate.fish",
    }
    if not json:
        terminal.write(script)
    return terminal.VerbOutput(data={"shell": shell, "script": script}, hint=f"write the script to {places[shell]}").show(json)


_VERBS = (
    demo.demo,
    run_script,
    diagnosis.doctor,
    steps.capture,
    plans.plan,
    plans.verify,
    plans.min_budget,
    studies.pareto,
    studies.max_batch,
    steps.fits,
    diagnosis.oom,
    studies.regions,
    views.explain,
    views.diff,
    views.report,
    diagnosis.solvers,
    diagnosis.devices,
    completion,
)


def application() -> App:
    """The command-line application with all verbs."""
    import checkmate

    app = App(
        name="checkmate",
        help="The cheapest plan found for a training step within a memory budget, with a proven gap.",
        version=checkmate.__version__,
        help_formatter=DefaultFormatter(panel_spec=PanelSpec(box=Box("    \n" * 8), padding=(0, 0))),
        help_format="markdown",
        suppress_keyboard_interrupt=False,
    )
    for verb in _VERBS:
        app.command(verb)
    return app


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    if argv[:1] == ["run"]:
        argv = ["run", *arranged(argv[1:])]
    as_json = "--json" in (argv[: argv.index("--")] if "--" in argv else argv)
    facts: dict[str, Any] = {}
    try:
        with terminal.stopping_as_interrupts():
            code = application()(list(argv), exit_on_error=False, print_error=False, result_action="return_value")
            return code if isinstance(code, int) else OK
    except MissingArgumentError as error:
        code, kind, (message, hint) = BAD_INPUT, type(error).__name__, _missing(error)
    except CycloptsError as error:
        code, kind, message, hint = BAD_INPUT, type(error).__name__, str(error), "run `checkmate --help` to see the usage"
    except SolverError as error:
        message = "; ".join([error.message, *getattr(error, "__notes__", ())])
        code, kind, hint = INTERNAL, "SolverError", "report this bug of the solver, with the graph file"
    except CheckmateError as error:
        code, kind, message, hint = BAD_INPUT, type(error).__name__, error.message, error.hint
        if isinstance(error, (InfeasibleBudgetError, PlanNotFoundError)):
            names = ("budget_bytes", "floor_bytes", "smallest_bytes", "binding_op")
            code, facts = NO_PLAN, terminal.picked(error, *(name for name in names if hasattr(error, name)))
    except KeyboardInterrupt:
        code, kind, message, hint = NO_PLAN, "KeyboardInterrupt", "interrupted before a plan was found", ""
    except Exception as error:  # noqa: BLE001  (the edge of the program: every unexpected error becomes exit code 3)
        terminal.warn(*traceback.format_exc().split("\n"))
        code, kind, message = INTERNAL, type(error).__name__, f"{type(error).__name__}: {error}"
        hint = "report this bug, with the lines above"
    terminal.say_error(message, hint)
    if as_json:
        terminal.emit({"error": kind, "message": message, "hint": hint, **facts})
    return code


def _missing(error: MissingArgumentError) -> tuple[str, str]:
    """Message and hint for a missing argument."""
    name = "an argument" if error.argument is None else error.argument.name
    example = f"{name} {_EXAMPLES[name]}" if name in _EXAMPLES else ""
    message = f"{name} is missing{f', such as {example}' if example else ''}"
    usage = f"run `checkmate {' '.join(error.command_chain or ())} --help` to see the usage"
    return message, f"add {example}" if example else usage
