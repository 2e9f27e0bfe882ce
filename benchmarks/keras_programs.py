"""Keras programs of `keras_models.py` by `model.fit` within budgets.

For each program: keeping everything by the plan, 60 %, 40 % and the fixed bytes plus half of what the plan that keeps everything
needs above them, each in a process of its own, on epochs of four batches. The promises checked are: the measured peak keeps the
budget, in every step as a callback of Keras sees it too, the weights after some steps are those of keeping everything, to the
bit, and a refusal names a budget that then works. Programs of blocks also run under `tf.recompute_grad` and `keras.RematScope`,
and by a plan within the bytes that each of these takes, which may be 3 % slower. Times are processor times. Exit status 1 if a
promise breaks.

    python benchmarks/keras_programs.py [--models mnist_convnet lstm] [--time-limit 20]

Programs that are not named keep their rows of the last run.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from fresh import ROOT, by_model, mib
from keras_models import PROGRAMS, SOURCES, WITH_BLOCKS

sys.path.insert(0, str(ROOT))

COUNTING = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
HALF = "half"
BUDGETS = ("60%", "40%", HALF)
BATCHES = 4
PLAN_S = 60.0
RIVALS = ("recompute_grad", "RematScope")
SLOWER = 1.03


def main() -> int:
    """Run the benchmark, or one child of it."""
    settings = {"rows": "programs", "packages": ("tensorflow", "keras"), "settings": COUNTING, "time_limit_s": 20.0}
    return by_model(__file__, __doc__, tuple(PROGRAMS), run=run, verdict=verdict, row=row, own_cache=True, **settings)


def row(name: str, ask: Callable[..., Any]) -> dict[str, Any]:
    """All runs of a program."""
    whole = ask(name, "1TiB")
    points = {}
    for budget in BUDGETS:
        asked = str((whole["measured_bytes"] + whole["resident_bytes"]) // 2) if budget == HALF else budget
        points[budget] = ask(name, asked)
        if named := points[budget].get("named_bytes"):
            points[budget] |= {"retried": ask(name, str(named))}
    found = {"source": SOURCES[name], "whole": whole, "plain": ask(name, ""), "points": points}
    for how in RIVALS if name in WITH_BLOCKS else ():
        theirs = ask(name, "", how)
        found[how] = theirs if "error" in theirs else theirs | {"ours": ask(name, str(theirs["peak_bytes"]))}
    return found


def rival(name: str, how: str) -> tuple[Any, Any, Any]:
    """A program whose blocks are computed again by one of the ways of TensorFlow and Keras."""
    import keras
    from tf2_peaks import cut, recomputed

    if how == "RematScope":
        with keras.RematScope(mode="full"):
            return PROGRAMS[name]()
    model, x, y = PROGRAMS[name]()
    pieces = cut(model)
    runs = recomputed(pieces)

    class Pieces(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.pieces = pieces

        def call(self, x: Any) -> Any:
            for run in runs:
                x = run(x)
            return x

    again = Pieces()
    again.compile(optimizer="adam", loss=model.loss)
    return again, x, y


def run(name: str, time_limit_s: float, _rounds: int, budget: str = "", how: str = "") -> dict[str, Any]:
    """Child: some steps of `fit`, within a budget, as Keras runs them, or by another way to compute again."""
    import keras
    import numpy as np

    import checkmate
    import checkmate.keras
    from tests.keras.points import Peaks

    keras.utils.set_random_seed(0)
    model, x, y = rival(name, how) if how else PROGRAMS[name]()
    examples = len(y)
    taken = np.random.default_rng(3).permutation(np.arange(BATCHES * examples) % examples)
    x, y = [each[taken] for each in x] if isinstance(x, list) else x[taken], y[taken]
    fit: dict[str, Any] = {"batch_size": examples, "verbose": 0, "shuffle": False}
    amount = int(budget) if budget.isdigit() else budget
    planned: Any = checkmate.keras.fit_within(model, amount, time_limit_s=time_limit_s) if budget else None
    began, peaks = time.process_time(), Peaks()
    try:
        model.fit(x, y, epochs=1, **fit)
    except checkmate.InfeasibleBudgetError as error:
        return {"refused": error.message, "named_bytes": error.smallest_bytes}
    except ValueError as error:  # Keras cannot build or run it this way
        if not how:
            raise
        return {"error": str(error).splitlines()[0]}
    first_s = time.process_time() - began
    model.fit(x, y, epochs=3, callbacks=[peaks], **fit)
    took: list[float] = []
    for _ in range(3):
        began = time.process_time()
        model.fit(x, y, **fit)
        took.append((time.process_time() - began) / BATCHES)
    digest = hashlib.sha256(b"".join(variable.numpy().tobytes() for variable in model.variables)).hexdigest()[:16]
    held = sum(variable.numpy().nbytes for variable in (*model.variables, *model.optimizer.variables))
    found = {"first_s": first_s, "step_s": min(took), "digest": digest, "peak_bytes": held + max(peaks.bytes)}
    if planned is None:
        return found
    graph = planned._steps.planned
    resident = next(iter(graph.values())).capture.graph.resident_bytes
    figures = {"budget_bytes": planned.budget_bytes, "measured_bytes": planned.measured_bytes, "resident_bytes": resident}
    return {**found, **figures, "planned_bytes": planned.results[0].peak_bytes, "overhead": planned.results[0].overhead}


def verdict(name: str, row: dict[str, Any]) -> list[str]:
    """What does not hold."""
    broken = []
    beside = {how: row[how]["ours"] for how in RIVALS if "ours" in row.get(how, {})}
    for budget, asked in (row["points"] | beside).items():
        where, point = f"{name} at {budget}", asked.get("retried", asked)
        if "refused" in point:
            broken.append(f"{where}: {point['refused']}")
            continue
        if (taken := max(point["measured_bytes"], point["peak_bytes"])) > point["budget_bytes"]:
            broken.append(f"{where}: measured {mib(taken)} of {mib(point['budget_bytes'])}")
        if point["digest"] != row["whole"]["digest"]:
            broken.append(f"{where}: other bits than keeping everything")
        if point["first_s"] > PLAN_S:
            broken.append(f"{where}: the first step took {point['first_s']:.0f} s")
    for how, ours in beside.items():
        slower = ours.get("step_s", 0) / row[how]["step_s"]
        if slower > SLOWER:
            broken.append(f"{name} beside {how}: {slower:.3f} of its time")
    return broken


if __name__ == "__main__":
    sys.exit(main())
