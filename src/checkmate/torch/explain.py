"""What a planned step saves for its backward and what it computes again: where in the model, bytes and time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from checkmate.core.curve import Curve
from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Plan
from checkmate.core.units import format_bytes
from checkmate.studies.explain import Explanation, Remat
from checkmate.studies.explain import explain as explain_plan
from checkmate.torch.graph.storages import SCALAR_TANGENT_BYTES
from checkmate.torch.step.step import Step


class Saved(NamedTuple):
    """Storage that the backward reads and the forward made.

    Attributes:
        name: Name of the value that owns it.
        kind: The op that made it, such as ``aten.addmm.default``.
        size_bytes: Its bytes.
        source: Module path, file and line.
    """

    name: str
    kind: str
    size_bytes: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExplanation:
    """A planned step explained; ``str`` of it is a text for people.

    Attributes:
        saved: What is live when the backward begins and read by it, largest first.
        remats: Ops computed again, the most costly first.
        tangent_bytes: Gradients of the forward's outputs other than scalars. AOTAutograd makes them even for
            outputs that nobody uses, then full of zeros.
        peak: What fills the peak, and why.
    """

    saved: tuple[Saved, ...]
    remats: tuple[Remat, ...]
    tangent_bytes: int
    peak: Explanation

    def render(self, most: int = 10) -> str:
        """Text for people.

        Args:
            most: Most lines of each list.
        """
        total = sum(s.size_bytes for s in self.saved)
        lines = [f"saved for the backward: {format_bytes(total)} in {len(self.saved)} tensors"]
        lines += [f"  {format_bytes(s.size_bytes):>11}  {s.name} ({s.kind}){_at(s.source)}" for s in self.saved[:most]]
        if len(self.saved) > most:
            rest = self.saved[most:]
            lines.append(f"  {format_bytes(sum(s.size_bytes for s in rest)):>11}  in {len(rest)} more")
        if self.tangent_bytes:
            lines.append(
                f"gradients of outputs besides the loss: {format_bytes(self.tangent_bytes)}, zeros if nobody uses them; "
                "a call that returns only its loss has none"
            )
        return "\n".join([*lines, self.peak.render(most)])

    def __str__(self) -> str:
        """The text of `render`."""
        return self.render()


def explain(step: Step | Graph, plan: Plan | None = None, *, curve: Curve | None = None) -> StepExplanation:
    """What a planned step saves and computes again, with module path, source line, bytes and time.

    Args:
        step: A compiled step, or the graph of one.
        plan: The plan, where a graph is given.
        curve: Plans of the same graph for other budgets, from which the worth of a MiB is read.

    Raises:
        WrongGraphError: The plan is of another graph.

    Examples:
        >>> import torch
        >>> from checkmate.torch import compile, explain
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
        >>> x = torch.ones(4, 8)
        >>> step = compile(model, torch.nn.functional.mse_loss, example=(x, x))
        >>> [(s.name, s.size_bytes) for s in explain(step).saved]
        [('addmm', 128), ('gelu', 128)]
    """
    graph = step.graph if isinstance(step, Step) else step
    chosen = step.plan if isinstance(step, Step) else plan
    if chosen is None:
        chosen = Plan.from_order(graph, range(len(graph.ops)))
    peak = explain_plan(graph, chosen, curve=curve)
    tangents = () if graph.boundary is None else graph.ops[graph.boundary].outputs
    sizes = [graph.values[v].size_bytes for v in tangents]
    return StepExplanation(
        saved=tuple(_saved(graph, chosen)),
        remats=peak.remats,
        tangent_bytes=sum(size for size in sizes if size > SCALAR_TANGENT_BYTES),
        peak=peak,
    )


def _saved(graph: Graph, plan: Plan) -> Iterable[Saved]:
    begins = next((p for p, s in enumerate(plan.steps) if isinstance(s, Compute) and _turns(graph, s.op)), len(plan.steps))
    # Storage is there if it was made before the backward begins, and saved if what reads it later finds it still there.
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


def _turns(graph: Graph, op: int) -> bool:
    return op == graph.boundary or graph.ops[op].phase == "backward"


def _at(source: str) -> str:
    return f" in {source}" if source else ""
