"""Damage files and run a verb on each, in this process: `python -m tests.cli.fuzz --cases 10000` prints what happened.

A case fails if the exit code is not 0, 1 or 2, if a file of the user changes, if text that a terminal obeys is printed, or if a
page runs or loads something.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import html.parser
import io
import json
import pickle
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkmate
from checkmate.cli import main
from tests.cli.test_capture import MODEL
from tests.oom.recording import failed_run
from tests.plot.graphs import AGAIN, KEEP_ALL, chain, plan
from tests.regions.test_regions import network

HOSTILE = (
    "\x1b]0;title\x07",
    "\x1b[2J\x9b31m",
    "a\nerror: forged\n\nhint: forged\r",
    "\u202eright to left\u2028",
    "</script><script>document.title='run'</script>",
    "<img src=x onerror=\"document.title='run'\">",
    "\"'><svg onload=document.title='run'>",
    "{0}{title}$title%s",
    "../../../../etc/passwd",
    "x" * 5000,
)
ODD = (None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, 0.5, 1e308, "", "0", "\ud83d\ude00", [], [0], {}, [[[[]]]], *HOSTILE)
LIMIT_S = 60
"""Seconds of one case, after which it fails."""


@dataclasses.dataclass
class Tally:
    """What happened.

    Attributes:
        codes: Cases by verb and exit code.
        pages: Pages that were written and looked at.
        seconds: Seconds in all.
    """

    codes: Counter[tuple[str, int]] = dataclasses.field(default_factory=Counter)
    pages: int = 0
    seconds: float = 0.0

    def add(self, other: Tally) -> None:
        """Add what happened to other files."""
        self.codes += other.codes
        self.pages += other.pages
        self.seconds += other.seconds

    def table(self) -> str:
        """A line for each verb, in Markdown."""
        lines = ["| verb | files | exit code 0 | 1 | 2 |", "|---|---|---|---|---|"]
        verbs = sorted({verb for verb, _ in self.codes})
        for verb, codes in [(v, [self.codes[v, k] for k in range(3)]) for v in verbs]:
            lines.append(f"| `{verb}` | {sum(codes):,} | {codes[0]:,} | {codes[1]:,} | {codes[2]:,} |")
        sums = [sum(n for (_, code), n in self.codes.items() if code == k) for k in range(3)]
        lines.append(f"| all | {sum(sums):,} | {sums[0]:,} | {sums[1]:,} | {sums[2]:,} |")
        return "\n".join(lines)


def fuzz(cases: int, seed: int, browser: Any = None) -> Tally:
    """Damage files and run a verb on each.

    Args:
        cases: How many.
        seed: Seed of all choices.
        browser: A browser in which each page is opened; without one its elements are looked at.

    Raises:
        AssertionError: Something happened that must not.
    """
    rng, tally, began = random.Random(seed), Tally(), time.monotonic()
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        folder = Path(name)
        whole = _write_files(folder)
        for _ in range(cases):
            _case(folder, whole, rng, tally, browser)
    tally.seconds = time.monotonic() - began
    return tally


def _case(folder: Path, whole: dict[str, bytes], rng: random.Random, tally: Tally, browser: Any) -> None:
    kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    damage = {"model": _damaged_text, "snapshot": lambda data, rng: damaged(bytearray(data), rng)}.get(kind, mutated)
    data = damage(whole[kind], rng)
    bad = folder / ("bad.py" if kind == "model" else "bad.json")
    bad.write_bytes(data)
    words = rng.choice(COMMANDS[kind]).split(" ")
    if rng.random() < 0.1:
        words.append("--json")
    if rng.random() < 0.3:
        (folder / "out.json").write_text("before")
    before = _contents(folder)
    code, out, err = _run(words)
    shown = (words, code, out[-2000:], err[-2000:], data[:2000])
    assert code in (0, 1, 2), shown
    for line in f"{out}\n{err}".split("\n"):
        assert line.isprintable(), (ascii(line), shown)
    assert not re.search(r"Traceback|^(error|hint): forged", out + err, re.MULTILINE), shown
    after = _contents(folder)
    for path, content in before.items():
        if code != 0 or not path.name.startswith("out"):
            assert after.pop(path) == content, (path.name, shown)
    for path in after:
        assert path.name.startswith("out") and code == 0, (path.name, shown)
        if path.suffix == ".html":
            _check_page(path, browser)
            tally.pages += 1
    for path in folder.iterdir():
        if path.name.startswith(("out", "bad")):
            path.unlink()
    if code == 2:
        assert re.fullmatch(r"error: [^\n]+\n(\nhint: [^\n]+\n)?", err), shown
    tally.codes[words[0], code] += 1


def _run(words: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _limited():
        code = main(words)
    sys.modules.pop("bad", None)
    return code, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"longer than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class _Elements(html.parser.HTMLParser):
    """Names of the elements of a page that run or load something, and of attributes that do."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found[tag] += tag in ("script", "style", "img", "iframe", "object", "embed", "link", "base", "form", "meta")
        for name, value in attrs:
            self.found[name] += name.startswith("on") or (
                name in ("src", "href", "style") and not (value or "").startswith("data:")
            )


EXPECTED = Counter({"script": 2, "style": 1, "link": 1, "meta": 3})
CURVE = Counter({"img": 1})


def _contents(folder: Path) -> dict[Path, bytes]:
    """Every file of a folder; Python keeps compiled code of a model beside it, in a folder."""
    return {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def _check_page(path: Path, browser: Any) -> None:
    elements = _Elements()
    elements.feed(path.read_text())
    assert +elements.found in (EXPECTED, EXPECTED + CURVE), +elements.found
    if browser is not None:
        browser.get_log("browser")
        browser.get(path.as_uri())
        assert browser.execute_script("return document.title") != "run"
        assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
        assert [entry["message"] for entry in browser.get_log("browser")] == []


def graph_with_views() -> checkmate.Graph:
    """Every field of the format, none at its default."""
    values = (
        checkmate.Value("x", 64),
        checkmate.Value("x.T", 0, base=0),
        checkmate.Value("y", 32),
        checkmate.Value("z", 8, kept=True),
    )
    ops = (
        checkmate.Op("make", (), (0,), 5, workspace_bytes=16, replay_bytes=8, kind="aten.rand", source="m.py:1"),
        checkmate.Op("turn", (0,), (1,), 0),
        checkmate.Op("read", (1,), (2,), 3, clobbered_by=(3,), phase="loss"),
        checkmate.Op("end", (2,), (3,), 2, recomputable=False, phase="backward"),
    )
    return checkmate.Graph(ops, values, order=((0, 3),), resident_bytes=100, cost_unit="us", name="views")


def _write_files(folder: Path) -> dict[str, bytes]:
    """Files that are whole, and the bytes of those to be damaged."""
    result = checkmate.solve(checkmate.Problem(chain(), "5.5MiB"))
    contents: dict[str, Any] = {
        "chain": chain(),
        "views": graph_with_views(),
        "plan": checkmate.Plan(plan(AGAIN).steps),  # without the digest, it is a plan of a graph with other names, too
        "all": checkmate.Plan(plan(KEEP_ALL).steps),
        "result": result,
        "curve": checkmate.pareto(chain(), points=3),
    }
    for name, content in contents.items():
        checkmate.write(content, folder / f"{name}.json")
    with contextlib.redirect_stdout(io.StringIO()) as device:
        main(["devices", "H100", "--json"])
    (folder / "device.json").write_text(device.getvalue())
    (folder / "model.py").write_text(MODEL)
    checkmate.write(network(4), folder / "layers.json")
    (folder / "snapshot.json").write_bytes(pickle.dumps(failed_run().snapshot()))
    contents |= {"layers": None, "snapshot": None}
    files = {name: (folder / f"{name}.json").read_bytes() for name in (*contents, "device") if name != "all"}
    return {**files, "model": MODEL.encode()}


_GRAPH = (
    "verify bad.json plan.json --budget 5.5MiB",
    "explain bad.json plan.json",
    "diff bad.json plan.json all.json",
    "report bad.json plan.json --out out.html --perfetto out.trace",
    "plan bad.json --budget 60% --solver keep-all --out out.json",
    "plan bad.json --budget 80% --time-limit 0.1 --out out.json --result out.result.json",
    "min-budget bad.json --time-limit 0.1 --out out.json",
    "pareto bad.json --points 2 --time-limit 0.1 --out out.json",
    "max-batch bad.json chain.json --batch 1 --large-batch 2 --budget 9MiB --time-limit 0.1 --out out.plan.json",
    "max-batch bad.json --batch 1 --budget 9MiB --time-limit 0.1 --out out.plan.json",
)
_PLAN = (
    "verify chain.json bad.json --budget 5.5MiB",
    "explain chain.json bad.json",
    "diff chain.json plan.json bad.json",
    "report chain.json bad.json --out out.html --perfetto out.trace",
    "report chain.json plan.json --against bad.json --out out.html",
)
COMMANDS = {
    "chain": _GRAPH,
    "views": _GRAPH,
    "plan": _PLAN,
    "result": _PLAN,
    "curve": ("explain chain.json plan.json --curve bad.json", "report chain.json plan.json --curve bad.json --out out.html"),
    "layers": (
        "regions bad.json --budget 60% --time-limit 0.2 --out out.json",
        "regions bad.json --budget 60% --time-limit 0.2 --save modules",
        "regions bad.json --budget 60% --time-limit 0.2 --save nothing --modules layers.*",
    ),
    "snapshot": ("oom bad.json", "oom bad.json --device 0 --most 2"),
    "device": ("devices bad.json", "devices bad.json", "fits model.py:build --device bad.json --time-limit 0.1 --out out.json"),
    "model": ("capture bad.py:build --out out.json",),
}
"""Command lines by the kind of file that is damaged."""

WEIGHTS = {"chain": 8, "views": 6, "plan": 6, "result": 4, "curve": 4, "layers": 3, "snapshot": 3, "device": 3, "model": 1}
"""How often each kind is chosen: PyTorch traces a model in the time of ten other cases."""


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A file with faults: a quarter is damaged in its bytes, half has hostile text, the rest says something else in its JSON."""
    what = rng.randrange(4)
    if what == 0:
        return damaged(bytearray(data), rng)
    document = json.loads(data)
    texts = [(holder, key) for holder, key in places(document) if isinstance(holder[key], str) and key not in KEYWORDS]
    if what > 1 and texts:
        for holder, key in rng.sample(texts, rng.randint(1, len(texts))):
            holder[key] = rng.choice(HOSTILE)
        return json.dumps(document).encode()
    for _ in range(rng.randint(1, 3)):
        holder, key = rng.choice(list(places(document)))
        act = rng.randrange(6)
        if act == 0:
            del holder[key]
        elif act == 1 and isinstance(holder, dict):
            holder[rng.choice(["", "extra", str(key) * 2, *HOSTILE])] = holder.pop(key)
        elif act == 2 and isinstance(holder[key], int):
            holder[key] += rng.choice([-1, 1, 7, -(2**40), 2**62])
        elif isinstance(holder[key], str) and key != "format":
            holder[key] = rng.choice(HOSTILE)
        else:
            holder[key] = rng.choice(ODD)
        if not document:
            break
    return json.dumps(document).encode()


KEYWORDS = ("format", "phase", "reason", "step", "graph_digest")
"""Fields whose text is one of a few, or identifies another file."""


def damaged(data: bytearray, rng: random.Random) -> bytes:
    """Bytes that are cut short, or have others in them."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        act = rng.randrange(4)
        if act == 0:
            del data[at:]
        elif act == 1:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 4)))
        elif act == 2:
            data[at : at + rng.randint(1, 9)] = b""
        else:
            pieces = [b"[" * 5000, b"{", b'"', b"-", b"9" * 400, b"\x00", b"\xff", b"e999", b"\x1b]0;x\x07"]
            data[at : at + 1] = rng.choice(pieces)
    return bytes(data)


def _damaged_text(data: bytes, rng: random.Random) -> bytes:
    """Code with a piece cut out or a letter put in, never a digit: a larger size would take memory."""
    at = rng.randrange(len(data))
    inserted = rng.choice([b"", b"\x00", b"\xff", b"\x1b", b"(", b"x", b"\n", b"'"])
    return data[:at] + inserted + data[at + rng.randint(0, 20) :]


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every holder and key in a document."""
    if isinstance(node, dict | list):
        for key, child in list(node.items() if isinstance(node, dict) else enumerate(node)):
            yield node, key
            yield from places(child)


if __name__ == "__main__":
    from tests.report.conftest import start

    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    total, chromium = Tally(), start()
    try:
        for first in range(0, options.cases, 500):
            total.add(fuzz(min(500, options.cases - first), options.seed + first, chromium))
            sys.stderr.write(f"{first + 500} of {options.cases} files in {total.seconds:.0f} s\n")
    finally:
        chromium.quit()
    sys.stdout.write(f"{total.table()}\n\n{total.pages:,} pages in Chromium, {total.seconds:.0f} s, seed {options.seed}\n")
