"""Run steps side by side and compare everything they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import checkmate
from checkmate import Plan
from checkmate.tf2.compat import grappler_off

ROOT = Path(__file__).parent.parent.parent


def keep_all(graph: checkmate.Graph) -> Plan:
    return Plan.from_order(graph, range(len(graph.ops)))


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


def child(**arguments: Any) -> dict[str, Any]:
    """One point of `tests.tf2.points` in a fresh process."""
    command = [sys.executable, "-m", "tests.tf2.points", json.dumps(arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[-1][len("RESULT ") :])
