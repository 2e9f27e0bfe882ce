"""Event cuts for plans with copies to the host and back: a lower bound on the time at which the step ends.

One event, the first computation of op t, as in `event_cuts`. Write T for the end of the step and split it at the moment at
which t begins: T = b + a. If a plan needs a value after the event, and the value is neither live at it nor computed again, it is
fetched after the event: z[i] = 1. Its storage was released before the event. A release waits for copies of the storage, so
the copy out was done by then. Hence every plan satisfies the rows of `event_cuts`, with z added to each supply row, and

    a >= time of the copies back of all i with z[i] = 1,        b >= time of their copies out,
    a >= cost of t, of its descendants and of y,                b >= cost of the ancestors of t,
    b + a >= cost of every op once and of y,                    bytes of all i with z[i] = 1 <= bytes of the host,

and more sharply, for a descendant k and an ancestor j of t:

    a >= copies back of the i that ops up to k read first + cost of k and its descendants: these i are read by then,
    b >= cost of j and its ancestors + copies out of the i that j or its descendants compute: these copies begin after that.

A value that is on the host before the step needs no copy out. Write R[w] = 1 if it is on the device when the step begins, hence
at the end too, and f[w] = 1 if a fetch of it is issued before the event. Then

    R[w] + f[w] >= 1 if t or an ancestor of t reads w,          bytes of all w with R[w] = 1 and of other kept values <= budget,
    S[w] <= R[w] + f[w],          R[w] <= S[w] + z[w],          b + a >= time of the copies of all f and z,
    b >= copies of the w that an ancestor j of t or of j reads + cost of j and of what is both after j and before t.

If z[i] = 1, then S[i] = y[i] = 0. Therefore a first computation that reads i has to wait for the copy. The least b + a
is a bound on the time of every plan, in any order, with any number of recomputations and copies. The omitted facts (the
times of the copies, the bytes between events) only loosen the bound.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from checkmate.core.plan import HostMemory
from checkmate.solvers.backends.program import Floats, Ints, ProgramBuilder
from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.events.event_cuts import BUDGET_SLACK, CutBuilder, CutProgram


def build_with_host(model: CutModel, event: int, host: HostMemory, least_ns: int) -> CutProgram:
    """The program of an event with copies. It minimises T less ``least_ns``, the cost of every op once, as a share of the cost.

    The model is for any order. Costs of ops do not include views (`FoldViews.of`), since times are absolute here.
    """
    return CutBuilder(model, (event,), True, add_copies=lambda cut: _add_times(cut, host, least_ns)).build()


def proven_ns(bound: float, model: CutModel, least_ns: int) -> float:
    """The lower bound on the end of every step that follows from a bound on the program."""
    # A plan with a larger b or a than the columns allow takes longer than their limit.
    return min(least_ns + model.total * max(0.0, bound), max(least_ns, _LONGEST * model.total))


_LONGEST = 8.0
"""Highest value of b and a, as a share of the cost of every op once."""


def _add_times(cut: CutBuilder, host: HostMemory, least_ns: int) -> None:
    """Columns of z, b, a and the wait, and their rows; all times are shares of the cost of every op once."""
    m, builder, (t,) = cut.model, cut.builder, cut.cuts
    values = np.flatnonzero(cut.live[0] >= 0)
    fetched = cut.fetched[values] = builder.add_columns(np.zeros(len(values)))
    before, after = builder.add_columns(np.zeros(2), high=_LONGEST, integral=False)
    (wait,) = builder.add_columns(np.ones(1), high=2 * _LONGEST, integral=False)
    redo = cut.recomputed[0, 1]
    again = np.flatnonzero(redo >= 0)
    columns, costs = redo[again], m.cost[again] / m.total
    none, no_cost = columns[:0], costs[:0]

    at_least = partial(_at_least, builder)
    # b + a is at most the sum of all computations and waits, which is the objective.
    at_least({wait: 1.0, before: -1.0, after: -1.0}, columns, costs, -least_ns / m.total)
    above, below = m.sides(t)
    at_least({after: 1.0}, columns, -costs, (m.cost[t] + m.cost[below].sum()) / m.total)
    at_least({before: 1.0}, none, no_cost, m.cost[above].sum() / m.total)
    size = m.size[values].astype(np.float64)
    _add_host(cut, values, fetched, host)
    copy_in = np.array([host.in_ns(int(s)) for s in size]) / m.total
    there = np.array([x.on_host for x in m.problem.graph.values])
    out = host.out_bytes_per_s > 0
    copy_out = np.array([host.out_ns(int(m.size[v])) if out and not there[v] else 0 for v in values]) / m.total
    stays = fetched[~there[values]] if not out else fetched[:0]
    builder.add_row(stays, np.ones(len(stays)), high=0.0)
    for k in _some(np.flatnonzero(below)[:-1]):
        upto, behind = m.sides(k)
        readers = upto & below
        readers[k] = True
        needed = np.isin(values, m.edge_value[readers[m.edge_op]])
        at_least({after: 1.0}, fetched[needed], -copy_in[needed], (m.cost[k] + m.cost[behind].sum()) / m.total)
    at_least({after: 1.0}, fetched, -copy_in, 0.0)
    for j in _some(np.flatnonzero(above)):
        ahead, following = m.sides(j)
        made = following[m.producer[values]] | (m.producer[values] == j)
        at_least({before: 1.0}, fetched[made], -copy_out[made], (m.cost[j] + m.cost[ahead].sum()) / m.total)
    at_least({before: 1.0}, fetched, -copy_out, 0.0)
    if there.any():
        _add_streams(cut, (before, after), np.flatnonzero(there), host)


def _add_streams(cut: CutBuilder, times: tuple[int, int], frozen: Ints, host: HostMemory) -> None:
    """Columns of R and f, and their rows: of values that are on the host before the step."""
    m, builder, (t,), (before, after) = cut.model, cut.builder, cut.cuts, times
    copy_in = np.array([host.in_ns(int(s)) for s in m.size]) / m.total
    above, _ = m.sides(t)
    begun, early = builder.add_columns(np.zeros(len(frozen))), builder.add_columns(np.zeros(len(frozen)))
    copies, fetched = copy_in[frozen], np.flatnonzero(cut.fetched >= 0)
    first = above.copy()
    first[t] = True
    read = np.isin(frozen, m.edge_value[first[m.edge_op]])
    builder.add_rows([(begun[read], 1.0), (early[read], 1.0)], low=1.0)
    live, again = cut.live[0, frozen], cut.fetched[frozen]
    use = live >= 0
    builder.add_rows([(begun[use], 1.0), (early[use], 1.0), (live[use], -1.0)], low=0.0)
    builder.add_rows([(live[use], 1.0), (again[use], 1.0), (begun[use], -1.0)], low=0.0)
    kept = int(m.size[m.inputs[m.end]].sum())
    most = max(0.0, cut.budget * (1 + BUDGET_SLACK) - kept) / max(1, cut.budget)
    builder.add_row(begun, m.size[frozen] / max(1, cut.budget), high=most)
    moved = np.concatenate([copies, copy_in[fetched]])
    _at_least(builder, {before: 1.0, after: 1.0}, np.concatenate([early, cut.fetched[fetched]]), -moved, 0.0)
    away = np.setdiff1d(fetched, frozen)  # the host holds their copies at the event, and all weights that are ever fetched
    _add_host(cut, np.concatenate([frozen, away]), np.concatenate([early, cut.fetched[away]]), host)
    for j in _some(np.flatnonzero(above)):
        ahead, following = m.sides(j)
        readers = ahead.copy()
        readers[j] = True
        needed = np.isin(frozen, m.edge_value[readers[m.edge_op]])
        passed = (m.cost[j] + m.cost[following & above].sum()) / m.total
        _at_least(builder, {before: 1.0}, early[needed], -copies[needed], passed)


def _add_host(cut: CutBuilder, values: Ints, columns: Ints, host: HostMemory) -> None:
    """One row: the values whose columns are 1 are on the host at one time."""
    unit = max(1, host.bytes)
    cut.builder.add_row(columns, cut.model.size[values] / unit, high=host.bytes * (1 + BUDGET_SLACK) / unit)


def _at_least(builder: ProgramBuilder, times: dict[int, float], columns: Ints, entries: Floats, low: float) -> None:
    """One row: the times and the columns, each with its factor, sum to ``low`` or more."""
    factors = np.array(list(times.values()))
    builder.add_row(np.concatenate([np.array(list(times)), columns]), np.concatenate([factors, entries]), low=low)


def _some(ops: np.ndarray, most: int = 24) -> list[int]:
    """Ops spread evenly over a side of the event: each gives a row."""
    if len(ops) <= most:
        return ops.tolist()
    return ops[np.linspace(0, len(ops) - 1, most).astype(int)].tolist()
