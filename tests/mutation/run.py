"""Mutation testing of the core, the bounds, the reductions and the states of a step: does a test fail when the code is wrong?

Usage, from the root of a checkout, with ``pip install mutmut==3.8.1``::

    python tests/mutation/run.py                  # every group; about half an hour on one core
    python tests/mutation/run.py core             # one group
    python tests/mutation/run.py core --survivors # only what survived the last run, after a test was added
    python tests/mutation/run.py core --resume    # go on with a run that was stopped
    python tests/mutation/run.py core --only plan # one module; the counts of the others stay as they are

mutmut changes one expression at a time and runs the tests that reach it; a change that no test notices survives. The
counts go to ``score.json``, with the day on which each module was run. Every survivor has to be named in
``equivalent.toml`` with the reason why no test can notice it; one that is not named, and an entry that names no
survivor any more, make the script fail.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import difflib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCORES = HERE / "score.json"
EQUIVALENT = HERE / "equivalent.toml"
COPIES = ROOT / "build" / "mutation"
MUTMUT = "3.8.1"
"""The release whose insides `_mutate` changes: another may not have them."""

GROUPS = {
    "core": ("src/checkmate/core/*.py", ["tests/core"]),
    "bounds": ("src/checkmate/solvers/bounds/*.py", ["tests/solvers/bounds"]),
    "events": ("src/checkmate/solvers/bounds/events/*.py", ["tests/solvers/bounds/events"]),
    "reductions": ("src/checkmate/solvers/reductions/*.py", ["tests/solvers/reductions"]),
    "steps": ("src/checkmate/torch/steps/state.py", ["tests/torch/compilation/test_state.py"]),
}
"""What is changed, and the tests that have to notice: those of the same folder, so that a law stands near its code."""

KILLED = ("killed", "timeout", "segfault")
"""Verdicts of a mutant on which the tests do not pass: an engine that is given nonsense may end the process."""

SETTINGS = """
[tool.mutmut]
source_paths = ["src/"]
only_mutate = ["{sources}"]
also_copy = ["conftest.py", "benchmarks", "docs/schemas"]
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = [
    "-o", "addopts=--import-mode=importlib", "-m", "not slow", "-p", "no:cacheprovider",
    "-k", "not in_proportion", # the clock of a process whose time is limited may stand still, which no mutant is to blame for
]
process_isolation = "forkserver" # HiGHS and numba hold threads, which a fork of a process that has run tests would lose
timeout_constant = 2.0
timeout_multiplier = 6.0
"""


@dataclass(frozen=True, slots=True, order=True)
class Mutant:
    """A change: the function it is in, and the lines before and after it."""

    function: str
    before: str
    after: str


def main() -> int:
    """Run the groups that were asked for; 0 if every survivor is justified."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)}; all by default")
    parser.add_argument("--survivors", action="store_true", help="only what survived the last run of these groups")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was stopped")
    parser.add_argument("--report", action="store_true", help="run nothing: report the last run")
    parser.add_argument("--only", nargs="+", default=(), metavar="MODULE", help="only these modules, such as budget")
    options = parser.parse_args()
    if importlib.util.find_spec("mutmut") is None or importlib.metadata.version("mutmut") != MUTMUT:
        parser.error(f"needs mutmut {MUTMUT}: pip install mutmut=={MUTMUT}")
    scores: dict[str, Any] = json.loads(SCORES.read_text()) if SCORES.exists() else {}
    complete = True
    for group in options.groups or GROUPS:
        if unknown := set(options.only) - {path.stem for path in ROOT.glob(GROUPS[group][0])}:
            parser.error(f"no module of {group}: {', '.join(sorted(unknown))}")
        copy = COPIES / group
        if not options.report:
            _copy(copy, *GROUPS[group], keep=options.survivors or options.resume)
            with contextlib.chdir(copy):
                _mutate(_asked(copy, GROUPS[group][0], options))
        scores[group], fine = _report(group, copy, options.only, scores.get(group, {}).get("modules", {}))
        complete &= fine
    SCORES.write_text(
        json.dumps({"mutmut": MUTMUT, **{group: scores[group] for group in GROUPS if group in scores}}, indent=2) + "\n"
    )
    return 0 if complete else 1


def _copy(copy: Path, sources: str, tests: list[str], *, keep: bool) -> None:
    """A copy of the checkout to work in: mutmut writes beside its configuration."""
    if not keep:
        shutil.rmtree(copy, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src", "tests", "docs/schemas", "*.py", "*.toml"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    with (copy / "pyproject.toml").open("a") as file:
        file.write(SETTINGS.format(sources=sources, tests=json.dumps(tests)))


def _mutate(names: tuple[str, ...]) -> None:
    """Run mutmut in the present folder, on properties too: of itself it leaves out whatever is decorated."""
    import libcst as cst
    from mutmut.__main__ import cli
    from mutmut.mutation import file_mutation
    from mutmut.state import state
    from mutmut.workers.isolation import ForkServerRunner

    visitor_type = file_mutation.MutationVisitor
    skips, arrange = visitor_type._skip_node_and_children, file_mutation.function_trampoline_arrangement

    def is_property(node: cst.CSTNode) -> bool:
        if not isinstance(node, cst.FunctionDef) or len(node.decorators) != 1:
            return False
        decorator = node.decorators[0].decorator
        return isinstance(decorator, cst.Name) and decorator.value in ("property", "cached_property")

    def skips_but_properties(visitor: Any, node: cst.CSTNode) -> bool:
        return not is_property(node) and skips(visitor, node)

    def arrange_properties(function: cst.FunctionDef, mutants: Any, class_name: str | None) -> Any:
        """The first node is the property that chooses between the original and the mutants, which have to be methods."""
        declared, nodes, assigned, mutant_names = arrange(function, mutants, class_name)
        if is_property(function):
            nodes = [nodes[0], *(node.with_changes(decorators=[]) for node in nodes[1:])]
        return declared, nodes, assigned, mutant_names

    submit = ForkServerRunner.submit

    def submit_nearest_first(runner: Any, mutant: str, tests: list[str], cpu_time_limit: int, estimated_time: float) -> None:
        """The tests of the mutant's own module first, then quick ones: most mutants fall to the first few."""
        own = f"test_{mutant.split('.x')[0].rpartition('.')[2]}.py"
        seconds = state().duration_by_test
        tests = sorted(tests, key=lambda test: (own not in test, seconds.get(test, 0.0), test))
        submit(runner, mutant, tests, cpu_time_limit, estimated_time)

    ForkServerRunner.submit = submit_nearest_first
    visitor_type._skip_node_and_children = skips_but_properties
    file_mutation.function_trampoline_arrangement = arrange_properties
    os.environ["HYPOTHESIS_PROFILE"] = "mutation"
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # a third of the time of a quick test
    cli(["run", "--max-children", "1", *names], standalone_mode=False)


def _verdicts(copy: Path) -> Iterator[tuple[str, Path, str]]:
    """Name, file and verdict of every mutant of the last run."""
    with contextlib.chdir(copy):
        from mutmut.stats import status_by_exit_code

    for meta in sorted((copy / "mutants" / "src").rglob("*.meta")):
        for name, code in json.loads(meta.read_text())["exit_code_by_key"].items():
            yield name, meta.with_suffix(""), status_by_exit_code[code]


def _asked(copy: Path, sources: str, options: argparse.Namespace) -> tuple[str, ...]:
    """Names or patterns of the mutants to run; none of them for all."""
    if options.survivors:
        return tuple(
            name
            for name, path, verdict in _verdicts(copy)
            if verdict in ("survived", "no tests") and (not options.only or path.stem in options.only)
        )
    package = sources.removeprefix("src/").removesuffix("*.py").replace("/", ".")
    return tuple(f"{package}{module}.*" for module in options.only)


def _report(group: str, copy: Path, only: Collection[str], measured: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Counts by module, and whether all survivors are justified; says on the terminal what is not.

    Args:
        group: The group.
        copy: The copy of the checkout that the group was run in.
        only: The modules that were run; all if empty.
        measured: Counts of an earlier run by module, for the modules that were not run.
    """
    justified = {
        Mutant(entry["function"], _joined(entry["before"]), _joined(entry["after"])): entry["reason"]
        for entry in tomllib.loads(EQUIVALENT.read_text()).get(group, [])
        if not only or entry["function"].partition(".")[0] in only
    }
    modules: dict[str, Counter[str]] = {}
    survivors: Counter[Mutant] = Counter()
    for name, path, verdict in _verdicts(copy):
        if only and path.stem not in only:
            continue
        counts = modules.setdefault(path.stem, Counter())
        counts["mutants"] += 1
        counts["killed"] += verdict in KILLED
        if verdict not in KILLED:
            mutant = _mutant(name, path)
            survivors[mutant] += 1
            counts["equivalent"] += mutant in justified
            if mutant not in justified:
                print(f"{verdict}: {name}")
                print(f"  function = {mutant.function!r}\n  before = {mutant.before!r}\n  after = {mutant.after!r}")
    gone = justified.keys() - survivors.keys()
    for mutant in sorted(gone):
        print(f"survives no more: {asdict(mutant)}")
    total = sum(modules.values(), Counter())
    print(f"{group}: {total['killed']} of {total['mutants']} mutants killed, {total['equivalent']} equivalent")
    left = total["mutants"] - total["killed"] - total["equivalent"]
    ran = {meta.with_suffix("").stem: meta.stat().st_mtime for meta in (copy / "mutants" / "src").rglob("*.meta")}
    by_module = (measured if only else {}) | {
        name: {**_counts(counts), "measured": datetime.date.fromtimestamp(ran[name]).isoformat()}
        for name, counts in modules.items()
    }
    whole = Counter({key: sum(counts[key] for counts in by_module.values()) for key in ("mutants", "killed", "equivalent")})
    return {**_counts(whole), "modules": dict(sorted(by_module.items()))}, not gone and not left


def _counts(counts: Counter[str]) -> dict[str, float]:
    mutants, killed, equivalent = (counts[key] for key in ("mutants", "killed", "equivalent"))
    return {"mutants": mutants, "killed": killed, "equivalent": equivalent, "score": round(100 * killed / mutants, 1)}


def _mutant(name: str, path: Path) -> Mutant:
    """What a mutant changes: its function's changed lines before and after."""
    from mutmut.mutation.diff_apply import read_mutant_function, read_original_function

    module = _parsed(path)
    before, after = (
        module.code_for_node(function).splitlines()
        for function in (read_original_function(module, name), read_mutant_function(module, name))
    )
    changed = [
        line for line in difflib.unified_diff(before, after, n=0, lineterm="") if not line.startswith(("---", "+++", "@@"))
    ]
    function = re.sub(
        r"^x(?:ǁ(\w+)ǁ|_)", lambda match: f"{match[1]}." if match[1] else "", name.rpartition(".")[2].rpartition("__mutmut_")[0]
    )
    return Mutant(
        f"{path.stem}.{function}",
        _joined("".join(line[1:] for line in changed if line.startswith("-"))),
        _joined("".join(line[1:] for line in changed if line.startswith("+"))),
    )


@cache
def _parsed(path: Path) -> Any:
    """A module with all its mutants, which takes seconds to parse."""
    import libcst as cst

    return cst.parse_module(path.read_text())


def _joined(text: str) -> str:
    """Text without its line breaks and indents."""
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
