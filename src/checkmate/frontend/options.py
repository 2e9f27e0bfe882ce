"""Options of the plan that a front end looks for, checked once, at the user's call."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypedDict, TypeVar, Union, Unpack, cast, get_args, get_origin, get_type_hints

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

TIME_LIMIT_S: Final = 30.0
"""Seconds for planning a step, in every front end."""

CallT = TypeVar("CallT", bound=Callable[..., Any])


class CommonOptions(TypedDict, total=False):
    """Options of every front end besides the budget.

    Attributes:
        solver: A solver or its name; `Auto` by default.
        time_limit_s: Seconds of wall time for planning a step, all of its graphs together, or None for no limit.
        plan: A plan, or the path of a file with one, to run instead of looking for one.
    """

    solver: Solver | str | None
    time_limit_s: float | None
    plan: PlanSource | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningOptions:
    """The budget of a plan, and the way to look for it.

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
    def of(cls, *, budget: Amount | Budget | None = None, **options: Unpack[CommonOptions]) -> PlanningOptions:
        """Options from the arguments of a user. The text of a budget is parsed here.

        Raises:
            UnitError: The budget cannot be read.
            OptionError: The time limit is not above zero, no solver has that name, or the file holds no plan.
            FileFormatError: The plan's file is truncated, foreign or of an unknown version.
        """
        limit_s: Any = options.get("time_limit_s", TIME_LIMIT_S)
        if limit_s is not None and not (isinstance(limit_s, (int, float)) and limit_s > 0):
            raise OptionError(
                f"time_limit_s={limit_s!r} must be more than zero seconds, or None",
                hint="give a number of seconds such as time_limit_s=30, or None for no limit",
            )
        solver, plan = options.get("solver"), options.get("plan")
        return cls(
            budget=parsed(budget),
            solver=by_name(solver) if isinstance(solver, str) else solver,
            time_limit_s=limit_s,
            plan=None if plan is None else load_plan(plan),
        )


BUDGET_VARIABLE = "CHECKMATE_BUDGET"
"""Environment variable with the budget, for trainers and for `checkmate run`."""


def budget_of_environment() -> str | None:
    """The budget in the environment; None if it has none."""
    return os.environ.get(BUDGET_VARIABLE) or None


def lightning_callbacks(package: str = "lightning.pytorch") -> list[Any]:
    """The callbacks for a new ``Trainer`` of Lightning, whose entry point this is: none if the environment has no budget.

    Lightning calls it in every training. Without a budget nothing else is imported.
    """
    if budget_of_environment() is None:
        return []
    return importlib.import_module("checkmate.torch.integrations.lightning").callbacks(package)


def pytorch_lightning_callbacks() -> list[Any]:
    """The same for the package ``pytorch_lightning``, whose classes are others."""
    return lightning_callbacks("pytorch_lightning")


def parsed(budget: Amount | Budget | None) -> Budget | None:
    """A `Budget` from an amount or a text; a `Budget` is returned unchanged."""
    return budget if budget is None or isinstance(budget, Budget) else Budget.parse(budget)


def load_plan(plan: PlanSource) -> Plan:
    """The plan itself, or the plan of a step, of a result, or of a file with a plan or a result."""
    plan = getattr(plan, "plan", plan)
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


def takes_options(
    options: type, *checked: type, elsewhere: Mapping[str, str] | None = None, **defaults: Any
) -> Callable[[CallT], CallT]:
    """Decorate a function that takes the options of a `TypedDict` as ``**options``.

    A call with an unknown name, or with a value that an option cannot have, is refused. The signature of the function shows every
    option, with its default in the dataclasses that check the options.

    Args:
        options: The options.
        checked: The dataclasses.
        elsewhere: Hints for names that are options of other functions.
        defaults: Defaults that differ from those of the dataclasses.
    """

    def decorate(function: CallT) -> CallT:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        known = {field.name: field.default for kind in checked for field in dataclasses.fields(kind)} | defaults
        more = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=known.get(name), annotation=getattr(hint, "__forward_arg__", hint)
            )
            for name, hint in options.__annotations__.items()
        ]
        names = [p.name for p in (*own, *more) if p.kind is not p.VAR_POSITIONAL]

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            of = ".".join([*function.__module__.split(".")[:2], function.__name__])
            refuse_unknown(given, of, names, elsewhere or {})
            check_choices(options, given)
            return function(*args, **given)

        call.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return cast(CallT, call)

    return decorate


def refuse_unknown(given: Iterable[str], of: str, known: Iterable[str], elsewhere: Mapping[str, str]) -> None:
    """Refuse an unknown option; the hint comes from ``elsewhere``, or the message names the nearest known option."""
    known = list(known)
    for name in map(str, given):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            said = f"; the nearest known one is {near[0]!r}" if near and name not in elsewhere else ""
            hint = elsewhere.get(name, f"use one of the options {', '.join(known)}")
            raise OptionError(f"unknown option {name!r} of {of}{said}", hint=hint)


def check_choices(options: type, given: Mapping[str, object]) -> None:
    """Refuse a value that is not one of the few values of its option's type, in a `TypedDict` or a dataclass."""
    for name, hint in get_type_hints(options).items():
        choices = _choices(hint)
        if name in given and choices is not None and given[name] not in choices:
            raise OptionError(
                f"{name}={given[name]!r} is not one of {', '.join(map(str, choices))}",
                hint=f"set {name}={choices[0]!r}, for example, or leave it out for the default",
            )


def _choices(hint: Any) -> tuple[object, ...] | None:
    """The values of a type; None for a type that is not a small enumeration."""
    if hint is bool:
        return (True, False)
    if hint is NoneType:
        return (None,)
    if get_origin(hint) is Literal:
        return get_args(hint)
    parts = [_choices(part) for part in get_args(hint)] if get_origin(hint) in (Union, UnionType) else [None]
    return None if None in parts else tuple(choice for part in parts if part for choice in part)
