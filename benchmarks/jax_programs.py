"""JAX programs in the shape of public ones within budgets, as their authors would compile them: `jax.jit`, no options.

For each program of `jax_registry.py`: 60 %, 40 % and the fixed bytes plus half of what plain JAX needs above them. The promises
checked are: compiled bytes of the caller's own program keep the budget; gradients equal those of plain JAX to rounding; a refusal
names a budget that then works at once; a second process takes at most two seconds more than plain JAX. For programs with
blocks, also a plan within the bytes of each policy of `jax.checkpoint`, which saves nothing without `compiler_options()`, and the
processor time of both. Exit status 1 if a promise breaks.

    python benchmarks/jax_programs.py [--models nanodo wmt] [--time-limit 20] [--rounds 5]

Programs that are not named keep their rows of the last run.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import jax_models  # noqa: F401 - registers its programs
import jax_registry
import jax_science_models  # noqa: F401
from fresh import by_model, mib

HALF = "half"
BUDGETS = ("60%", "40%", HALF)
NESTED = "nested"
POLICIES = ("nothing_saveable", "dots_saveable", NESTED)
SLOWER = 1.03
WITHIN = 0.08
LATER_S = 2.0
ROUNDING = 2e-5


def main() -> int:
    """Run the benchmark, or one child of it."""
    packages = ("jax", "jaxlib", "flax", "equinox", "haliax")
    settings = {"own_cache": True, "packages": packages, "time_limit_s": 20.0, "rows": "programs"}
    return by_model(__file__, __doc__, tuple(jax_registry.PROGRAMS), run=run, verdict=verdict, row=row, **settings)


def row(name: str, ask: Callable[..., Any]) -> dict[str, Any]:
    """All runs of a program: budgets twice with one cache, then the policies."""
    found = {"source": jax_registry.SOURCES[name], **ask(name, "budgets")}
    again = ask(name, "again")
    for budget, second in again["points"].items():
        found["points"][budget]["second_s"] = second.get("processor_s", math.nan) - again["plain_s"]
    if name in jax_registry.WITH_BLOCKS:
        found["policies"] = ask(name, "policies")
    return found


def run(name: str, time_limit_s: float, rounds: int, how: str) -> dict[str, Any]:
    """Child: a program within its budgets, or beside policies."""
    return policies(name, time_limit_s, rounds) if how == "policies" else budgets(name, time_limit_s)


def compiled(function: Callable[..., Any], arguments: Any, options: Any = None) -> tuple[Any, float]:
    """The caller's program, and the processor time in which it was made."""
    import jax

    began = time.process_time()
    program = jax.jit(function, compiler_options=options).lower(*arguments).compile()
    return program, time.process_time() - began


def with_gradients(loss: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Loss and gradients."""
    import jax

    return jax.value_and_grad(loss, has_aux=name == "resnet")


def total_bytes(program: Any) -> int:
    """Bytes of arguments, results and temporary values."""
    analysis = program.memory_analysis()
    return analysis.argument_size_in_bytes + analysis.output_size_in_bytes + analysis.temp_size_in_bytes


def budgets(name: str, time_limit_s: float) -> dict[str, Any]:
    """A program within each budget."""
    import checkmate
    import checkmate.jax as cj
    from checkmate.core.budget import fixed_bytes

    loss, arguments = jax_registry.PROGRAMS[name](lambda block: block)
    plain, plain_s = compiled(with_gradients(loss, name), arguments)
    expected, temp = plain(*arguments), plain.memory_analysis().temp_size_in_bytes
    points: dict[str, Any] = {}
    for budget in BUDGETS:
        asked: Any = total_bytes(plain) - temp // 2 if budget == HALF else budget
        point: dict[str, Any] = {}
        for _ in range(2):
            planned: Any = cj.remat(loss, budget=asked, time_limit_s=time_limit_s)
            try:
                program, spent_s = compiled(with_gradients(planned, name), arguments)
            except checkmate.InfeasibleBudgetError as error:
                point["refused"] = point.get("refused", 0) + 1
                point["message"], asked = str(error).split("\n")[0], error.smallest_bytes
                if asked is None:
                    break
                continue
            resident = fixed_bytes(planned.graph)
            point |= {
                "ops": len(planned.graph.ops),
                "budget_bytes": planned.budget_bytes - resident,
                "planned_bytes": planned.result.peak_bytes - resident,
                "verified_bytes": planned.temp_bytes,
                "temp_bytes": program.memory_analysis().temp_size_in_bytes,
                "overhead": planned.result.overhead,
                "processor_s": spent_s,
                "difference": difference(expected, program(*arguments)),
            }
            break
        points[budget] = point
    return {"temp_bytes": temp, "fixed_bytes": total_bytes(plain) - temp, "plain_s": plain_s, "points": points}


def policies(name: str, time_limit_s: float, rounds: int) -> dict[str, Any]:
    """Processor time of a plan over that of each policy, within the bytes of the policy."""
    import jax

    import checkmate
    import checkmate.jax as cj

    options, found = cj.compiler_options(), {}
    for policy in POLICIES:

        def wrap(block: Callable[..., Any], policy: str = policy) -> Callable[..., Any]:
            if policy == NESTED:
                return jax.checkpoint(lambda p, x: jax.checkpoint(block)(p, x))
            return jax.checkpoint(block, policy=getattr(jax.checkpoint_policies, policy))

        loss, arguments = jax_registry.PROGRAMS[name](wrap)
        theirs, _ = compiled(jax.value_and_grad(loss), arguments, options)
        planned: Any = cj.remat(
            jax_registry.PROGRAMS[name](lambda block: block)[0], budget=total_bytes(theirs), time_limit_s=time_limit_s
        )
        try:
            ours, _ = compiled(jax.value_and_grad(planned), arguments)
        except checkmate.InfeasibleBudgetError as error:
            found[policy] = {"temp_bytes": theirs.memory_analysis().temp_size_in_bytes, "refused": str(error).split("\n")[0]}
            continue
        times: list[list[float]] = [[], []]
        for _ in range(rounds + 1):
            for program, spent in zip((theirs, ours), times, strict=True):
                began = time.process_time()
                jax.block_until_ready(program(*arguments))
                spent.append(time.process_time() - began)
        found[policy] = {
            "temp_bytes": theirs.memory_analysis().temp_size_in_bytes,
            "plan_bytes": total_bytes(ours) - total_bytes(theirs) + theirs.memory_analysis().temp_size_in_bytes,
            "time": min(times[1][1:]) / min(times[0][1:]),
        }
    return found


def difference(expected: Any, given: Any) -> float:
    """The largest difference relative to the largest entry of all results."""
    import jax
    import numpy as np

    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(given), strict=True)]
    return max(float(np.abs(a - b).max()) for a, b in pairs) / max(float(np.abs(a).max()) for a, _ in pairs)


def verdict(name: str, row: dict[str, Any]) -> list[str]:
    """What does not hold."""
    broken = []
    for budget, point in row["points"].items():
        where = f"{name} at {budget}"
        if "temp_bytes" not in point or point.get("refused", 0) > 1:
            broken.append(f"{where}: no budget that works was named: {point['message']}")
            continue
        if point["temp_bytes"] > point["budget_bytes"]:
            broken.append(f"{where}: {mib(point['temp_bytes'])} of {mib(point['budget_bytes'])}")
        if not point["difference"] <= ROUNDING:
            broken.append(f"{where}: gradients differ by {point['difference']:.1g}")
        if abs(math.log(point["planned_bytes"] / point["temp_bytes"])) > WITHIN:
            broken.append(f"{where}: planned {mib(point['planned_bytes'])}, compiled {mib(point['temp_bytes'])}")
        if point["second_s"] > LATER_S:
            broken.append(f"{where}: a second process takes {point['second_s']:.1f} s more than plain JAX")
    for policy, result in row.get("policies", {}).items():
        if result.get("time", 0) > SLOWER:
            broken.append(f"{name}, {policy}: {result['time']:.3f} of the time")
        if "refused" in result or result["plan_bytes"] > result["temp_bytes"]:
            broken.append(f"{name}, {policy}: {result.get('refused', 'more bytes')}")
    return broken


if __name__ == "__main__":
    sys.exit(main())
