"""One measured point in a process of its own: plan, run four steps, and compare bits. ``python -m tests.tf2.points JSON``."""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import checkmate
from checkmate.tf2._compat import grappler_off, trace_events
from checkmate.tf2.apply_plan import REMAT
from checkmate.tf2.peak import measure_peak
from tests.tf2.networks import build
from tests.tf2.steps import requested_peak

STEPS = 4


def plain_step(model: Any, loss: Any, optimizer: Any) -> Callable[[Any, Any], Any]:
    """What one writes without us; the loss is Keras's own."""
    model.compile(optimizer, loss)
    optimizer = model.optimizer  # in which the loss may be scaled

    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            prediction = model(x, training=True)
            value = model.compute_loss(x, y, prediction)
            scaled = optimizer.scale_loss(value)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return prediction, value

    return step


def digests(step: Callable[[Any, Any], Any], model: Any, optimizer: Any, x: Any, y: Any) -> list[str]:
    """Hashes of all that four steps give and leave behind."""
    seen: list[Any] = []
    with grappler_off():
        for _ in range(STEPS):
            seen += [t.numpy().copy() for t in tf.nest.flatten(step(x, y))]
    seen += [v.numpy() for v in (*model.variables, *optimizer.variables)]
    return [hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest()[:16] for a in seen]


def estimated_digest(name: str) -> str:
    """Digest of a network's graph, with costs that are estimated and not measured."""
    return checkmate.tf2.capture(*build(name), costs="estimated").digest


def point(name: str, budget: str, threads: int, references: list[str], time_limit_s: float = 10.0) -> dict[str, Any]:
    """Measure and compare one budget."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    model, loss, optimizer, x, y = build(name)
    x, y = tf.constant(x), tf.constant(y)
    before = [v.numpy() for v in model.variables]
    step = checkmate.tf2.compile(model, loss, optimizer, x, y, budget=budget, time_limit_s=time_limit_s)
    untouched = all(np.array_equal(a, b.numpy()) for a, b in zip(before, model.variables, strict=True))
    resident, members = step.graph.resident_bytes, step._first.capture.members
    seen: list[Any] = []
    peaks: list[int] = []

    def once() -> None:
        prediction, value = step(x, y)
        # Copies: an array of TensorFlow may be the very buffer, which would then stay.
        seen.extend(t.numpy().copy() for t in (*tf.nest.flatten(prediction), value))

    for _ in range(STEPS):
        peaks.append(resident + measure_peak(once))
    seen += [v.numpy() for v in (*model.variables, *optimizer.variables)]
    mine = [hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest()[:16] for a in seen]
    peaks.append(resident + measure_peak(once))
    asked = requested_peak(lambda: step(x, y))
    ran = {e.name.split(":")[0] for e in trace_events(lambda: step(x, y)) if ":" in e.name}
    found = {
        "budget_bytes": step.budget_bytes,
        "resident_bytes": resident,
        "planned_bytes": step.result.peak_bytes,
        "asked_bytes": resident + asked,
        "calibrated_bytes": step.measured_bytes,
        "measured_bytes": peaks,
        "untouched": untouched,
        "overhead": step.result.overhead,
        "gap": step.result.gap,
        "planned_remats": sum(len(members[o]) for o in step.plan.order) - sum(map(len, members)),
        "executed_remats": sum(REMAT in n for n in ran),
        "differs": {},
        "estimated_digest": estimated_digest(name),
    }
    for reference in references:
        other, loss, again, _, _ = build(name)
        if reference == "chained":
            everything = checkmate.Plan.from_order(step.graph, range(len(step.graph.ops)))
            run: Any = checkmate.tf2.compile(other, loss, again, x, y, plan=everything)
        else:
            again.build(other.trainable_variables)
            run = plain_step(other, loss, again)
        theirs = digests(run, other, again, x, y)
        assert len(mine) == len(theirs)
        found["differs"][reference] = sum(a != b for a, b in zip(mine, theirs, strict=True))
    return found


if __name__ == "__main__":
    gc.freeze()  # each of some thirty measurements collects garbage first, and 0.4 s of that looks at TensorFlow's own objects
    sys.stdout.write("RESULT " + json.dumps(point(**json.loads(sys.argv[1]))))
