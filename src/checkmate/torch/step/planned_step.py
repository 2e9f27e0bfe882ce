"""A planned step: its graph and its plan, their memory and time, and a page about them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from checkmate.core.errors import OptionError
from checkmate.core.evaluate import evaluate
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Curve, Result
from checkmate.core.units import format_bytes
from checkmate.frontend.planner import keep_everything
from checkmate.report import PageText, html_report
from checkmate.studies.explain import Explanation, Remat
from checkmate.studies.explain import explain as explain_plan
from checkmate.studies.lifetimes import saved_for_backward, storage_lifetimes
from checkmate.torch.graph.storages import is_scalar_tangent
from checkmate.torch.measure.peak import measure_time_and_memory
from checkmate.torch.steps.coordinator import coordinator

if TYPE_CHECKING:
    from checkmate.torch.step.step import Step


class Planned:
    """A step with its graph and its plan; ``str`` of it is a readable text."""

    __slots__ = ()
    graph: Graph
    result: Result

    @property
    def plan(self) -> Plan:
        """The plan of the step."""
        return self.result.plan

    def explain(self, *, curve: Curve | None = None) -> StepExplanation:
        """The tensors that the step saves and the ops that it recomputes; see `checkmate.torch.explain`.

        Args:
            curve: Plans of the same graph for other budgets.
        """
        graph = self.graph
        peak = explain_plan(graph, self.plan, curve=curve)
        tangents = () if graph.boundary is None else (graph.values[v] for v in graph.ops[graph.boundary].outputs)
        return StepExplanation(
            saved=tuple(_saved(graph, self.plan)),
            remats=peak.remats,
            tangent_bytes=sum(value.size_bytes for value in tangents if not is_scalar_tangent(value)),
            peak=peak,
            remarks=self.result.remarks,
        )

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write one HTML page about the plan, which needs no network; see `checkmate.report.html_report`.

        Args:
            path: The file; an existing file is replaced.

        Returns:
            The path of the file.
        """
        file = Path(path)
        file.write_text(html_report(self.graph, self.plan, result=self.result, text=PageText(plan_file="")), encoding="utf-8")
        return file

    def measure(self, run: Callable[[], object]) -> PlannedStep:
        """Run the step five times, and add its measured time and memory to the plan: its page and its text then show both.

        Args:
            run: Runs one step of the training, which goes on: ``lambda: step(x, y)``, or the forward and the backward of a loop.

        Returns:
            The plan with `Result.measured`; `checkmate.write` writes it with the result.

        Examples:
            >>> import torch
            >>> from checkmate.torch import compile
            >>> x = torch.ones(4, 8)
            >>> model = torch.nn.Linear(8, 8)
            >>> step = compile(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), example=(x, x))
            >>> measured = step.measure(lambda: step(x, x)).result.measured
            >>> measured.peak_bytes == step.result.peak_bytes
            True
        """
        found = measure_time_and_memory(run, self.graph, self.result.cost)
        return PlannedStep(graph=self.graph, result=msgspec.structs.replace(self.result, measured=found))

    def __repr__(self) -> str:
        """A few lines: size, peak, overhead, and the methods with more."""
        result, ops = self.result, len(self.graph.ops)
        again = len(self.plan.order) - len(set(self.plan.order))
        lines = [
            f"{self.graph.name.strip() or 'a training step'}: {ops:,} ops, {again:,} computations more than one for each",
            f"  peak      {format_bytes(result.peak_bytes)} of {format_bytes(result.budget_bytes)}",
            f"  overhead  {100 * (result.overhead - 1):.2f} %; no plan within the budget costs {100 * result.gap:.2f} % less",
            *([] if result.measured is None else [f"  measured  {format_bytes(result.measured.peak_bytes)}; {result.measured}"]),
            *(f"  {remark}" for remark in result.remarks),
            '  more      .explain() for what is kept and computed again, .report("step.html") for a page',
        ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlannedStep(Planned):
    """The plan of a training step; ``str`` of it is a readable text.

    Attributes:
        graph: The graph of the step.
        result: The plan with its cost, its peak and their proven bounds.
    """

    graph: Graph
    result: Result


class Saved(NamedTuple):
    """A storage that the forward allocates and the backward reads.

    Attributes:
        name: Name of the value that allocates it.
        kind: The op that writes it, for example ``aten.addmm.default``.
        size_bytes: Size in bytes.
        source: Module path, file and line of that op.
    """

    name: str
    kind: str
    size_bytes: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepExplanation:
    """Explanation of a planned step; ``str`` of it is a readable text.

    Attributes:
        saved: Storages that are live when the backward begins and that it reads, largest first.
        remats: Recomputed ops, the most costly first.
        tangent_bytes: Bytes of the gradients of the forward's outputs other than scalars. AOTAutograd materialises them, as
            zeros, even for outputs that no loss depends on.
        peak: The values that are live at the peak, each with the reason.
        remarks: Remarks on the plan of a step, for example on ops that run piece by piece.
    """

    saved: tuple[Saved, ...]
    remats: tuple[Remat, ...]
    tangent_bytes: int
    peak: Explanation
    remarks: tuple[str, ...] = ()

    def render(self, most: int = 10) -> str:
        """The explanation as text.

        Args:
            most: Maximum number of lines of each list; one line has the sum of the rest.
        """
        total = sum(s.size_bytes for s in self.saved)
        lines = [*self.remarks, f"saved for the backward: {format_bytes(total)} in {len(self.saved)} tensors"]
        lines += [f"  {format_bytes(s.size_bytes):>11}  {s.name} ({s.kind}){_at(s.source)}" for s in self.saved[:most]]
        if len(self.saved) > most:
            rest = self.saved[most:]
            lines.append(f"  {format_bytes(sum(s.size_bytes for s in rest)):>11}  in {len(rest)} more")
        if self.tangent_bytes:
            lines.append(
                f"gradients of outputs besides the loss: {format_bytes(self.tangent_bytes)}, zeros for outputs that are not "
                "used; return only the loss to save them"
            )
        return "\n".join([*lines, self.peak.render(most)])

    def __repr__(self) -> str:
        """The text of `render`."""
        return self.render()


def _saved(graph: Graph, plan: Plan) -> Iterable[Saved]:
    """Storages that are written before the backward begins and read in it, and not freed or recomputed in between."""
    found = dict.fromkeys(life.value for life in saved_for_backward(graph, plan, storage_lifetimes(graph, plan)))
    values = ((graph.values[v], graph.ops[graph.producer[v]]) for v in found)
    rows = [Saved(value.name, op.kind, value.size_bytes, op.source) for value, op in values]
    return sorted(rows, key=lambda s: (-s.size_bytes, s.name))


def _at(source: str) -> str:
    return f" in {source}" if source else ""


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
    if isinstance(step, Graph):
        step = PlannedStep(graph=step, result=keep_everything(step) if plan is None else evaluate(step, plan))
    elif not hasattr(type(step), "explain"):
        raise OptionError(
            f"{type(step).__name__} cannot be explained: only a step of checkmate.torch.compile or a graph can",
            hint="give explain the plan of checkmate.torch.last_plan() after two steps, the step of "
            "checkmate.torch.compile(model, loss, example=(x, y), budget=...) for the same model, or the graph of "
            "checkmate.torch.capture(model, loss, example=(x, y))",
        )
    return step.explain(curve=curve)


def last_plan() -> PlannedStep | None:
    """The plan of the newest step of ``torch.compile(model, backend="checkmate", ...)``.

    Returns:
        The plan. None before the second step if the model does not return its loss, since a plan of the whole step is made
        from a record of the first.

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
    planned = coordinator().planned
    return None if planned is None else PlannedStep(graph=planned[0], result=planned[1])
