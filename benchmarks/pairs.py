"""A way to run a step, beside ours at its peak: measured in one fresh process, their steps in turns.

For benchmarks that compare ours with what people write by hand. A *pair* is one way and one or more of ours. What all of them are
compared with, loss and gradients of the plain step and those in float64, is computed once, in a process before.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fresh import ChildError, answer, child, digest, hardware, mib, parse, ran_on, results_of, save, versions
from steps import Variant, timed

KEEP_ALL = "keep all"
"""The way beside ours in pairs of ours alone: our step without chunks that keeps everything."""

CLOCK = 1.02
"""How much slower than a way beside it a step of ours may be."""

ROUNDING_BYTES = 64
"""A measured peak may be off by an allocation's alignment."""


ABOUT = (
    "Every row is a fresh process, in which the steps of a way and of ours, planned for the peak of that way, take turns.",
    "Peaks are MiB above the resident memory; times are process times on one thread, the fastest of the rounds. *Bits*: which",
    "of the loss and the gradients are equal, byte by byte, to plain PyTorch's. *Error*: the largest error of a gradient against",
    "float64, as norm of the difference over norm.",
)
"""What a page says about its tables."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model that returns its loss, a batch, and the optimizer of a whole step."""

    model: Any
    batch: dict[str, Any]
    optimizer: Any = None


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run a step.

    Attributes:
        prepare: The step of a case, which returns the loss; it may change the model.
        compiled: Whether its first step compiles.
    """

    prepare: Callable[[Case], Callable[[], Any]]
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked of ours.

    Attributes:
        chunking: The option of this name.
        budget: ``"equal"`` for the peak of the way beside it, ``"50%"`` for a share of that, ``"smallest"``, or None.
        compiler: The option of this name.
    """

    chunking: str = "auto"
    budget: str | None = "equal"
    compiler: str = "eager"

    def __str__(self) -> str:
        budget = "no budget" if self.budget is None else self.budget
        return f"ours, {self.chunking}, {budget}" + ("" if self.compiler == "eager" else f", {self.compiler}")


@dataclass(frozen=True, slots=True)
class Suite:
    """Pairs over one model.

    Attributes:
        case: The model in a float type, the same parameters and batch each time.
        ways: The ways by name; the first is the plain step.
        pairs: What is asked of ours beside each way, by the name of its row: the way and the asks.
        exact: The plain step in float64, or a way that needs less memory and computes the same.
    """

    case: Callable[[Any], Case]
    ways: Mapping[str, Way]
    pairs: Mapping[str, tuple[str, tuple[Ask, ...]]]
    exact: str


def alone(*asks: Ask) -> dict[str, tuple[str, tuple[Ask, ...]]]:
    """Pairs of ours with ours that keeps everything."""
    return {str(ask): (KEEP_ALL, (ask,)) for ask in asks}


def beside(ways: Sequence[str], *asks: Ask) -> dict[str, tuple[str, tuple[Ask, ...]]]:
    """Pairs of ways with ours."""
    return {way: (way, asks) for way in ways}


def has_chunking() -> bool:
    """Whether the installed version chooses chunks."""
    import checkmate.torch

    return "chunking" in inspect.signature(checkmate.torch.compile).parameters


def main(
    script: str,
    about: str,
    suites: Callable[[bool], Mapping[str, Suite]],
    *,
    sizes: Callable[[bool], dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
    verdict: Callable[[dict[str, Any]], list[str]],
) -> int:
    """The main program of such a benchmark. Rows that are not named on the command line keep their results of the last run.

    Args:
        script: File of the benchmark.
        about: What ``--help`` says.
        suites: The suites by name; given True, of tiny models.
        sizes: What the report says about their sizes.
        table: The report as Markdown.
        verdict: Promises that the report breaks, in words.

    Returns:
        The exit status: 1 if a promise is broken at full size.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", nargs="+", choices=tuple(suites(False)), default=tuple(suites(False)))
    parser.add_argument("--rows", nargs="+", default=None, help="names of rows; all by default")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds a solve may take")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-ours", action="store_true", help="measure the other ways alone")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; the result is printed, not kept")
    parser.add_argument("--child", nargs=6, help=argparse.SUPPRESS)
    options = parse(parser, script, table)
    if options.child:
        quick, suite, row, reference, limit, rounds = options.child
        found = suites(bool(int(quick)))[suite]
        answer(refer(found, reference) if not row else run(found, row, reference, float(limit), int(rounds)))
        return 0
    report = _kept(script) if not options.quick else {}
    report |= {"hardware": hardware(), "versions": versions("torch", "transformers"), "sizes": sizes(options.quick)}
    report.setdefault("suites", {})
    for name in options.suites:
        suite = suites(options.quick)[name]
        rows = report["suites"].setdefault(name, {})
        with tempfile.TemporaryDirectory() as folder:
            reference = str(Path(folder) / "reference.pt")
            fixed = (str(int(options.quick)), name)
            child(script, *fixed, "", reference, "0", "0")
            limit = "-1" if options.without_ours else str(options.time_limit)
            for row in [r for r in suite.pairs if options.rows is None or r in options.rows]:
                if options.without_ours and suite.pairs[row][0] == KEEP_ALL:
                    continue
                try:
                    rows[row] = child(
                        script, *fixed, row, reference, limit, str(options.rounds), CHECKMATE_CACHE=f"{folder}/cache"
                    )
                except ChildError as error:
                    rows[row] = [{"name": row, "failed": str(error)}]
                print("\n".join(f"{name}: {row}: {line(v)}" for v in rows[row]), flush=True)
                report["suites"][name] = {r: rows[r] for r in suite.pairs if r in rows}
                if not options.quick:
                    save(script, report)
    if options.quick:
        print(table(report))
        return 0
    broken = verdict(report)
    print("\n".join(broken) or "all promises hold")
    return bool(broken)


def _kept(script: str) -> dict[str, Any]:
    path = results_of(script)
    return json.loads(path.read_text()) if path.exists() else {}


def refer(suite: Suite, path: str) -> None:
    """Child: digests of a plain step and, where no optimizer changes the parameters, its gradients in float64."""
    import torch

    torch.set_num_threads(1)
    plain = next(iter(suite.ways))
    case = suite.case(torch.float32)
    loss = suite.ways[plain].prepare(case)()
    found: dict[str, Any] = {"digests": digests(case, loss)}
    if case.optimizer is None:
        exact = suite.case(torch.float64)
        found["loss"] = suite.ways[suite.exact].prepare(exact)()
        found["gradients"] = {name: p.grad for name, p in exact.model.named_parameters()}
        found["errors"] = errors(case, loss, found)
    torch.save(found, path)


def digests(case: Case, loss: Any) -> dict[str, str]:
    """What a step leaves: loss and gradients, or loss and parameters."""
    left = {n: p.grad if case.optimizer is None else p for n, p in case.model.named_parameters()}
    return {"loss": digest(loss), **{name: digest(tensor) for name, tensor in left.items()}}


def errors(case: Case, loss: Any, reference: Mapping[str, Any]) -> dict[str, float]:
    """Errors of loss and gradients against float64: norm of the difference over norm."""
    found = {"loss": abs(loss.item() - reference["loss"].item()) / abs(reference["loss"].item())}
    for name, p in case.model.named_parameters():
        right = reference["gradients"][name]
        found[name] = float((p.grad.double() - right).norm() / right.norm())
    return found


def run(suite: Suite, row: str, reference: str, time_limit_s: float, rounds: int) -> list[dict[str, Any]]:
    """Child: one row, which is a way and ours beside it."""
    import torch

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    known = torch.load(reference, mmap=True)
    way, asks = suite.pairs[row]
    case = suite.case(torch.float32)
    if way == KEEP_ALL:
        first = planned(case, Ask("off", None), None, time_limit_s, KEEP_ALL)
        assert isinstance(first, Variant)
    else:
        first = Variant(way, "way", suite.ways[way].prepare(case), case.model)
    observe(first, case, known, way == KEEP_ALL or suite.ways[way].compiled)
    variants, refused = [first], []
    for ask in asks if time_limit_s >= 0 else ():
        case = suite.case(torch.float32)
        found = planned(case, ask, first.row["peak_bytes"], time_limit_s, str(ask))
        if isinstance(found, Variant):
            observe(found, case, known, True)
            variants.append(found)
        else:
            refused.append({"name": str(ask), "kind": "ours", **dataclasses.asdict(ask), **found})
    timed(variants, rounds)
    return [*({"name": v.name, "kind": v.kind, **v.row} for v in variants), *refused]


def planned(case: Case, ask: Ask, peak_bytes: int | None, time_limit_s: float, name: str) -> Variant | dict[str, Any]:
    """Our step, or why there is none.

    Args:
        case: The model.
        ask: What is asked of it.
        peak_bytes: Peak of the way beside it.
        time_limit_s: Seconds a solve may take.
        name: What the table calls it.
    """
    import checkmate.torch
    from checkmate import InfeasibleBudgetError, OptionError, PlanNotFoundError

    options: dict[str, Any] = {"example": case.batch, "optimizer": case.optimizer, "time_limit_s": time_limit_s}
    options["compiler"] = ask.compiler
    if has_chunking():
        options["chunking"] = ask.chunking
    elif ask.chunking != "off":
        return {"skipped": "this version has no option chunking"}

    def compiled(budget: int | None) -> Any:
        return checkmate.torch.compile(case.model, budget=budget, **options)

    began = time.perf_counter()
    above: int | None = None
    try:
        if ask.budget is None:
            step = compiled(None)
        else:
            graph = checkmate.torch.capture(case.model, example=case.batch, optimizer=case.optimizer, costs="estimated")
            resident = graph.resident_bytes
            if ask.budget == "smallest":
                # The smallest that a refusal names has to be kept.
                try:
                    step = compiled(resident + 1)
                except InfeasibleBudgetError as refusal:
                    if refusal.smallest_bytes is None:
                        raise
                    above = refusal.smallest_bytes - resident
            else:
                assert peak_bytes is not None
                share = 100 if ask.budget == "equal" else int(ask.budget.removesuffix("%"))
                above = peak_bytes * share // 100
            step = compiled(resident + above)
    except (InfeasibleBudgetError, PlanNotFoundError) as refusal:
        return {"refused": str(refusal).splitlines()[0], "budget_bytes": above}
    except OptionError as wrong:
        return {"skipped": str(wrong).splitlines()[0]}
    row: dict[str, Any] = {
        **dataclasses.asdict(ask),
        "budget_bytes": above,
        "planned_bytes": step.result.peak_bytes - step.graph.resident_bytes,
        "overhead": step.result.overhead,
        "chunks": chosen(step),
        "compile_s": time.perf_counter() - began,
    }
    return Variant(name, "ours", lambda: step(**case.batch)[1], case.model, row)


def chosen(step: Any) -> list[str]:
    """What our step computes in chunks, one line for each kind of region; empty if nothing."""
    said = "in pieces: "
    return [remark.removeprefix(said) for remark in step.result.remarks if remark.startswith(said)]


def observe(variant: Variant, case: Case, known: Mapping[str, Any], compiled: bool) -> None:
    """Bits, errors and peak of the first step; where that compiles, the peak is of the second."""
    from checkmate.torch import measure_peak

    losses: list[Any] = []

    def step() -> None:
        losses.append(variant.step())

    if compiled:
        step()
    else:
        variant.row["peak_bytes"] = measure_peak(step)
    own = digests(case, losses[0])
    variant.row["bits"] = {
        "loss": own.pop("loss") == known["digests"]["loss"],
        "equal": sum(known["digests"][name] == value for name, value in own.items()),
        "tensors": len(own),
    }
    if "gradients" in known:
        found = errors(case, losses[0], known)
        variant.row["error"] = {
            "loss": found.pop("loss"),
            "gradients": max(found.values()),
            "of_plain": max(error / max(known["errors"][name], 1e-12) for name, error in found.items()),
        }
    variant.model.zero_grad(set_to_none=True)
    if compiled:
        variant.row["peak_bytes"] = measure_peak(variant.step)
        variant.model.zero_grad(set_to_none=True)


def line(row: Mapping[str, Any]) -> str:
    """A row for the terminal."""
    for why in ("failed", "refused", "skipped"):
        if why in row:
            return f"{row['name']}: {why}: {row[why]}"
    return f"{row['name']}: {mib(row['peak_bytes'])} MiB, {row['time_s']:.3f} s, {bits(row)}, {error(row)}" + "".join(
        f"; {chunk}" for chunk in row.get("chunks", ())
    )


def bits(row: Mapping[str, Any]) -> str:
    """Which results are equal to the plain step's, byte by byte."""
    found = row["bits"]
    if found["loss"] and found["equal"] == found["tensors"]:
        return "all"
    return f"{'loss, ' if found['loss'] else ''}{found['equal']} of {found['tensors']}"


def error(row: Mapping[str, Any]) -> str:
    """The largest error of a gradient against float64."""
    return f"{row['error']['gradients']:.1e}" if "error" in row else "-"


def ours_of(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Our fastest of a pair that keeps the peak of the way beside it."""
    fitting = [r for r in rows[1:] if "time_s" in r and r["peak_bytes"] <= rows[0]["peak_bytes"] + ROUNDING_BYTES]
    return min(fitting, key=lambda r: r["time_s"], default=None)


def page(title: str, model: Sequence[str], about: Mapping[str, str], report: Mapping[str, Any]) -> str:
    """The results as Markdown.

    Args:
        title: Title of the page.
        model: Lines on what was run.
        about: A sentence on each suite.
        report: The results.
    """
    lines = [f"# {title}", "", *model, *ABOUT, "", ran_on(report), ""]
    for name, rows in report["suites"].items():
        lines += [f"## {name}", "", about[name], "", *_lines_of(rows)]
    return "\n".join(lines)


def _lines_of(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """A suite's tables as Markdown: each way with ours at its peak, then ours beside keeping everything."""
    beside = [
        "| way | peak | s | bits | error | ours: peak | s | of the way's time | bits | error | in chunks |",
        "|---|---:|---:|---|---:|---:|---:|---:|---|---:|---|",
    ]
    own = [
        f"| ours | budget | peak | s | of {KEEP_ALL}'s time | bits | error | in chunks |",
        "|---|---:|---:|---:|---:|---|---:|---|",
    ]
    for name, (first, *mine) in rows.items():
        if first["name"] == KEEP_ALL:
            budget = mine[0].get("budget_bytes")
            own.append(f"| {name.removeprefix('ours, ')} | {'-' if budget is None else mib(budget)} | {_ours(first, mine[0])} |")
        elif "peak_bytes" in first:
            figures = f"{mib(first['peak_bytes'])} | {first['time_s']:.3f} | {bits(first)} | {error(first)}"
            beside.append(f"| {name} | {figures} | {_ours(first, ours_of([first, *mine]) or (mine or [{}])[0])} |")
        else:
            beside.append(f"| {name} | failed | | | | | | | | | |")
    return [*beside, "", *own, ""]


def _ours(first: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    if "time_s" not in mine:
        return f"{next((why for why in ('refused', 'skipped') if why in mine), 'not run')} | | | | | "
    ratio = f"{mine['time_s'] / first['time_s']:.3f}"
    chunks = "; ".join(mine["chunks"]) or "nothing"
    return f"{mib(mine['peak_bytes'])} | {mine['time_s']:.3f} | {ratio} | {bits(mine)} | {error(mine)} | {chunks}"


def unmet(report: Mapping[str, Any], suites: Mapping[str, Suite]) -> list[str]:
    """In words, which rows were not run, and where `slower` finds a promise broken.

    Args:
        report: The results.
        suites: The suites by name.
    """
    broken = []
    for name, suite in suites.items():
        rows = report["suites"].get(name, {})
        broken += [f"{name}, {row}: not run" for row in suite.pairs if row not in rows]
        broken += slower(name, rows)
    return broken


def slower(name: str, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """In words, where a step of ours takes longer than a way at its peak, or more memory than its budget.

    Args:
        name: Name of the suite.
        rows: Its rows.
    """
    broken = []
    for row, found in rows.items():
        label = f"{name}, {row}"
        if "peak_bytes" not in found[0]:
            broken.append(f"{label}: {found[0].get('failed', 'not measured')}")
            continue
        for mine in (m for m in found[1:] if m.get("budget_bytes") is not None and "time_s" in m):
            if mine["peak_bytes"] > mine["budget_bytes"] + ROUNDING_BYTES:
                broken.append(f"{label}: measured {mib(mine['peak_bytes'])}, budget {mib(mine['budget_bytes'])}")
        if found[0]["name"] == KEEP_ALL:
            continue
        best = ours_of(found)
        if best is None:
            broken.append(f"{label}: none of ours keeps {mib(found[0]['peak_bytes'])}: {[line(m) for m in found[1:]]}")
        elif best["time_s"] > CLOCK * found[0]["time_s"]:
            broken.append(f"{label}: takes {found[0]['time_s']:.3f} s, ours at its peak {best['time_s']:.3f} s")
    return broken
