"""The program of event cuts as ``docs/explanation/event_cuts.md`` states it, row by row: nothing is left out or folded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from checkmate import Problem
from checkmate.solvers.bounds.events.event_cuts import BUDGET_SLACK

Term = tuple[float, object]


@dataclass
class Rows:
    """Rows over named variables, each from 0 to 1; a name that was fixed is a constant."""

    fixed: dict[object, float] = field(default_factory=dict)
    index: dict[object, int] = field(default_factory=dict)
    rows: list[dict[int, float]] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def at_most(self, terms: Iterable[Term], limit: float) -> None:
        """The sum of coefficient times variable is no more than a limit."""
        row: dict[int, float] = {}
        for coefficient, name in terms:
            if name in self.fixed:
                limit -= coefficient * self.fixed[name]
            else:
                column = self.index.setdefault(name, len(self.index))
                row[column] = row.get(column, 0.0) + coefficient
        self.rows.append(row)
        self.limits.append(limit)

    def least(
        self, cost: dict[object, float], *, integral: bool = False, zero: Callable[[object], bool] = lambda _: False
    ) -> float:
        """Least cost over all points, or over those with some variables at zero; infinite if there is none."""
        for name in cost.keys() - self.fixed.keys():
            self.index.setdefault(name, len(self.index))
        weights = np.zeros(len(self.index))
        for name, weight in cost.items():
            if name in self.index:
                weights[self.index[name]] = weight
        if not len(weights):
            return 0.0 if all(limit >= -1e-9 for limit in self.limits) else math.inf
        high = np.array([0.0 if zero(name) else 1.0 for name in self.index])
        matrix = np.zeros((len(self.rows), len(weights)))
        for r, row in enumerate(self.rows):
            matrix[r, list(row)] = list(row.values())
        if integral:
            constraint = LinearConstraint(matrix, ub=np.array(self.limits))
            solved = milp(weights, constraints=constraint, bounds=Bounds(0, high), integrality=np.ones(len(weights)))
        else:
            solved = linprog(weights, A_ub=matrix, b_ub=self.limits, bounds=np.stack([0 * high, high], axis=1), method="highs")
        return float(solved.fun) if solved.success else math.inf


def strict_ancestors(problem: Problem) -> list[set[int]]:
    """For each op and END, the ops whose first computation comes before its own in every plan."""
    graph = problem.graph
    end = len(graph.ops)
    parents = [{graph.producer[v] for v in op.inputs} for op in graph.ops] + [set(range(end))]
    for a, b in graph.order:
        parents[b].add(a)
    for o, op in enumerate(graph.ops):
        for c in op.clobbered_by:
            parents[c].add(o)
    above: list[set[int]] = []
    for direct in parents:
        above.append(direct.union(*(above[p] for p in direct)))
    return above


def event_sides(problem: Problem, t: int, targets: Sequence[int] | None) -> tuple[set[int], set[int]]:
    """A and D of the event of an op: ops computed before it in every plan, and in none; with ``targets``, in every plan
    that first computes these ops in their order."""
    above = strict_ancestors(problem)
    everything = range(len(above))
    if targets is None or t not in targets:
        return above[t], {o for o in everything if t in above[o]}
    place = list(targets).index(t)
    sure = {*targets[:place], t}.union(*(above[o] for o in (*targets[:place], t)))
    late = {*targets[place + 1 :], len(above) - 1}
    return sure - {t}, late | {o for o in everything if above[o] & late}


def least_share(
    problem: Problem,
    cuts: Sequence[int],
    *,
    floating: bool = True,
    targets: Sequence[int] | None = None,
    integral: bool = False,
    all_segments: bool = False,
) -> float:
    """Least recomputation of a program, as a share of computing every op once; infinite if no point satisfies it."""
    total = max(1, problem.graph.cost)
    ops = enumerate(problem.graph.ops)
    cost: dict[object, float] = {("y", e, e + 1, o): op.cost / total for o, op in ops for e in range(len(cuts))}
    rows = stated_rows(problem, cuts, floating=floating, targets=targets, all_segments=all_segments)
    return rows.least(cost, integral=integral)


def stated_rows(
    problem: Problem,
    cuts: Sequence[int],
    *,
    floating: bool = True,
    targets: Sequence[int] | None = None,
    all_segments: bool = False,
) -> Rows:
    """All rows of a program, over variables ``("X", e, o)``, ``("S", e, k)`` and ``("y", e, f, o)``."""
    graph = problem.graph
    end, last = len(graph.ops), len(cuts)
    inputs = [set(op.inputs) for op in graph.ops] + [{v for v, value in enumerate(graph.values) if value.kept}]
    above = strict_ancestors(problem)
    sides = [event_sides(problem, t, targets) for t in cuts]
    program = Rows()
    hidden: list[set[int]] = []  # ops that float and are not modelled
    again: list[set[int]] = []  # ops with a y after each event
    for e, t in enumerate(cuts):
        sure, late = sides[e]
        beside = set(range(end + 1)) - sure - late - {t}
        hidden.append(set() if floating else beside)
        program.fixed.update({("X", e, o): 1.0 for o in sure} | {("X", e, o): 0.0 for o in late | {t}})
        # An op first computed in the segment supplies its values then: it needs no y before its first computation.
        again.append(
            {
                o
                for o in (sure | {t} | beside) - hidden[e] - {end}
                if graph.ops[o].recomputable
                and (problem.recompute == "all" or graph.ops[o].phase == "forward")
                and not (set(graph.ops[o].clobbered_by) & (sure | {t}))
            }
        )
    hidden.append(set())
    program.fixed.update({("X", last, o): 1.0 for o in range(end + 1)})
    begins = last if all_segments else 0
    longer = [(e, f) for e in range(begins) for f in range(e + 2, last)]
    to_end = [(e, last) for e in range(last - 1)]
    pairs = [(e, e + 1) for e in range(last)] + longer + to_end
    program.fixed.update({("y", e, f, o): 0.0 for e, f in pairs for o in range(end + 1) if o not in again[e]})

    for e, t in enumerate(cuts):
        sure, late = sides[e]
        outputs = graph.ops[t].outputs
        program.fixed.update({("S", e, k): 1.0 for k in inputs[t]})
        for k in range(len(graph.values)):
            if k in inputs[t]:
                continue
            if graph.producer[k] in hidden[e]:
                program.fixed["S", e, k] = 0.0
            else:
                program.at_most([(1.0, ("S", e, k)), (-1.0, ("X", e, graph.producer[k]))], 0.0)
        own = graph.ops[t].workspace_bytes + sum(graph.values[k].size_bytes for k in outputs)
        room = problem.budget_bytes - graph.resident_bytes
        scale = max(1, room)
        rest = [(graph.values[k].size_bytes / scale, ("S", e, k)) for k in range(len(graph.values)) if k not in outputs]
        states = [(graph.ops[o].replay_bytes / scale, ("y", e, last, o)) for o in sure]
        program.at_most([*rest, *states], (room * (1 + BUDGET_SLACK) - own) / scale)
        for o in set(range(end)) - hidden[e]:
            for p in above[o] - hidden[e]:
                program.at_most([(1.0, ("X", e, o)), (-1.0, ("X", e, p))], 0.0)
            if o not in hidden[e + 1]:
                program.at_most([(1.0, ("X", e, o)), (-1.0, ("X", e + 1, o))], 0.0)

    for e, f in pairs:

        def needed(k: int, need: list[Term], e: int = e, f: int = f) -> None:
            p = graph.producer[k]
            if p not in hidden[e] | hidden[f]:
                supply = [(-1.0, ("S", e, k)), (-1.0, ("y", e, f, p)), (-1.0, ("X", f, p)), (1.0, ("X", e, p))]
                program.at_most([*need, *supply], 0.0)

        for k in range(len(graph.values)):
            if f < last:
                needed(k, [(1.0, ("S", f, k))])
        for o in range(end + 1):
            redo: list[Term] = [(1.0, ("y", e, f, o))] if o in again[e] else []
            first: list[Term] = [(1.0, ("X", f, o)), (-1.0, ("X", e, o))] if o not in hidden[e] | hidden[f] else []
            # Between neighbouring events an op is not computed again where it is first computed: one need for both, unless the
            # DAG says where that is.
            floats = {("X", e, o), ("X", f, o)} - program.fixed.keys()
            for need in [redo + first] if f == e + 1 and floats else [redo, first]:
                for k in inputs[o] if need else ():
                    needed(k, need)
            if f == e + 1 and redo and ("X", e, o) in floats and o not in hidden[e]:
                program.at_most([*redo, (-1.0, ("X", e, o))], 0.0)
    for e, middle, f in [(e, f - 1, f) for e, f in longer] + [(e, e + 1, last) for e, _ in to_end]:
        for o in range(end):
            whole, first, then = ("y", e, f, o), ("y", e, middle, o), ("y", middle, f, o)
            program.at_most([(1.0, whole), (-1.0, first), (-1.0, then)], 0.0)
            program.at_most([(1.0, first), (-1.0, whole)], 0.0)
            if o in again[e]:
                program.at_most([(1.0, then), (-1.0, whole)], 0.0)
    for e in range(min(begins, last - 2)):
        for o in range(end):
            program.at_most([(1.0, ("y", e, last - 1, o)), (-1.0, ("y", e, last, o))], 0.0)
    return program
