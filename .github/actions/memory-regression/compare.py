"""Compare the memory of a training step in the working tree with that of another commit: `python compare.py --help`.

Writes the graphs, the plans, `report.html` and `comment.md`, the text for a pull request. The exit code is 1 if no plan of the
working tree keeps the budget, or if the peak without recomputation rose by more than was allowed; 2 if the step cannot be
captured.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from checkmate import Graph, Plan, Result, format_bytes, read, simulate
from checkmate.studies.explain import held_at, module_of, remats_by_module

MOST = 5
CLI = "import sys; from checkmate.cli import main; sys.exit(main())"


@dataclass(frozen=True, slots=True)
class Step:
    """A training step at one commit, with its plan within the budget if there is one."""

    graph: Graph
    result: Result | None

    @property
    def keep_all(self) -> Plan:
        """The plan that computes every op once."""
        return Plan.from_order(self.graph, range(len(self.graph.ops)))

    @property
    def keep_all_bytes(self) -> int:
        """Peak of that plan."""
        return simulate(self.graph, self.keep_all).peak_bytes

    def held(self) -> Counter[str]:
        """Bytes at the peak without recomputation, by module."""
        entries = held_at(self.graph, self.keep_all, simulate(self.graph, self.keep_all).peak_step)
        found = Counter[str]()
        for entry in entries:
            found[module_of(entry.source) or entry.name] += entry.size_bytes
        return found

    def again(self) -> Counter[str]:
        """Number of recomputations of the plan, by module."""
        found = Counter[str]()
        if self.result is not None:
            for group in remats_by_module(self.graph, self.result.plan):
                found[group.name] += group.times
        return found


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a verb of the command line; what it says goes to the log of the job."""
    done = subprocess.run([sys.executable, "-c", CLI, *words], cwd=folder, capture_output=True, text=True, check=False)
    sys.stderr.write(done.stdout + done.stderr)
    return done


def step_of(target: str, budget: str, folder: Path, out: Path, name: str) -> Step | str:
    """Capture, plan and verify the step of a checkout; the error message if it cannot be captured."""
    graph, plan, result = (out / f"{name}.{kind}.json" for kind in ("graph", "plan", "result"))
    captured = run("capture", target, "--out", str(graph), folder=folder)
    if captured.returncode:
        return captured.stderr
    planned = run("plan", str(graph), "--budget", budget, "--out", str(plan), "--result", str(result), folder=folder)
    if planned.returncode not in (0, 1):
        return planned.stderr
    held = planned.returncode == 0 and run("verify", str(graph), str(plan), "--budget", budget, folder=folder).returncode == 0
    return Step(read(graph), read(result) if held else None)


def step_of_commit(commit: str, target: str, budget: str, out: Path) -> Step | str:
    """`step_of` for a commit, checked out beside the working tree for as long as it takes."""
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "base"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(checkout), commit], check=True)
        try:
            return step_of(target, budget, checkout, out, "base")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(checkout)], check=True)


def text_of(name: str) -> str:
    """A name of the user's code as code in a table: it cannot end the cell, and it mentions no user."""
    return "`" + "".join(c for c in name if c.isprintable()).replace("`", "'").replace("|", "/") + "`"


def change(before: int | None, after: int | None) -> str:
    """The relative change of an amount; empty where there is none to compare with."""
    if before is None or after is None or not before:
        return ""
    return f"{100 * (after - before) / before:+.1f}%" if before != after else "="


def comment(target: str, budget: str, base: Step | str, head: Step, verdict: str) -> str:
    """The text for the pull request; its first line marks the comment, so that it is replaced and not repeated."""
    lines = [f"<!-- checkmate memory {text_of(target)} -->", f"### Memory of {text_of(target)}: {verdict}", ""]
    other = None if isinstance(base, str) else base
    if other is None:
        lines += ["The step of the base cannot be captured, so there is nothing to compare with.", ""]
    lines += ["| | base | this change | |", "|---|--:|--:|--:|"]

    def row(name: str, of: list[int | None], shown: list[str]) -> str:
        return f"| {name} | {shown[0]} | {shown[1]} | {change(*of)} |"

    sides = [other, head]
    for name, amount in (
        ("peak without recomputation", lambda s: s.keep_all_bytes),
        (f"planned peak, within {budget}", lambda s: None if s.result is None else s.result.peak_bytes),
        ("parameters and other resident memory", lambda s: s.graph.resident_bytes),
    ):
        of = [None if side is None else amount(side) for side in sides]
        shown = ["" if s is None else "no plan" if v is None else format_bytes(v) for s, v in zip(sides, of, strict=True)]
        lines.append(row(name, of, shown))
    costs = ["" if s is None else "no plan" if s.result is None else f"{s.result.overhead:.3f}x" for s in sides]
    lines.append(row("overhead of the plan", [None, None], costs))
    ops = [None if side is None else len(side.graph.ops) for side in sides]
    lines.append(row("ops", ops, ["" if count is None else str(count) for count in ops]))
    if other is not None:
        lines += changed("Held at the peak without recomputation", other.held(), head.held(), format_bytes)
        lines += changed("Computed again by the plan", other.again(), head.again(), lambda times: f"{times} x")
    return "\n".join([*lines, ""])


def changed(title: str, before: Counter[str], after: Counter[str], shown) -> list[str]:
    """The modules that changed most, as a table; nothing if none did."""
    names = sorted(before | after, key=lambda name: (-abs(after[name] - before[name]), name))
    rows = [
        f"| {text_of(name)} | {shown(before[name])} | {shown(after[name])} | {change(before[name], after[name]) or 'new'} |"
        for name in names[:MOST]
        if before[name] != after[name]
    ]
    return (
        ["", f"{title}, what changed most:", "", "| module | base | this change | |", "|---|--:|--:|--:|", *rows] if rows else []
    )


def main() -> int:
    """Compare, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="FILE.py:FUNCTION that returns (model, loss, example)")
    parser.add_argument("--budget", required=True, help="total such as 14GiB")
    parser.add_argument("--base", required=True, help="commit to compare with")
    parser.add_argument("--allow", default="", help="allowed increase of the peak without recomputation, such as 5%%")
    parser.add_argument("--out", type=Path, default=Path("checkmate-memory"), help="folder for the files")
    given = parser.parse_args()
    allowed = float(given.allow.rstrip("%")) / 100 if given.allow else None
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    head = step_of(given.target, given.budget, Path.cwd(), out, "head")
    if isinstance(head, str):
        return 2
    base = step_of_commit(given.base, given.target, given.budget, out)
    grown = None if isinstance(base, str) else head.keep_all_bytes / max(1, base.keep_all_bytes) - 1
    verdict, code = f"within {given.budget}", 0
    if head.result is None:
        verdict, code = f"no plan within {given.budget}", 1
    elif allowed is not None and grown is not None and grown > allowed:
        verdict, code = f"the peak rose by more than {allowed:.1%}", 1
    (out / "comment.md").write_text(comment(given.target, given.budget, base, head, verdict))
    if head.result is not None:
        files = [str(out / f"head.{kind}.json") for kind in ("graph", "result")]
        run("report", *files, "--out", str(out / "report.html"), folder=Path.cwd())
    return code


if __name__ == "__main__":
    sys.exit(main())
