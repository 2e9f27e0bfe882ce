"""Docstrings, comments, messages and documents are plain technical English that an engineer understands at first reading."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "checkmate"
FOLDERS = ["__init__.py", *sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__")]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

INSTEAD = {
    "anew": "again",
    "born": "computed, created",
    "cannot do without": "needs",
    "dearer": "more expensive",
    "dry steps?": "trial step",
    "lent": "passed, fake inputs",
    "let go": "freed",
    "mend": "fix, correct",
    "nobody": "no op, no user",
    "of its own": "separate",
    "of one's own": "your own",
    "settled?": "decide, fix, converge",
    "somebody": "a user, an op",
    "what is there": "live values, existing files",
    "whoever": "users who",
}
"""Words that had a private meaning here, and the words to use."""

IMPERATIVES = re.compile(
    r"add|allow|build|call|capture|cast|change|check|choose|compile|convert|correct|create|define|depend|draw|ensure|exclude"
    r"|fix|follow|give|import|increase|install|keep|leave|let|list|look|lower|make|mark|measure|move|name|number"
    r"|omit|open|override|pad|parse|pass|pip|plan|print|provide|put|raise|read|recapture|reduce|remove|rename|replace"
    r"|report|return|round|run|see|select|send|set|solve|split|start|stop|store|synchronize|take|try|turn|uninstall|unset"
    r"|unwrap|update|upgrade|use|wait|wrap|write"
)
RATES = {r"what": 16, r"where": 39, r"such(?! as)": 16, r"so many": 3, r"so that": 27}
"""Most uses for each 10,000 words of docstrings: three times what lineax and equinox have, where they have any."""

NO_ACTION = re.compile(
    r"^(leave|give|cast|take|call|set) (it|them|that|this)( out| off)?$"  # what is meant, and how?
    r"|\bmake what\b|\bsee that\b|\blook at what\b"
)


def python_files(folder: str) -> list[Path]:
    path = PACKAGE / folder
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def text_of(node: ast.expr, names: dict[str, ast.expr]) -> str | None:
    """Text of a literal, of an f-string with `{}` for its values, or of a constant of the module; else None."""
    if isinstance(node, ast.Name) and node.id in names:
        return text_of(names[node.id], {})
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def hints(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every hint that is a literal."""
    module = tree(path)
    names = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(module):
        if isinstance(node, ast.keyword) and node.arg == "hint" and (text := text_of(node.value, names)):
            yield node.value.lineno, text


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Comments and strings of a source, without names."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from enumerate(node.value.splitlines(), node.lineno)


def has_action(hint: str) -> bool:
    """Whether some clause of a hint begins with an imperative verb."""
    clauses = re.split(r"[;:,?.] | (?:or|and) |(?:^|, )(?:if|under|on|for|with) [^,]*, ", hint)
    words = [re.sub(r"^(\{\}|otherwise |then |please |or |and )+", "", clause.strip().lower()).split() for clause in clauses]
    first = [clause[0].strip("`") for clause in words if clause]
    return any(IMPERATIVES.fullmatch(word) for word in first) and not NO_ACTION.search(hint)


@pytest.mark.parametrize("folder", FOLDERS)
def test_sentences_name_their_nouns(folder):
    """Relative clauses without a noun are what a newcomer reads twice. Folders of few words may have a few uses."""
    nodes = [node for path in python_files(folder) for node in ast.walk(tree(path))]
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    text = " ".join(ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds))
    words = len(re.findall(r"[\w']+", text))
    found = {word: len(re.findall(rf"\b{word}\b", text, re.IGNORECASE)) for word in RATES}
    assert {word: n for word, n in found.items() if n > 3 + RATES[word] * words / 10_000} == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_open_with_a_noun(folder):
    """`What ...` describes a thing by what happens to it; its standard term says what it is.

    The documentation takes what stands before a colon in the first line of `Returns` for a type.
    """
    opening = re.compile(r"What\b|(?s:.*)\bReturns:\n *[^\n:]*(?<!`):")
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{place(path, getattr(node, 'lineno', 1))}: {docstring.splitlines()[0]}"
        for path in python_files(folder)
        for node in ast.walk(tree(path))
        if isinstance(node, kinds) and (docstring := ast.get_docstring(node)) and opening.match(docstring)
    ]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_hint_has_an_action(folder):
    """A hint tells the user what to do: a clause begins with an imperative verb, and names what it acts on."""
    found = [
        f"{place(path, line)}: {hint}" for path in python_files(folder) for line, hint in hints(path) if not has_action(hint)
    ]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize("folder", FOLDERS)
def test_sources_use_standard_terms(folder):
    """One meaning for each word, that of the field."""
    found = [
        f"{place(path, line)}: {match[0]!r}: say {INSTEAD[word]!r}"
        for path in python_files(folder)
        for line, text in prose(path)
        for word in INSTEAD
        if (match := re.search(rf"\b{word}\b", text, re.IGNORECASE))
    ]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documents_use_standard_terms(page):
    """So do the documents; a code block is not prose."""
    text = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = [
        f"{place(page, line)}: {match[0]!r}: say {INSTEAD[word]!r}"
        for line, words in enumerate(text.splitlines(), 1)
        for word in INSTEAD
        if (match := re.search(rf"\b{word}\b", words, re.IGNORECASE))
    ]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize(
    ("hint", "good"),
    [
        ("raise the budget to at least {}, or lower the batch size", True),
        ("under DistributedDataParallel, set optimize_ddp = False", True),
        ('pip install "checkmate-remat[torch]"', True),
        ("did you mean 'auto'? choose one of auto, milp", True),
        ("leave it", False),
        ("leave it out", False),
        ("make what the model does not depend on chance", False),
        ("1.25 allows a quarter more", False),
        ("known devices: A100, H100", False),
        ("a smaller batch may change it", False),
    ],
)
def test_the_check_of_hints_tells_good_from_bad(hint, good):
    """The check is itself checked, with hints that were in the code."""
    assert has_action(hint) is good
