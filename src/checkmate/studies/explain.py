"""Explanation of a plan: the bytes at its peak with the reason for each, and the cost of its recomputations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from checkmate.core.errors import WrongGraphError, printable
from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Plan
from checkmate.core.result import Curve
from checkmate.core.simulate import simulate
from checkmate.core.units import format_bytes, format_cost
from checkmate.studies.lessons import lessons, module_of
from checkmate.studies.lifetimes import StorageLifetime, replays, storage_lifetimes

Kind = Literal["resident", "value", "workspace", "replay"]


class Held(NamedTuple):
    """Bytes held at the peak.

    Attributes:
        kind: ``"resident"``, ``"value"`` (storage), ``"workspace"`` or ``"replay"`` (a random generator's state).
        name: Name of the value, or of the op that has the workspace or replay state.
        size_bytes: The bytes.
        why: The reason why they are held, in words.
        source: Origin of the op that made them: file and line, or module path.
        value: The value that owns the storage, else None.
        op: The op that made the storage, has the workspace or is computed again, else None.
    """

    kind: Kind
    name: str
    size_bytes: int
    why: str
    source: str = ""
    value: int | None = None
    op: int | None = None


class Remat(NamedTuple):
    """An op that a plan computes again.

    Attributes:
        op: The op.
        name: Its name.
        times: Number of recomputations.
        cost: Cost of the recomputations, in the graph's ``cost_unit``.
        source: Origin of the op: file and line, or module path.
    """

    op: int
    name: str
    times: int
    cost: int
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation:
    """Explanation of a plan; `str` gives it as text.

    Attributes:
        peak_bytes: The peak, resident bytes included.
        peak_step: First step at which it is reached.
        peak_op: Op that runs there, or None in a plan that computes nothing.
        peak_name: Its name, with its source.
        held: Bytes held then, largest first; they sum to the peak.
        cost: Cost of the plan, in ``cost_unit``.
        overhead: Cost over the cost of computing each op once.
        cost_unit: Unit of costs.
        remats: Ops computed again, the most costly first.
        dearer_per_mib: Cost of one MiB less, by the next plan of the curve with a lower peak; None without one.
        cheaper_per_mib: Saving of one MiB more, by the next plan with a higher peak; None without one.
        has_curve: Whether a curve was given.
        lessons: Sentences on the kinds of ops and the layers that the plan keeps or recomputes, and on the price of a MiB.
    """

    peak_bytes: int
    peak_step: int
    peak_op: int | None
    peak_name: str
    held: tuple[Held, ...]
    cost: int
    overhead: float
    cost_unit: str
    remats: tuple[Remat, ...]
    dearer_per_mib: float | None
    cheaper_per_mib: float | None
    has_curve: bool
    lessons: tuple[str, ...] = ()

    def render(self, most: int = 10) -> str:
        """The explanation as text.

        Args:
            most: Most lines of each list.
        """
        lines = [
            *self.lessons,
            f"peak {format_bytes(self.peak_bytes)} at step {self.peak_step}, while {self.peak_name or 'nothing'} runs",
        ]
        lines += listed([(h.size_bytes, f"{h.name}{_at(h.source)}: {h.why}") for h in self.held], format_bytes, most)
        again = sum(r.cost for r in self.remats)
        lines.append(
            f"cost {format_cost(self.cost, self.cost_unit)}, {self.overhead:.4f} of keeping everything; "
            f"recomputations: {sum(r.times for r in self.remats)}, {format_cost(again, self.cost_unit)}"
        )
        again_rows = [(r.cost, f"{r.name}{_at(r.source)}, {r.times} x") for r in self.remats]
        lines += listed(again_rows, lambda cost: format_cost(cost, self.cost_unit), most)
        lines += self._prices()
        return "\n".join(printable(line) for line in lines)

    def __repr__(self) -> str:
        """The text of `render`."""
        return self.render()

    __str__ = __repr__

    def _prices(self) -> list[str]:
        if not self.has_curve:
            return ["give a curve of other plans (`pareto`) to see what one MiB less costs"]
        less = "no plan of the curve peaks lower"
        if self.dearer_per_mib is not None:
            less = f"one MiB less costs {format_cost(self.dearer_per_mib, self.cost_unit)}"
        more = "more memory saves nothing"
        if self.cheaper_per_mib is not None:
            more = f"one MiB more saves {format_cost(self.cheaper_per_mib, self.cost_unit)}"
        return [f"{less}; {more}"]


def explain(graph: Graph, plan: Plan, *, curve: Curve | None = None) -> Explanation:
    """Explain a plan: the bytes at its peak, the reason for each, its recomputations, and the cost of one MiB less.

    Args:
        graph: The graph.
        plan: The plan.
        curve: Plans of the same graph for other budgets (`pareto`), for the cost of one MiB less.

    Raises:
        PlanError: The plan cannot be run.
        WrongGraphError: The plan or the curve was made for another graph.

    Examples:
        >>> chain = Graph.from_dag(cost=[1, 2, 3], size_bytes=[4, 2, 1], edges=[(0, 1), (0, 2), (1, 2)], names=list("abc"))
        >>> print(explain(chain, Plan.from_order(chain, [0, 1, 2])))
        peak 7 B at step 2, while `c` runs
                  4 B  a: read by `c`, which is running
                  2 B  b: read by `c`, which is running
                  1 B  c: made by `c`, which is running
        cost 6 ns, 1.0000 of keeping everything; recomputations: 0, 0 ns
        give a curve of other plans (`pareto`) to see what one MiB less costs
    """
    timeline = simulate(graph, plan)
    if curve is not None and curve.graph_digest != graph.digest:
        raise WrongGraphError(
            f"the curve was made for another graph ({curve.graph_digest[:15]}, not {graph.digest[:15]})",
            hint="make the curve of this graph with `pareto`",
        )
    step = timeline.peak_step
    running = plan.steps[step] if plan.steps else None
    op = running.op if isinstance(running, Compute) else None
    dearer, cheaper = _prices(curve, timeline.peak_bytes, timeline.cost) if curve is not None else (None, None)
    return Explanation(
        peak_bytes=timeline.peak_bytes,
        peak_step=step,
        peak_op=op,
        peak_name="" if op is None else f"`{graph.ops[op].name}`{_at(graph.ops[op].source)}",
        held=held_at(graph, plan, step),
        cost=timeline.cost,
        overhead=graph.overhead(timeline.cost),
        cost_unit=graph.cost_unit,
        remats=remats(graph, plan),
        dearer_per_mib=dearer,
        cheaper_per_mib=cheaper,
        has_curve=curve is not None,
        lessons=lessons(graph, plan, priced=curve is None),
    )


def remats(graph: Graph, plan: Plan) -> tuple[Remat, ...]:
    """Ops that a plan computes more than once, the most costly first."""
    times = Counter(plan.order)
    return more_often(graph, times, Counter(times.keys()))


def more_often(graph: Graph, times: Counter[int], other: Counter[int]) -> tuple[Remat, ...]:
    """Ops that are computed more often than in another plan, with the difference, the most costly first."""
    more = {o: n - other[o] for o, n in times.items() if n > other[o]}
    found = (Remat(o, graph.ops[o].name, n, n * graph.ops[o].cost, graph.ops[o].source) for o, n in more.items())
    return tuple(sorted(found, key=lambda r: (-r.cost, r.op)))


def listed(rows: Sequence[tuple[int, str]], text: Callable[[int], str], most: int) -> list[str]:
    """Lines of amounts with their descriptions, and one line for the sum of those beyond the most that are shown."""
    lines = [f"  {text(amount):>11}  {what}" for amount, what in rows[:most]]
    if rest := rows[most:]:
        lines.append(f"  {text(sum(amount for amount, _ in rest)):>11}  in {len(rest)} more")
    return lines


def held_at(graph: Graph, plan: Plan, step: int) -> tuple[Held, ...]:
    """Bytes that a plan holds while a step runs, resident ones included, largest first."""
    running = plan.steps[step] if plan.steps else None
    entries = [Held("resident", "resident", graph.resident_bytes, "there before and after, whatever the plan")]
    if isinstance(running, Compute):
        op = graph.ops[running.op]
        entries.append(Held("workspace", op.name, op.workspace_bytes, f"workspace of `{op.name}`", op.source, op=running.op))
    for replay in replays(graph, plan):
        if replay.first <= step <= replay.last:
            op = graph.ops[replay.op]
            why = f"to compute `{op.name}` again the same way"
            entries.append(Held("replay", op.name, op.replay_bytes, why, op.source, op=replay.op))
    for storage in storage_lifetimes(graph, plan):
        if storage.made_at <= step < storage.gone_at:
            value, maker = graph.values[storage.value], graph.producer[storage.value]
            why = _reason(graph, plan, storage, step)
            entries.append(Held("value", value.name, value.size_bytes, why, graph.ops[maker].source, storage.value, maker))
    kept = [entry for entry in entries if entry.size_bytes]
    return tuple(sorted(kept, key=lambda h: (-h.size_bytes, h.kind, -1 if h.value is None else h.value)))


def _reason(graph: Graph, plan: Plan, storage: StorageLifetime, step: int) -> str:
    """Why a storage is live while a step runs."""
    running = plan.steps[step]
    if isinstance(running, Compute) and step in (storage.made_at, *storage.reads):
        return f"{'read' if step in storage.reads else 'made'} by `{graph.ops[running.op].name}`, which is running"
    reader = next((plan.steps[p] for p in storage.reads if p > step), None)
    if isinstance(reader, Compute):
        op = graph.ops[reader.op]
        return f"next read by `{op.name}`{_at(op.source)}"
    return "kept to the end of the step" if storage.kept else "not read again; freed later"


class ModuleRemats(NamedTuple):
    """Recomputations of a plan in one module; for ops without a module, the name is their file and line, or their kind."""

    name: str
    ops: int
    times: int
    cost: int


def remats_by_module(graph: Graph, plan: Plan) -> tuple[ModuleRemats, ...]:
    """Recomputations of a plan by module, the most costly first."""
    groups: dict[str, list[int]] = {}
    for remat in remats(graph, plan):
        group = groups.setdefault(module_of(remat.source) or graph.ops[remat.op].kind or "ops without a source", [0, 0, 0])
        for index, amount in enumerate((1, remat.times, remat.cost)):
            group[index] += amount
    found = (ModuleRemats(name, *counts) for name, counts in groups.items())
    return tuple(sorted(found, key=lambda group: (-group.cost, group.name)))


def _prices(curve: Curve, peak_bytes: int, cost: int) -> tuple[float | None, float | None]:
    """Cost of one MiB less and saving of one MiB more, by the next plans of a curve.

    Plans whose peaks differ by less than half a per cent are skipped: plans of a search differ this much by chance, and a
    slope between them would be noise.
    """
    near = peak_bytes // 200
    lower = [p for p in curve.points if p.peak_bytes < peak_bytes - near and p.cost >= cost]
    higher = [p for p in curve.points if p.peak_bytes > peak_bytes + near and p.cost < cost]
    below = max(lower, key=lambda p: p.peak_bytes, default=None)
    above = min(higher, key=lambda p: p.peak_bytes, default=None)
    return (
        None if below is None else (below.cost - cost) * 2**20 / (peak_bytes - below.peak_bytes),
        None if above is None else (cost - above.cost) * 2**20 / (above.peak_bytes - peak_bytes),
    )


def _at(source: str) -> str:
    return f" ({source})" if source else ""
