"""Options that several verbs share, and amounts as they are printed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from checkmate.cli import files, terminal
from checkmate.core.budget import Budget, keep_all_bytes
from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.plan import HostMemory
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, Progress, Result
from checkmate.core.units import format_bytes, format_cost
from checkmate.cost.device import load_device
from checkmate.solvers.registry import by_name
from checkmate.solvers.solve import solve

Count = Annotated[int, Parameter(validator=Number(gte=1))]
"""A number from one."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Search:
    """The solver, and when it stops.

    Attributes:
        solver: Name of the solver; `checkmate solvers` lists them.
        time_limit: Time limit in seconds of wall time.
        gap: Optimality gap at which the solve stops.
        seed: Seed of all randomness.
        threads: Maximum number of threads of the solver.
    """

    solver: str = "auto"
    time_limit: float = 60.0
    gap: float = 0.005
    seed: int = 0
    threads: int = 1

    def limits(self) -> Limits:
        """The limits of the solve."""
        return Limits(time_s=self.time_limit, gap=self.gap, seed=self.seed, threads=self.threads)

    def solve_drawn(self, problem: Problem) -> Result:
        """Solve with a progress line on stderr, if it is a terminal."""
        unit, solver = problem.graph.cost_unit, by_name(self.solver)
        with terminal.drawn("looking for a plan") as say:
            return solve(problem, solver, limits=self.limits(), on_progress=lambda progress: say(_line(progress, unit)))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Rules:
    """Rules for a plan.

    Attributes:
        recompute: The ops that a plan can recompute.
        reorder: Whether a plan can change the order of the graph.
    """

    recompute: Literal["all", "forward"] = "all"
    reorder: Annotated[bool, Parameter(negative="--no-reorder")] = True


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Copies:
    """The host that values are copied to.

    Attributes:
        host: Memory of the host that values can be copied to, such as 32GiB; none by default. It needs --device.
        device: Name of a device, or path of a profile, whose bus to the host the copies take.
    """

    host: str | None = None
    device: str | None = None

    def memory(self) -> HostMemory | None:
        """The host with the bus of the device; None without both."""
        if self.host is None and self.device is None:
            return None
        if self.host is None or self.device is None:
            raise OptionError(
                "--host and --device belong together: how much memory of the host may be used, and over which bus",
                hint="give both, such as --host 32GiB --device H100",
            )
        return load_device(self.device).host_memory(self.host)


@dataclass(frozen=True)
class Amounts:
    """The graph of a file, and its amounts as they are printed."""

    path: Path
    graph: Graph

    @classmethod
    def of(cls, path: Path) -> Amounts:
        """The amounts of a graph file."""
        return cls(path, files.load(path, Graph))

    def __str__(self) -> str:
        digest = self.graph.digest.removeprefix("sha256:")[:8]
        return f"{self.path}  {len(self.graph.ops)} ops, {len(self.graph.values)} values, sha256 {digest}"

    @cached_property
    def keep_all_bytes(self) -> int:
        """Peak of keeping everything."""
        return keep_all_bytes(self.graph)

    def data(self) -> dict[str, Any]:
        """File, digest, sizes and unit of the graph, for JSON."""
        sizes = {"resident_bytes": self.graph.resident_bytes, "keep_all_bytes": self.keep_all_bytes}
        return {"graph": str(self.path), "graph_digest": self.graph.digest, **sizes, "cost_unit": self.graph.cost_unit}

    def budget(self, budget_bytes: int, asked: Budget | None = None) -> str:
        """A budget relative to the peak of keeping everything; a share that the user gave stays a share."""
        if asked is not None and asked.is_share:
            return asked.describe(budget_bytes, self.keep_all_bytes)
        budget, keep_all = format_bytes(budget_bytes), format_bytes(self.keep_all_bytes)
        if budget_bytes > self.keep_all_bytes:
            return f"{budget}, more than the {keep_all} that keeping everything needs"
        share = format_share(budget_bytes / max(1, self.keep_all_bytes))
        return f"{budget}, {share} of the {keep_all} that keeping everything needs"

    def cost(self, cost: float) -> str:
        """A cost with its unit."""
        return format_cost(cost, self.graph.cost_unit)


def format_share(share: float | None, digits: int = 1) -> str:
    """Format a share as a percentage, or None as a dash.

    Examples:
        >>> format_share(0.0042, 2), format_share(None)
        ('0.42%', '-')
    """
    return "-" if share is None else f"{100 * share:.{digits}f}%"


def one_word(budget: str) -> str:
    """A budget without its spaces: a single word for a shell, which `Budget.parse` reads.

    Examples:
        >>> one_word("8 GiB"), one_word(" 50 % ")
        ('8GiB', '50%')
    """
    return "".join(budget.split())


def _line(progress: Progress, unit: str) -> str:
    bound = format_cost(progress.bound, unit) if progress.bound < float("inf") else "none"
    if progress.cost is None:
        return f"no plan yet, bound {bound}"
    gap = max(0.0, 1 - progress.bound / progress.cost) if progress.cost else 0.0
    return f"best {format_cost(progress.cost, unit)}, bound {bound}, gap {format_share(gap, 2)}"
