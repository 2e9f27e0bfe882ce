"""Run steps side by side and compare everything they leave behind."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import checkmate
from checkmate import Plan
from checkmate.solvers.reductions.unread import plan_of_needed
from checkmate.tf2._compat import grappler_off, trace_events

ROOT = Path(__file__).parent.parent.parent


def keep_all(graph: checkmate.Graph) -> Plan:
    return Plan.from_order(graph, range(len(graph.ops)))


def forgetful(graph: checkmate.Graph, every: int = 3) -> Plan:
    """A plan that forgets all that it may after each few backward ops, and computes it again on demand.

    The worst plan there is, and so the best one to find out whether recomputation is right. What a branch of the optimizer
    reads is not forgotten: one that updates all weights would have everything computed right before it, and only once.
    """
    order: list[int] = []
    live, done, pinned = set[int](), set[int](), set[int]()

    def compute(o: int) -> None:
        stack = [o]
        while stack:
            missing = [graph.producer[v] for v in graph.ops[stack[-1]].inputs if v not in live]
            if missing:
                stack.append(missing[0])
                continue
            p = stack.pop()
            if p not in done or not live.issuperset(graph.ops[p].outputs):
                order.append(p)
                done.add(p)
                live.update(graph.ops[p].outputs)

    readers: dict[int, list[int]] = {}
    for o, op in enumerate(graph.ops):
        for c in op.clobbered_by:
            readers.setdefault(c, []).append(o)
    branches = [op for op in graph.ops if op.phase == "optimizer" and op.kind == "If"]
    awaited = {graph.producer[v] for op in branches for v in op.inputs}
    for o, op in enumerate(graph.ops):
        if op.phase in ("backward", "optimizer") and o % every == 0:
            again = {p for p in done if graph.ops[p].recomputable and p not in pinned | awaited}
            live -= {v for p in again for v in graph.ops[p].outputs}
        for p in readers.get(o, ()):  # what it overwrites cannot be read again
            compute(p)
            pinned.add(p)
        compute(o)
    for v, value in enumerate(graph.values):
        if value.kept and v not in live:
            compute(graph.producer[v])
    return plan_of_needed(checkmate.Problem(graph, graph.resident_bytes), order)


def observe(step: Any, model: Any, optimizer: Any, x: Any, y: Any, steps: int = 4) -> list[np.ndarray]:
    """All that some steps give, and all variables after them."""
    seen: list[np.ndarray] = []
    with grappler_off():  # a plain tf.function is compared under the same option
        for _ in range(steps):
            seen += [t.numpy().copy() for t in tf.nest.flatten(step(x, y))]
    return seen + [v.numpy().copy() for v in (*model.variables, *optimizer.variables)]


def differing(ours: list[np.ndarray], theirs: list[np.ndarray]) -> int:
    """How many arrays differ in any bit."""
    assert len(ours) == len(theirs)
    return sum(a.tobytes() != b.tobytes() for a, b in zip(ours, theirs, strict=True))


def requested_peak(run: Callable[[], Any]) -> int:
    """The most bytes that a call requests from TensorFlow's allocator, above those allocated before it."""
    return max(itertools.accumulate(event.requested_bytes for event in trace_events(run)))


def child(hash_seed: str = "1", **arguments: Any) -> dict[str, Any]:
    """One point of `tests.tf2.points` in a fresh process."""
    command = [sys.executable, "-m", "tests.tf2.points", json.dumps(arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPP_MIN_LOG_LEVEL": "0"}
    environment["PYTHONHASHSEED"] = hash_seed
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    return {**json.loads(lines[-1][len("RESULT ") :]), "stderr": done.stderr}
