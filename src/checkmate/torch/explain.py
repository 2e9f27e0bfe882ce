"""`explain`: the tensors that a planned step saves and the ops that it recomputes, with their place in the model; `last_plan`."""

from __future__ import annotations

from checkmate.core.errors import OptionError
from checkmate.core.evaluate import evaluate
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Curve
from checkmate.frontend.planner import keep_everything
from checkmate.torch.step.planned_step import PlannedStep, StepExplanation
from checkmate.torch.step.step import Step
from checkmate.torch.steps.coordinator import coordinator


def explain(step: Step | PlannedStep | Graph, plan: Plan | None = None, *, curve: Curve | None = None) -> StepExplanation:
    """List the tensors that a planned step saves and the ops that it recomputes, with module path, bytes and time.

    Args:
        step: A compiled step, the plan of `last_plan`, or a graph.
        plan: The plan, if ``step`` is a graph; by default the plan that keeps everything.
        curve: Plans of the same graph for other budgets, to show the time that one MiB more would save.

    Raises:
        WrongGraphError: The plan is for another graph.
        OptionError: ``step`` is neither a step nor a graph, for example the result of `torch.compile`.

    Examples:
        >>> import torch
        >>> from checkmate.torch import compile, explain
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
        >>> x = torch.ones(4, 8)
        >>> step = compile(model, torch.nn.functional.mse_loss, example=(x, x))
        >>> [(s.name, s.size_bytes) for s in explain(step).saved]
        [('addmm', 128), ('gelu', 128)]
    """
    if not isinstance(step, (Step, PlannedStep, Graph)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(
            f"{type(step).__name__} cannot be explained: only a step of checkmate.torch.compile or a graph can",
            hint="give explain the plan of checkmate.torch.last_plan() after two steps, the step of "
            "checkmate.torch.compile(model, loss, example=(x, y), budget=...) for the same model, or the graph of "
            "checkmate.torch.capture(model, loss, example=(x, y))",
        )
    if isinstance(step, Graph):
        step = PlannedStep(graph=step, result=keep_everything(step) if plan is None else evaluate(step, plan))
    return step.explain(curve=curve)


def last_plan() -> PlannedStep | None:
    """The plan of the newest step of ``torch.compile(model, backend="checkmate", ...)``.

    Returns:
        The plan; None before the second step, because the first one is recorded for a plan of the whole step.

    Examples:
        >>> import torch
        >>> from checkmate.torch import last_plan
        >>> model = torch.compile(torch.nn.Linear(4, 2), backend="checkmate", options={"budget": "1MiB"})
        >>> for _ in range(2):
        ...     model(torch.ones(3, 4)).sum().backward()
        >>> planned = last_plan()
        >>> planned.result.peak_bytes <= 2**20
        True
    """
    step = coordinator().step
    return None if step is None else PlannedStep(graph=step.graph, result=step.result)
