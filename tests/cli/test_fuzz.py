"""Damaged files get exit code 2 and one clear line: never a traceback, never a half-written file."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

import checkmate
from tests.plot.graphs import AGAIN, chain, plan

QUICK = 4
"""Seeds of ten that run every time."""

MUTATIONS = 1000
"""In all: half of graph files, half of plan files; a third of them change bytes, the others change what the JSON says."""

ODD: list[Any] = [None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**40, 0.5, 1e308, "", "0", "\ud83d\ude00", [], [0], {}, [[[[]]]]]


def written(tmp_path: Path, content: object) -> bytes:
    path = tmp_path / "whole.json"
    checkmate.write(content, path)  # type: ignore[arg-type]
    return path.read_bytes()


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


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A file with one to three faults."""
    if rng.random() < 1 / 3:
        return damaged(bytearray(data), rng)
    document = json.loads(data)
    for _ in range(rng.randint(1, 3)):
        holder, key = rng.choice(list(places(document)))
        act = rng.randrange(4)
        if act == 0:
            del holder[key]
        elif act == 1 and isinstance(holder, dict):
            holder[rng.choice(["", "extra", str(key) * 2])] = holder.pop(key)
        elif act == 2 and isinstance(holder[key], int):
            holder[key] += rng.choice([-1, 1, 7, -(2**40), 2**62])
        else:
            holder[key] = rng.choice(ODD)
        if not document:
            break
    return json.dumps(document).encode()


def damaged(data: bytearray, rng: random.Random) -> bytes:
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
            data[at : at + 1] = rng.choice([b"[" * 5000, b"{", b'"', b"-", b"9" * 400, b"\x00", b"\xff", b"e999"])
    return bytes(data)


def places(node: Any) -> Any:
    """Every holder and key in a document."""
    if isinstance(node, dict | list):
        for key, child in list(node.items() if isinstance(node, dict) else enumerate(node)):
            yield node, key
            yield from places(child)


def kinds(tmp_path: Path) -> dict[str, bytes]:
    return {
        "graph": written(tmp_path, graph_with_views()),
        "chain": written(tmp_path, chain()),
        "plan": written(tmp_path, plan(AGAIN)),
        "result": written(tmp_path, checkmate.solve(checkmate.Problem(chain(), "5.5MiB"))),
    }


def command_lines(kind: str, rng: random.Random) -> tuple[str, ...]:
    """One that reads the damaged file."""
    if kind in ("graph", "chain"):
        lines = [
            ("verify", "bad.json", "good.plan.json", "--budget", "1MiB"),
            ("explain", "bad.json", "good.plan.json"),
            ("diff", "bad.json", "good.plan.json", "good.plan.json"),
            ("report", "bad.json", "good.plan.json", "--out", "out.html"),
            ("plan", "bad.json", "--budget", "60%", "--solver", "keep-all", "--out", "out.json"),
            (
                "max-batch",
                "bad.json",
                *["chain.graph.json", "--batch", "1", "--large-batch", "2", "--budget", "9MiB", "--out", "out.json"],
            ),
        ]
    else:
        lines = [
            ("verify", "chain.graph.json", "bad.json", "--budget", "5.5MiB"),
            ("explain", "chain.graph.json", "bad.json"),
            ("diff", "chain.graph.json", "good.plan.json", "bad.json"),
            (
                "report",
                "chain.graph.json",
                "bad.json",
                *["--out", "out.html", "--perfetto", "out.trace", "--memory-viz", "out.pickle"],
            ),
        ]
    return rng.choice(lines)


@pytest.mark.parametrize("seed", [s if s < QUICK else pytest.param(s, marks=pytest.mark.slow) for s in range(10)])
def test_a_damaged_file_is_refused_in_one_line(run, tmp_path, seed):
    """What still is a file that makes sense may be read; whatever else it is, is said."""
    rng = random.Random(seed)
    whole = kinds(tmp_path)
    checkmate.write(plan(AGAIN), tmp_path / "good.plan.json")
    refused = 0
    for _ in range(MUTATIONS // 10):
        kind = rng.choice(list(whole))
        data = mutated(whole[kind], rng)
        (tmp_path / "bad.json").write_bytes(data)
        before = {path.name for path in tmp_path.iterdir()}
        words = command_lines(kind, rng)
        outcome = run(*words)
        shown = (words, outcome, data[:2000])
        assert outcome.code in (0, 1, 2), shown
        assert "Traceback" not in outcome.err, shown
        made = {path.name for path in tmp_path.iterdir()} - before
        if outcome.code == 2:
            refused += 1
            assert re.fullmatch(r"error: [^\n]+\n(\nhint: [^\n]+\n)?", outcome.err), shown
            assert outcome.out == "", shown
            assert made == set(), shown
        for name in made:
            assert name.startswith("out"), shown
            assert outcome.code == 0, shown
            (tmp_path / name).unlink()
    assert refused > MUTATIONS // 20
