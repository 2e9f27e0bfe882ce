"""Retention intervals in CP-SAT: the child's side of `checkmate.solvers.intervals`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from checkmate.solvers.backends.child import serve


def solve(job: dict[str, Any], say: Callable[[Any], None]) -> dict[str, Any]:
    """Build the model, search, and send every better order of computations.

    Args:
        job: ``inputs``, ``outputs``, ``cost``, ``workspace``, ``replay``, ``times`` (most computations) and
            ``last`` (last stage) of each op, ``size`` and ``kept`` of each value, ``budget``, ``hint`` (an
            order, or None), ``gap``, ``threads``, ``seed`` and ``until``.
        say: Takes an order.
    """
    from ortools.sat.python import cp_model

    intervals = _Intervals(job)

    class Better(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            say(intervals.order(self.value))

    solver = cp_model.CpSolver()
    if job["until"] is not None:
        solver.parameters.max_time_in_seconds = max(0.01, job["until"] - time.monotonic())
    solver.parameters.num_workers = job["threads"]
    solver.parameters.random_seed = job["seed"]
    solver.parameters.relative_gap_limit = job["gap"]
    status = solver.solve(intervals.model, Better())
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return {
        "infeasible": status == cp_model.INFEASIBLE,
        "invalid": status == cp_model.MODEL_INVALID,
        "bound": solver.best_objective_bound if found else None,
    }


class _Intervals:
    """The model. Time is a place in the stages: stage t may compute ops 0..t, and computes t for the first time.

    Computation j of an op starts at a place reserved for the op in a stage in which it may run, and each of its outputs is
    retained from there to an end. A read needs a retention interval of its value that starts before it
    and has not ended. At every place the sizes of the intervals over it fit the budget.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        from ortools.sat.python import cp_model

        self.job = job
        self.domain = cp_model.Domain.from_values
        self.model = cp_model.CpModel()
        self.ops = len(job["cost"])
        self.horizon = self.place(self.ops, self.ops)
        self.start: list[list[Any]] = []
        self.present: list[list[Any]] = []
        self.end: dict[int, list[Any]] = {}
        self.memory: list[tuple[Any, int]] = []
        for o in range(self.ops):
            self._add_computations(o)
        for o in range(self.ops):
            self._add_retention(o)
        for o in range(self.ops):
            self._add_reads(o)
        self._add_kept()
        self.model.add_cumulative([i for i, _ in self.memory], [size for _, size in self.memory], job["budget"])
        self.model.minimize(sum(cost * p for cost, row in zip(job["cost"], self.present, strict=True) for p in row))
        if job["hint"] is not None:
            self._add_hint(job["hint"])

    def place(self, stage: int, o: int) -> int:
        """Place of an op in a stage."""
        return stage * (stage + 1) // 2 + o

    def order(self, value: Callable[[Any], int]) -> list[int]:
        """Ops of a solution as they are computed."""
        runs = [(value(s), o) for o in range(self.ops) for s, p in zip(self.start[o], self.present[o], strict=True) if value(p)]
        return [o for _, o in sorted(runs)]

    def _add_computations(self, o: int) -> None:
        model, job = self.model, self.job
        starts, present = [model.new_constant(self.place(o, o))], [model.new_constant(1)]
        stages = range(o + 1, min(job["last"][o], self.ops) + 1)
        for j in range(1, job["times"][o] if stages else 1):
            starts.append(model.new_int_var_from_domain(self.domain([self.place(t, o) for t in stages]), f"s{o}.{j}"))
            present.append(model.new_bool_var(f"a{o}.{j}"))
            model.add_implication(present[j], present[j - 1])
            model.add(starts[j - 1] < starts[j]).only_enforce_if(present[j])
        self.start.append(starts)
        self.present.append(present)
        for s, p in zip(starts, present, strict=True):
            self._occupy(s, s, p, job["workspace"][o])
        if job["replay"][o] and len(starts) > 1:
            last = model.new_int_var(0, self.horizon, f"replay{o}")
            for s, p in zip(starts, present, strict=True):
                model.add(last >= s).only_enforce_if(p)
            self._occupy(starts[0], last, present[1], job["replay"][o])

    def _add_retention(self, o: int) -> None:
        model = self.model
        for v in self.job["outputs"][o]:
            self.end[v] = [model.new_int_var(self.place(o, o), self.horizon, f"e{v}.{j}") for j in range(len(self.start[o]))]
            for j, (s, p, e) in enumerate(zip(self.start[o], self.present[o], self.end[v], strict=True)):
                model.add(s <= e).only_enforce_if(p)
                if j:
                    model.add(self.end[v][j - 1] < s).only_enforce_if(p)
                self._occupy(s, e, p, self.job["size"][v])

    def _occupy(self, start: Any, end: Any, present: Any, size: int) -> None:
        """Bytes from one place to another, both included."""
        if size:
            length = self.model.new_int_var(1, self.horizon + 1, f"l{len(self.memory)}")
            interval = self.model.new_optional_interval_var(start, length, end + 1, present, f"i{len(self.memory)}")
            self.memory.append((interval, size))

    def _add_reads(self, o: int) -> None:
        model, job = self.model, self.job
        maker = {v: p for p in range(self.ops) for v in job["outputs"][p]}
        for v in job["inputs"][o]:
            p = maker[v]
            for i, (s, present) in enumerate(zip(self.start[o], self.present[o], strict=True)):
                serves: list[Any] = []
                for j in range(len(self.start[p])):
                    serve_it = model.new_bool_var(f"c{o}.{i}.{v}.{j}")
                    model.add_implication(serve_it, self.present[p][j])
                    model.add(self.start[p][j] < s).only_enforce_if(serve_it)
                    model.add(self.end[v][j] >= s).only_enforce_if(serve_it)
                    serves.append(serve_it)
                model.add_bool_or(serves).only_enforce_if(present)

    def _add_kept(self) -> None:
        for o in range(self.ops):
            for v in self.job["outputs"][o]:
                if not self.job["kept"][v]:
                    continue
                to_end: list[Any] = []
                for j, p in enumerate(self.present[o]):
                    held = self.model.new_bool_var(f"k{v}.{j}")
                    self.model.add_implication(held, p)
                    self.model.add(self.end[v][j] == self.horizon).only_enforce_if(held)
                    to_end.append(held)
                self.model.add_bool_or(to_end)

    def _add_hint(self, order: list[int]) -> None:
        stage, times = 0, [0] * self.ops
        for o in order:
            j = times[o]
            times[o] += 1
            if 0 < j < len(self.start[o]):
                self.model.add_hint(self.present[o][j], 1)
                self.model.add_hint(self.start[o][j], self.place(stage, o))
            stage += o == stage
        for o, row in enumerate(self.present):
            for p in row[max(1, times[o]) :]:
                self.model.add_hint(p, 0)


if __name__ == "__main__":
    serve(solve)
