"""``checkmate max-batch``: the largest batch that fits."""

from __future__ import annotations

from pathlib import Path

from checkmate.cli import amounts, files, terminal
from checkmate.cli.progress import drawn
from checkmate.cli.solvers import solver_named
from checkmate.core.budget import keep_all_bytes
from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.result import Limits
from checkmate.core.units import format_bytes
from checkmate.studies.affine import AffineGraph
from checkmate.studies.max_batch import ONE_EXTRA_FORWARD, MaxOverhead
from checkmate.studies.max_batch import max_batch as largest_batch


def max_batch(
    small: Path,
    large: Path | None = None,
    /,
    *,
    budget: str,
    batch: int,
    large_batch: int | None = None,
    max_overhead: str = ONE_EXTRA_FORWARD,
    solver: str = "auto",
    time_limit: float = 60.0,
    gap: float = 0.005,
    seed: int = 0,
    threads: int = 1,
    out: Path | None = None,
    json: terminal.Json = False,
) -> int:
    """Find the largest batch that fits a budget, with a proven upper bound. Ctrl-C keeps the largest so far.

    Sizes and costs are linear in the batch, determined by two captures of the same step. With one capture they are
    proportional to the batch, and the resident memory is constant.

    Args:
        small: Graph file of the step at one batch size.
        large: Graph file of the same step at a larger batch size.
        budget: Total such as 16GB, resident memory included.
        batch: Batch size of the first graph.
        large_batch: Batch size of the second graph.
        max_overhead: Limit on the cost of the plan: a factor such as 1.3 over computing each op once, or "one extra forward".
        solver: Name of the solver; `checkmate solvers` lists them.
        time_limit: Time limit in seconds of wall time, for all solves together.
        gap: Optimality gap at which the last solve stops.
        seed: Seed of all randomness.
        threads: Maximum number of threads of the solver.
        out: Plan file to write, with the graph at that batch next to it; by default the name comes from graph and batch.
        json: Print one JSON object on stdout.

    Returns:
        The exit code.
    """
    graph_at = _affine(small, batch, large, large_batch)
    limits = Limits(time_s=time_limit, gap=gap, seed=seed, threads=threads)
    outputs = files.Outputs(small, large)
    outputs.check(*_written(out or _default(small, batch)))
    with drawn("looking for the largest batch") as say:
        found = largest_batch(
            graph_at,
            budget_bytes=budget,
            max_overhead=_overhead(max_overhead),
            limits=limits,
            solver=solver_named(solver),
            on_progress=lambda batch, upper: say(f"{batch} fits, none above {upper} does"),
        )
    graph_path, plan_path = _written(out or _default(small, found.batch))
    graph = graph_at(found.batch)
    outputs.save((graph, graph_path), (found.plan, plan_path))
    result = found.result
    if json:
        terminal.emit(
            {
                "batch": found.batch,
                "upper_bound": found.upper_bound,
                "proven": found.batch == found.upper_bound,
                "why": found.why,
                "graph": str(graph_path),
                "plan": str(plan_path),
                "budget_bytes": result.budget_bytes,
                "peak_bytes": result.peak_bytes,
                "keep_all_bytes": keep_all_bytes(graph),
                "overhead": result.overhead,
                "elapsed_s": round(found.elapsed_s, 3),
            }
        )
        return 0
    limit = max_overhead if max_overhead == ONE_EXTRA_FORWARD else f"{float(max_overhead):g}x"
    terminal.facts(
        [
            ("graph", amounts.describe_graph(graph_at.small, small)),
            ("budget", format_bytes(result.budget_bytes)),
            ("keep-all", f"{format_bytes(keep_all_bytes(graph))} at batch {found.batch}"),
            ("limit", f"{limit} at most, {time_limit:g} s"),
        ]
    )
    header = [("batch", True), ("peak", True), ("overhead", True), ("proven limit", True), ("time", True)]
    row = [str(found.batch), format_bytes(result.peak_bytes or 0), f"{result.overhead:.3f}x", str(found.upper_bound)]
    terminal.table(header, [[*row, f"{found.elapsed_s:.1f} s"]])
    exact = "this is the largest" if found.batch == found.upper_bound else f"none above {found.upper_bound} is possible"
    terminal.say(f"{exact}: {found.why}")
    terminal.closing([graph_path, plan_path], f"draw the plan with {terminal.command('report', graph_path, plan_path)}")
    return 0


def _default(small: Path, batch: int) -> Path:
    """The plan file whose path is made from that of the graph and the batch."""
    return files.beside(small, f"-batch{batch}.plan.json")


def _written(plan: Path) -> tuple[Path, Path]:
    """The graph file next to a plan file, and the plan file."""
    return plan.with_name(plan.name.removesuffix(".json").removesuffix(".plan") + ".graph.json"), plan


def _affine(small: Path, batch: int, large: Path | None, large_batch: int | None) -> AffineGraph:
    if (large is None) != (large_batch is None):
        raise OptionError(
            "a second graph and --large-batch go together",
            hint="give both, or neither if sizes are proportional to the batch",
        )
    first = files.load(small, Graph)
    if large is None or large_batch is None:
        if batch < 1:
            raise OptionError(f"--batch {batch} must be one or more", hint="give the batch size of the captured graph")
        return AffineGraph.proportional(first, batch)
    return AffineGraph(first, batch, files.load(large, Graph), large_batch)


def _overhead(text: str) -> MaxOverhead:
    if text == ONE_EXTRA_FORWARD:
        return ONE_EXTRA_FORWARD
    try:
        return float(text)
    except ValueError:
        raise OptionError(
            f"--max-overhead {text!r} is neither a number nor {ONE_EXTRA_FORWARD!r}",
            hint="give a factor, such as 1.25 for a quarter more",
        ) from None
