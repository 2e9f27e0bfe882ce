"""Options that say which plan a front end looks for, checked once, where the user's call comes in."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from checkmate.core.budget import Budget
from checkmate.core.errors import OptionError
from checkmate.core.files import read
from checkmate.core.plan import HostMemory, Plan
from checkmate.core.result import Result
from checkmate.core.units import Amount
from checkmate.frontend.counted_memory import Counted
from checkmate.solvers.registry import by_name
from checkmate.solvers.session import Solver

PlanSource = Plan | str | os.PathLike[str]
"""A plan, or the path of a file with a plan or a result."""


CostSource = Literal["measured", "estimated"]
"""Source of costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningOptions:
    """Which plan to look for.

    Attributes:
        budget: The most memory that a step may need, everything included; None keeps everything.
        solver: The solver; `Auto` by default.
        time_limit_s: Seconds of wall time for planning a step, all of its graphs together, or None for no limit.
        plan: A plan to run instead of looking for one.
        host: Memory of the host that values may be copied to, with its bus; None if nothing may be copied.
        counted: Bytes of a plan that count against the budget; None for its peak of live bytes.
    """

    budget: Budget | None = None
    solver: Solver | None = None
    time_limit_s: float | None = None
    plan: Plan | None = None
    host: HostMemory | None = None
    counted: Counted | None = None

    @classmethod
    def of(
        cls,
        *,
        budget: Amount | Budget | None,
        solver: Solver | str | None,
        time_limit_s: float | None,
        plan: PlanSource | None,
    ) -> PlanningOptions:
        """Options from what a user wrote. This is where the text of a budget is parsed.

        Raises:
            UnitError: The budget cannot be read.
            OptionError: The time limit is not above zero, no solver has that name, or the file holds no plan.
            FileFormatError: The plan's file is truncated, foreign or of an unknown version.
        """
        if time_limit_s is not None and not (isinstance(time_limit_s, (int, float)) and time_limit_s > 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionError(
                f"time_limit_s={time_limit_s!r} must be more than zero seconds, or None",
                hint="give a number of seconds such as time_limit_s=30, or None for no limit",
            )
        return cls(
            budget=parsed(budget),
            solver=by_name(solver) if isinstance(solver, str) else solver,
            time_limit_s=time_limit_s,
            plan=None if plan is None else load_plan(plan),
        )


BUDGET_VARIABLE = "CHECKMATE_BUDGET"
"""Environment variable with the budget, for trainers and for `checkmate run`."""


def budget_of_environment() -> str | None:
    """The budget in the environment; None where there is none."""
    return os.environ.get(BUDGET_VARIABLE) or None


def lightning_callbacks() -> list[Any]:
    """The callbacks for a new ``Trainer`` of Lightning, whose entry point this is: none if the environment has no budget.

    Lightning calls it in every training, also of users who want no budget: nothing else is imported for them.
    """
    if budget_of_environment() is None:
        return []
    return importlib.import_module("checkmate.torch.integrations.lightning").callbacks()


def parsed(budget: Amount | Budget | None) -> Budget | None:
    """A budget as a value; one that is a value already stays as it is.

    Raises:
        UnitError: The budget cannot be read.
    """
    return budget if budget is None or isinstance(budget, Budget) else Budget.parse(budget)


def load_plan(plan: PlanSource) -> Plan:
    """A plan, or that of a file with a plan or a result.

    Raises:
        OptionError: The file cannot be opened, or holds neither.
        FileFormatError: The file is truncated, foreign or of an unknown version.
    """
    plan = getattr(plan, "plan", plan)  # that of a step or a result
    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, (str, os.PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(f"plan={plan!r} is no plan", hint="give step.plan, result.plan, or the path of a file with a plan")
    try:
        content = read(plan)
    except OSError as error:
        raise OptionError(
            f"plan={os.fspath(plan)!r} cannot be opened: {error.strerror or error}",
            hint="give a file that `checkmate plan` or `checkmate.write` wrote",
        ) from error
    if isinstance(content, Result):
        return content.plan
    if not isinstance(content, Plan):
        raise OptionError(
            f"plan={os.fspath(plan)!r} holds a {type(content).__name__.lower()}, not a plan",
            hint="give the file that `checkmate plan --out` wrote",
        )
    return content


def unknown_option(name: str, of: str, known: Sequence[str], elsewhere: Mapping[str, str]) -> OptionError:
    """The refusal of an option that there is not.

    Args:
        name: Its name.
        of: Whose option it was thought to be.
        known: The options that there are.
        elsewhere: What to do instead, for names that mean something elsewhere.
    """
    near = difflib.get_close_matches(name, known, n=1)
    said = f"; the nearest known one is {near[0]!r}" if near and name not in elsewhere else ""
    return OptionError(
        f"unknown option {name!r} of {of}{said}", hint=elsewhere.get(name, f"use one of the options {', '.join(known)}")
    )


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Check that an option has one of a few values.

    Raises:
        OptionError: It has another.
    """
    if value not in choices:
        raise OptionError(
            f"{name}={value!r} is not one of {', '.join(map(str, choices))}",
            hint=f"set {name}={choices[0]!r}, for example, or leave it out for the default",
        )
