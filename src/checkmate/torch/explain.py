"""`explain`: the tensors that a planned step saves and the ops that it recomputes, with their place in the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Plan
from checkmate.core.result import Curve
from checkmate.core.units import format_bytes
from checkmate.studies.explain import Explanation, Remat
from checkmate.studies.explain import explain as explain_plan
from checkmate.torch.graph.storages import is_scalar_tangent
from checkmate.torch.step.step import Step


class Saved(NamedTuple):
    """A storage that the forward allocates and the backward reads.

    Attributes:
        name: Name of the value that allocates it.
        kind: The op that writes it, such as ``aten.addmm.default``.
        size_bytes: Size in bytes.
        source: Module path, file and line of that op.
    """

    name: str
    kind: str
    size_bytes: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExplanation:
    """Explanation of a planned step; ``str`` of it is a readable text.

    Attributes:
        saved: Storages that are live when the backward begins and read by it, largest first.
        remats: Recomputed ops, the most costly first.
        tangent_bytes: Bytes of the gradients of the forward's outputs other than scalars. AOTAutograd materialises them, as
            zeros, even for outputs that no loss depends on.
        peak: The values that are live at the peak, each with the reason.
        remarks: Remarks on the plan of a step, such as what runs piece by piece.
    """

    saved: tuple[Saved, ...]
    remats: tuple[Remat, ...]
    tangent_bytes: int
    peak: Explanation
    remarks: tuple[str, ...] = ()

    def render(self, most: int = 10) -> str:
        """The explanation as text.

        Args:
            most: Number of lines of each list; the rest is summed up.
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

    def __str__(self) -> str:
        """The text of `render`."""
        return self.render()


def explain(step: Step | Graph, plan: Plan | None = None, *, curve: Curve | None = None) -> StepExplanation:
    """List the tensors that a planned step saves and the ops that it recomputes, with module path, bytes and time.

    Args:
        step: A compiled step, or its graph.
        plan: The plan, if ``step`` is a graph; by default the one that keeps everything.
        curve: Plans of the same graph for other budgets, to show how much time one MiB more would save.

    Raises:
        WrongGraphError: The plan is for another graph.
        OptionError: ``step`` is neither a step nor a graph, such as what `torch.compile` returns.

    Examples:
        >>> import torch
        >>> from checkmate.torch import compile, explain
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
        >>> x = torch.ones(4, 8)
        >>> step = compile(model, torch.nn.functional.mse_loss, example=(x, x))
        >>> [(s.name, s.size_bytes) for s in explain(step).saved]
        [('addmm', 128), ('gelu', 128)]
    """
    if not isinstance(step, (Step, Graph)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(
            f"{type(step).__name__} cannot be explained: only a step of checkmate.torch.compile or a graph can",
            hint="give explain the step of checkmate.torch.compile(model, loss, example=(x, y), budget=...) for the same model, "
            "or the graph of checkmate.torch.capture(model, loss, example=(x, y))",
        )
    graph = step.graph if isinstance(step, Step) else step
    chosen = step.plan if isinstance(step, Step) else plan
    if chosen is None:
        chosen = Plan.from_order(graph, range(len(graph.ops)))
    peak = explain_plan(graph, chosen, curve=curve)
    tangents = () if graph.boundary is None else graph.ops[graph.boundary].outputs
    large = [v for v in tangents if not is_scalar_tangent(graph.values[v])]
    return StepExplanation(
        saved=tuple(_saved(graph, chosen)),
        remats=peak.remats,
        tangent_bytes=sum(graph.values[v].size_bytes for v in large),
        peak=peak,
        remarks=step.result.remarks if isinstance(step, Step) else (),
    )


def _saved(graph: Graph, plan: Plan) -> Iterable[Saved]:
    begins = next(
        (p for p, s in enumerate(plan.steps) if isinstance(s, Compute) and _begins_backward(graph, s.op)), len(plan.steps)
    )
    # A storage is saved if it was written before the backward begins and was not freed or recomputed before it is read there.
    live: set[int] = set()
    found: dict[int, None] = {}
    for p, step in enumerate(plan.steps):
        if isinstance(step, Compute):
            if p >= begins:
                reads = () if step.op == graph.boundary else graph.ops[step.op].inputs
                found.update((graph.root[v], None) for v in reads if v in live)
                live.difference_update(graph.ops[step.op].outputs)
            else:
                live.update(graph.ops[step.op].outputs)
        else:
            live.discard(step.value)
    owners = (v for v in found if graph.values[v].size_bytes)
    rows = [
        Saved(graph.values[v].name, (op := graph.ops[graph.producer[v]]).kind, graph.values[v].size_bytes, op.source)
        for v in owners
    ]
    return sorted(rows, key=lambda s: (-s.size_bytes, s.name))


def _begins_backward(graph: Graph, op: int) -> bool:
    return op == graph.boundary or graph.ops[op].phase == "backward"


def _at(source: str) -> str:
    return f" in {source}" if source else ""
