"""Public names and the glossary are held together: each name is under a term, and no term names what does not exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "checkmate"
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
SPANS = re.findall(r"`([^`\n]+)`", GLOSSARY)
PUBLIC = {
    "checkmate": "__init__.py",
    "checkmate.torch": "torch/__init__.py",
    "checkmate.tf2": "tf2/__init__.py",
    "checkmate.jax": "jax/__init__.py",
    "checkmate.keras": "keras.py",
}


@cache
def public(module: str) -> tuple[str, ...]:
    """`__all__` of a package, read from its text: no framework is imported."""
    tree = ast.parse((SOURCES / PUBLIC[module]).read_text())
    lists = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    return tuple(ast.literal_eval(lists[0]))


@cache
def verbs() -> tuple[str, ...]:
    """Verbs of the command line, as its help lists them."""
    pytest.importorskip("cyclopts")
    from checkmate.cli.app import application

    return tuple(name for name in application() if not name.startswith("-"))


@cache
def identifiers() -> frozenset[str]:
    """Every function, class, attribute, argument and keyword of the sources."""
    found: set[str] = set()
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (getattr(node, field, None) for field in ("name", "id", "attr", "arg"))
            found.update(name for name in names if isinstance(name, str))
    return frozenset(found)


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_in_the_glossary(module):
    """A public name is a concept: it has an entry, or stands in code font under one."""
    prefix = "" if module == "checkmate" else f"{module}."
    missing = [name for name in public(module) if f"{prefix}{name}" not in SPANS]
    assert missing == [], f"not in docs/glossary.md: {', '.join(missing)}"


def test_verbs_are_in_the_glossary():
    """So is a verb of the command line."""
    missing = [verb for verb in verbs() if f"checkmate {verb}" not in SPANS]
    assert missing == [], f"not in docs/glossary.md: {', '.join(missing)}"


def test_names_in_the_glossary_exist():
    """A name in code font that was renamed or removed would send the reader to nothing."""
    gone: list[str] = []
    for span in SPANS:
        if span.startswith("checkmate "):
            known = span.removeprefix("checkmate ") in verbs()
        elif re.fullmatch(r"checkmate(\.\w+)+", span):
            module, _, name = span.rpartition(".")
            known = name in public(module) if module in PUBLIC else (SOURCES / span.partition(".")[2].replace(".", "/")).exists()
        elif span.isidentifier():
            known = span in public("checkmate") or span in identifiers()
        else:
            known = True  # an amount or an expression
        if not known:
            gone.append(span)
    assert gone == [], f"named in docs/glossary.md, but not in the code: {', '.join(gone)}"


def test_terms_are_defined_once_and_in_order():
    """One meaning each, found by the alphabet."""
    terms = [
        line for line, after in zip(GLOSSARY.splitlines(), GLOSSARY.splitlines()[1:], strict=False) if after.startswith(": ")
    ]
    keys = [re.sub(r"[^a-z ]", "", term.lower().split("(")[0]) for term in terms]
    assert len(set(keys)) == len(keys)
    assert [key[0] for key in keys] == sorted(key[0] for key in keys)
