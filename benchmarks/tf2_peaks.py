"""Planned against measured peaks and times of Keras training steps, each in a fresh process.

For every network: keeping everything by the plan, three budgets, a plain ``tf.function``, and
`tf.recompute_grad` on blocks. The promises checked are: the measured peak keeps the budget; what the plan asks of
the allocator is what was reckoned, to 2 %; the numbers are those of keeping everything, to the bit; what the plan computes again
runs again. Exit status 1 if one breaks.

    python benchmarks/tf2_peaks.py [--models resnet50 unet] [--time-limit 20]

Networks that are not named keep their rows of the last run.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
from fresh import by_model, mib

from tests.tf2.budgets import BUDGETS

PIECES = 6
COUNTING = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
"""Settings under which TensorFlow counts what it allocates on a CPU."""


def main() -> int:
    """Run the benchmark, or one child of it."""
    settings = {"rows": "networks", "packages": ("tensorflow", "keras"), "settings": COUNTING, "time_limit_s": 20.0}
    return by_model(__file__, __doc__, tuple(BUDGETS), run=run, verdict=verdict, row=row, **settings)


def row(name: str, ask: Callable[..., Any]) -> dict[str, Any]:
    """All runs of a network, one after the other, each in a process of its own."""
    keep = ask(name, "planned", "")
    points = []
    for budget in BUDGETS[name]:
        point = ask(name, "planned", budget)
        same = {} if "refused" in point else {"identical": point["digest"] == keep["digest"]}
        points.append({"budget": budget, **point, **same})
    return {"keep_all": keep, "points": points, "plain": ask(name, "plain"), "recompute_grad": ask(name, "recompute_grad")}


def run(name: str, time_limit_s: float, _rounds: int, how: str, budget: str = "") -> dict[str, Any]:
    """Child: one of the ways to train."""
    if how == "planned":
        return planned(name, budget, time_limit_s)
    return plain(name) if how == "plain" else recompute_grad(name)


def build(name: str) -> tuple[Any, ...]:
    """Network, loss, optimizer and batch, the same in every process; one thread."""
    import tensorflow as tf

    from tests.tf2.networks import build

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    model, loss, optimizer, x, y = build(name)
    optimizer.build(model.trainable_variables)
    return model, loss, optimizer, tf.constant(x), tf.constant(y)


def observe(step: Callable[[Any, Any], Any], model: Any, optimizer: Any, x: Any, y: Any) -> dict[str, Any]:
    """Peak over resident and process time of a step, and a hash of all that some steps leave behind."""
    from checkmate.tf2.peak import measure_peak

    digest, peaks, times = hashlib.sha256(), [], []

    def once() -> None:
        prediction, loss = step(x, y)
        digest.update(prediction.numpy().tobytes() + loss.numpy().tobytes())

    for _ in range(5):
        began = time.process_time()
        peaks.append(measure_peak(once))
        times.append(time.process_time() - began)
    for variable in (*model.variables, *optimizer.variables):
        digest.update(variable.numpy().tobytes())
    # The first step of a plain function traces.
    return {"peak_bytes": max(peaks[1:]), "time_s": min(times[1:]), "digest": digest.hexdigest()[:16]}


def planned(name: str, budget: str, time_limit_s: float) -> dict[str, Any]:
    """Child: a planned step; without a budget it keeps everything."""
    import checkmate
    from checkmate.tf2._compat import trace_events
    from checkmate.tf2.apply_plan import REMAT
    from tests.tf2.steps import requested_peak

    model, loss, optimizer, x, y = build(name)
    began = time.perf_counter()
    if budget:
        try:
            step = checkmate.tf2.compile(model, loss, optimizer, x, y, budget=budget, time_limit_s=time_limit_s)
        except checkmate.InfeasibleBudgetError as error:
            return {"refused": error.message}
    else:
        step = checkmate.tf2.compile(model, loss, optimizer, x, y)
    compile_s = time.perf_counter() - began
    found = observe(step, model, optimizer, x, y)
    resident = step.graph.resident_bytes
    ran = {e.name.split(":")[0] for e in trace_events(lambda: step(x, y)) if ":" in e.name}
    return {
        **found,
        "ops": len(step.graph.ops),
        "resident_bytes": resident,
        "budget_bytes": None if step.budget_bytes is None else step.budget_bytes - resident,
        "live_bytes": step.result.peak_bytes - resident,
        "asked_bytes": requested_peak(lambda: step(x, y)),
        "measured_bytes": found["peak_bytes"],
        "overhead": step.result.overhead,
        "gap": step.result.gap,
        "planned_remats": len(step.plan.order) - len(step.graph.ops),
        "executed_remats": sum(REMAT in name for name in ran),
        "compile_s": compile_s,
    }


def plain(name: str) -> dict[str, Any]:
    """Child: what one writes without us, Grappler as it is by default."""
    from tests.tf2.points import plain_step

    model, loss, optimizer, x, y = build(name)
    return observe(plain_step(model, loss, optimizer), model, optimizer, x, y)


def recompute_grad(name: str) -> dict[str, Any]:
    """Child: the network cut into pieces where one tensor passes, each under `tf.recompute_grad`."""
    import keras
    import tensorflow as tf

    model, loss, optimizer, x, y = build(name)
    pieces = cut(model)
    if len(pieces) < 2:
        return {"peak_bytes": None, "time_s": None, "digest": None, "pieces": len(pieces)}
    runs = recomputed(pieces)
    compare = keras.losses.get(loss)

    @tf.function(autograph=False)
    def step(inputs: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            prediction = inputs
            for run in runs:
                prediction = run(prediction)
            value = tf.reduce_mean(compare(labels, prediction))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return prediction, value

    return {**observe(step, model, optimizer, x, y), "pieces": len(pieces)}


def recomputed(pieces: list[Any]) -> list[Callable[[Any], Any]]:
    """Pieces of a network in training, each computed again for its gradient."""
    import tensorflow as tf

    return [tf.recompute_grad(lambda t, piece=piece: piece(t, training=True)) for piece in pieces]


def cut(model: Any) -> list[Any]:
    """Pieces of a functional model between places where one tensor is all that passes, of about equal activations."""
    import keras

    operations = [o for o in model.operations if not isinstance(o, keras.layers.InputLayer)]
    last_use: dict[int, int] = {}
    for i, operation in enumerate(operations):
        for tensor in keras.tree.flatten(operation.input):
            last_use[id(tensor)] = i
    outputs = [operation.output for operation in operations]
    places = [i for i in range(len(operations) - 1) if all(last_use.get(id(t), -1) <= i for t in [model.input, *outputs[:i]])]
    sizes = [math.prod(t.shape[1:]) for t in outputs]
    chosen = {min(places, key=lambda i: abs(sum(sizes[: i + 1]) - sum(sizes) * k / PIECES)) for k in range(1, PIECES) if places}
    pieces, source = [], model.input
    for place in [*sorted(chosen), len(operations) - 1]:
        pieces.append(keras.Model(source, outputs[place]))
        source = outputs[place]
    return pieces


def verdict(name: str, row: dict[str, Any]) -> list[str]:
    """What does not hold."""
    broken = []
    for point in row["points"]:
        where = f"{name} at {point['budget']}"
        if "refused" in point:
            broken.append(f"{where}: {point['refused']}")
            continue
        if point["measured_bytes"] > point["budget_bytes"]:
            broken.append(f"{where}: measured {mib(point['measured_bytes'])} of {mib(point['budget_bytes'])}")
        if point["asked_bytes"] > 1.02 * point["live_bytes"]:
            broken.append(f"{where}: planned {mib(point['live_bytes'])}, asked for {mib(point['asked_bytes'])}")
        if not point["identical"]:
            broken.append(f"{where}: other bits than keeping everything")
        if point["executed_remats"] != point["planned_remats"]:
            broken.append(f"{where}: {point['executed_remats']} of {point['planned_remats']} recomputations ran")
    return broken


if __name__ == "__main__":
    sys.exit(main())
