"""Planning needs no framework: what `import checkmate` loads, how long it takes, and what is public."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "checkmate"
FOLDERS = sorted({str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")})
MOST_MODULES = 12
HEAVY = ("torch", "jax", "tensorflow", "highspy", "scipy", "numba", "matplotlib", "rich", "cyclopts", "sklearn")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, cwd=ROOT)


@pytest.mark.parametrize(
    "module", ["checkmate", "checkmate.core.files", "checkmate.solvers.registry", "checkmate.studies", "checkmate.cli"]
)
def test_import_loads_nothing_heavy(module):
    """Whoever plans on a laptop or in continuous integration has no framework and waits for none."""
    code = f"import sys, {module}; print(*(m for m in {HEAVY} if m in sys.modules))"
    assert python("-c", code).stdout.split() == []


def test_import_is_quick():
    """Under 0.3 s of processor time, or, where a machine is slow just now, three times what numpy takes; the best of three."""

    def best_s(module: str) -> float:
        code = f"import time; began = time.process_time(); import {module}; print(time.process_time() - began)"
        return min(float(python("-c", code).stdout) for _ in range(3))

    assert best_s("checkmate") < max(0.3, 3 * best_s("numpy"))


@pytest.mark.parametrize(
    "module",
    ["checkmate", "checkmate.torch", "checkmate.tf2", "checkmate.jax", "checkmate.keras", "checkmate.plot", "checkmate.report"],
)
def test_public_names_are_documented(module):
    """Public means there, in `__all__` and in the reference, neither more nor less."""
    page = module.rpartition(".")[2]
    reference = (ROOT / "docs" / "reference" / f"{page}.md").read_text()
    pattern = rf"^\.\. auto(?:class|function|exception|data):: {re.escape(module)}\.(\w+)$"
    documented = re.findall(pattern, reference, re.MULTILINE)
    imported = importlib.import_module(module)
    assert sorted(documented) == sorted(imported.__all__)
    assert len(set(documented)) == len(documented)
    assert [name for name in documented if not hasattr(imported, name)] == []


def test_benchmarks_import_names_that_exist():
    """A benchmark runs for an hour, and rarely: a name that it imports from the package must not have gone meanwhile."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}.{alias.name}"
        for path in sorted((ROOT / "benchmarks").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "checkmate"
        for alias in node.names
        if alias.name not in names(str(node.module))
    ]
    assert found == []


def names(module: str) -> set[str]:
    """Names in a module's source, its sub-modules, and its public names."""
    base = ROOT / "src" / Path(*module.split("."))
    if not base.is_dir():
        base, inside = base.with_suffix(".py"), set[str]()
    else:
        base, inside = base / "__init__.py", {path.stem for path in base.iterdir()}
    if base.exists():
        for node in ast.walk(ast.parse(base.read_text())):
            inside.update(alias.asname or alias.name for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias))
            inside.update(value for value in (getattr(node, "name", None), getattr(node, "id", None)) if value)
            inside.update([node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else [])
    return inside


def test_no_import_cycle():
    """A module can be read and tested after those that it imports; imports inside functions count as well."""
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("checkmate", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert "checkmate.core.graph" in imports["checkmate.core.plan"]
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))  # graphlib lists what is imported first


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_are_small(folder):
    """Among more modules than these there are groups that need a name."""
    modules = [path.name for path in (PACKAGE / folder).glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MOST_MODULES, f"{folder} has {len(modules)} modules: {', '.join(sorted(modules))}"
