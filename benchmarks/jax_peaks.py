"""Compiled bytes, FLOPs and times of plans in JAX: networks in Flax NNX, against the policies of `jax.checkpoint`.

Every cell is a process: a network with one budget (`exact=True`, so that bits are compared), with the smallest
bytes of a plan, or with a policy of `jax.checkpoint` on each block and a plan within the bytes that the policy needs.
A loop over 32 layers has a policy for `jax.checkpoint` and a plan at each budget.
Bytes are those of temporary values as XLA compiles loss and gradients, FLOPs those of the compiled program, times the least
processor time of several runs, programs in turn. Exit status 1 if a promise breaks.

    python benchmarks/jax_peaks.py [--models transformer-nnx-55% scan-nnx-0.5] [--time-limit 4] [--rounds 7]

Cells that are not named keep their results of the last run.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from fresh import by_model, mib

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
SCAN = "scan"
SMALLEST = "smallest"
BUDGETS = ("85%", "70%", "55%", "40%", "25%")
SHARES = ("0.85", "0.7", "0.5", "0.35", "0.2", "0.185", "0.17", "0.14")
NESTED = "nested"
POLICIES = ("nothing_saveable", "dots_with_no_batch_dims_saveable", "dots_saveable")
NETWORKS = ("transformer", "unet", "llama")
WITHOUT_LAYERS = ("unet",)
MOST = 4
"""Most compilations of a request."""
WITHIN = 0.05
SLOWER = 1.03
SECTIONS = (SCAN, *NETWORKS)


def cells(name: str) -> list[str]:
    """What is measured of a network."""
    found = [*(SHARES if name == SCAN else (*BUDGETS, SMALLEST)), *POLICIES, *([] if name in WITHOUT_LAYERS else [NESTED])]
    return [f"{name}-nnx-{cell}" for cell in found]


def main() -> int:
    """Run the benchmark, or one child of it."""
    packages = ("jax", "jaxlib", "flax")
    models = [cell for section in SECTIONS for cell in cells(section)]
    return by_model(__file__, str(__doc__), models, run=run, verdict=verdict, rounds=7, packages=packages)


def run(model: str, time_limit_s: float, rounds: int) -> dict[str, Any]:
    """One cell."""
    name, _, cell = model.split("-", 2)
    return run_scan(cell, time_limit_s, rounds) if name == SCAN else run_network(name, cell, time_limit_s, rounds)


class Program:
    """A compiled function and what is known of it; with ``loops``, whose bodies XLA counts once, FLOPs are those of the trace."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any], *, loops: bool = False) -> None:
        import jax

        import checkmate.jax as cj

        self._run = jax.jit(function, compiler_options=cj.compiler_options()).lower(*arguments).compile()
        self._arguments = arguments
        analysis = self._run.memory_analysis()
        self.temp_bytes = int(analysis.temp_size_in_bytes)
        self.fixed_bytes = int(analysis.argument_size_in_bytes + analysis.output_size_in_bytes)
        self.flop = float(self._run.cost_analysis()["flops"]) if not loops else self._traced_flop(function)

    def _traced_flop(self, function: Callable[..., Any]) -> float:
        import jax
        from jax.interpreters.partial_eval import dce_jaxpr

        from checkmate.jax._compat import opened
        from checkmate.jax.graph.capture import flops

        jaxpr, _ = opened(jax.make_jaxpr(function)(*self._arguments))
        needed, *_ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))  # loops compute values that their derivative does not read
        return float(sum(map(flops, needed.eqns)))

    def results(self) -> list[Any]:
        """Flat results."""
        import jax
        import numpy as np

        return [np.asarray(leaf) for leaf in jax.tree.leaves(self._run(*self._arguments))]

    def time_s(self) -> float:
        """Processor time of a run."""
        import jax

        began = time.process_time()
        jax.block_until_ready(self._run(*self._arguments))
        return time.process_time() - began


def in_turn(programs: Sequence[Program], rounds: int) -> list[float]:
    """The least time of each program, run one after the other in every round."""
    times = [[program.time_s() for program in programs] for _ in range(rounds + 1)]
    return [min(column) for column in zip(*times[1:], strict=True)]


class Compilations:
    """Counts the programs that planning compiles."""

    def __init__(self) -> None:
        from checkmate.jax import calibrate, scan_policy

        self.count = 0
        for module in (calibrate, scan_policy):
            module.temp_bytes = functools.partial(self._compile, module.temp_bytes)

    def _compile(self, original: Callable[..., int], *arguments: Any, **keywords: Any) -> int:
        self.count += 1
        return original(*arguments, **keywords)

    def during(self, act: Callable[[], Any]) -> tuple[Any, int]:
        """What an action returns, and how many programs it compiled."""
        before = self.count
        return act(), self.count - before


def run_network(name: str, cell: str, time_limit_s: float, rounds: int) -> dict[str, Any]:
    """A cell of a network whose blocks are not in a loop."""
    import jax
    import jax_networks

    import checkmate
    import checkmate.jax as cj
    from checkmate.core.budget import fixed_bytes

    network = jax_networks.NETWORKS[name]()
    compilations = Compilations()
    exact = cell in BUDGETS
    whole = Program(jax.value_and_grad(cj.remat(network.loss, exact=exact)), network.arguments)

    def planned(budget: Any) -> tuple[Program, dict[str, Any]]:
        loss: Any = cj.remat(network.loss, budget=budget, time_limit_s=time_limit_s, exact=exact)
        began = time.perf_counter()
        _, count = compilations.during(lambda: jax.eval_shape(jax.value_and_grad(loss), *network.arguments))
        took = time.perf_counter() - began
        program = Program(jax.value_and_grad(loss), network.arguments)
        resident = fixed_bytes(loss.graph)
        return program, {
            "ops": len(loss.graph.ops),
            "room_bytes": loss.budget_bytes - resident,
            "planned_bytes": loss.result.peak_bytes - resident,
            "temp_bytes": program.temp_bytes,
            "flop": program.flop,
            "overhead": loss.result.overhead,
            "gap": loss.result.gap,
            "compilations": count,
            "plan_s": took,
            **compared(whole.results(), program.results()),
        }

    row: dict[str, Any] = {"whole": {"temp_bytes": whole.temp_bytes, "flop": whole.flop}}
    programs = [whole]
    budget: Any = "1%" if cell == SMALLEST else cell
    if cell not in (*BUDGETS, SMALLEST):
        loss = network.loss
        if cell == NESTED:
            loss = functools.partial(loss, run=jax_networks.in_groups)
        else:
            loss = functools.partial(
                loss, wrap=functools.partial(jax_networks.checkpoint, policy=getattr(jax.checkpoint_policies, cell))
            )
        programs = [Program(jax.value_and_grad(loss), network.arguments)]
        row["policy"] = {"temp_bytes": programs[0].temp_bytes, "flop": programs[0].flop}
        budget = fixed_bytes(network.arguments) + programs[0].temp_bytes
    try:
        ours, row["plan"] = planned(budget)
    except checkmate.InfeasibleBudgetError as refused:
        if "policy" in row:
            return row
        ours, row["plan"] = planned(refused.smallest_bytes)
    programs.append(ours)
    times = in_turn(programs, rounds)
    for key, time_s in zip(("policy" if "policy" in row else "whole", "plan"), times, strict=True):
        row[key]["time_s"] = time_s
    return row


def fixed_bytes(arguments: Sequence[Any]) -> int:
    """Bytes of the arguments, the gradients of the first one, and the loss."""
    import jax

    return sum(a.nbytes for a in jax.tree.leaves((arguments, arguments[0]))) + 4


def run_scan(cell: str, time_limit_s: float, rounds: int) -> dict[str, Any]:
    """A cell of the loop over 32 layers: a budget, with a policy and with plans, or a policy of JAX and a plan."""
    import jax
    import jax_networks

    import checkmate
    import checkmate.jax as cj

    length = jax_networks.LENGTH
    block, carry, slices = jax_networks.scanned_layer()
    compilations = Compilations()

    def program(loop: Callable[..., Any]) -> Program:
        def with_derivative(carry: Any, slices: Any, tangent: Any) -> Any:
            last, pull = jax.vjp(loop, carry, slices)
            return last, pull(tangent)

        return Program(with_derivative, (carry, slices, carry), loops=True)

    def loop_of(body: Callable[..., Any]) -> Callable[..., Any]:
        return lambda carry, slices: jax.lax.scan(body, carry, slices)[0]

    def under(policy: Any, body: Callable[..., Any] = block) -> Callable[..., Any]:
        return loop_of(jax.checkpoint(body, policy=policy))

    def nested(carry: Any, slices: Any) -> Any:
        outer = 2 ** round(math.log2(length) / 2)
        folded = jax.tree.map(lambda a: a.reshape(outer, length // outer, *a.shape[1:]), slices)
        body = jax.checkpoint(lambda carry, some: jax.lax.scan(jax.checkpoint(block), carry, some))
        return jax.lax.scan(body, carry, folded)[0]

    plain, nothing = program(loop_of(block)), program(under(jax.checkpoint_policies.nothing_saveable))

    def chosen(room_bytes: int) -> tuple[Program, dict[str, Any]]:
        x, one = jax.eval_shape(lambda: (carry, jax.tree.map(lambda a: a[0], slices)))
        began = time.perf_counter()
        budget = plain.fixed_bytes + room_bytes
        found, count = compilations.during(lambda: cj.policy(block, x, one, length=length, budget=budget))
        took = time.perf_counter() - began
        ours = program(under(found.policy, found.block))
        return ours, figures(ours, room_bytes, plain, found, count, took)

    def planned(room_bytes: int, exact: Program | None = None) -> tuple[Program, dict[str, Any]]:
        options: Any = {"budget": plain.fixed_bytes + room_bytes, "time_limit_s": time_limit_s, "exact": exact is not None}
        loop: Any = cj.remat(loop_of(block), **options)
        began = time.perf_counter()
        _, count = compilations.during(lambda: jax.eval_shape(lambda *given: jax.vjp(loop, *given)[0], carry, slices))
        took = time.perf_counter() - began
        ours = program(loop)
        return ours, figures(ours, room_bytes, exact or plain, loop.result, count, took)

    row: dict[str, Any] = {"whole": {"temp_bytes": plain.temp_bytes, "flop": plain.flop}}
    if cell in SHARES:
        room = nothing.temp_bytes + int(float(cell) * (plain.temp_bytes - nothing.temp_bytes))
        uniform, row["uniform"] = chosen(room)
        ours, row["plan"] = planned(room)
        exactly, row["exact"] = planned(room, exact=program(cj.remat(loop_of(block), exact=True)))
        times = in_turn([uniform, ours, exactly], rounds)
        for key, time_s in zip(("uniform", "plan", "exact"), times, strict=True):
            row[key]["time_s"] = time_s
        return row
    theirs = program(nested if cell == NESTED else under(getattr(jax.checkpoint_policies, cell)))
    row["policy"] = {"temp_bytes": theirs.temp_bytes, "flop": theirs.flop}
    try:
        ours, row["plan"] = planned(theirs.temp_bytes)
    except checkmate.InfeasibleBudgetError:
        return row
    for key, time_s in zip(("policy", "plan"), in_turn([theirs, ours], rounds), strict=True):
        row[key]["time_s"] = time_s
    return row


def figures(ours: Program, room_bytes: int, expected: Program, found: Any, compilations: int, took_s: float) -> dict[str, Any]:
    """The row of a policy or a plan of the loop."""
    return {
        "room_bytes": room_bytes,
        "temp_bytes": ours.temp_bytes,
        "flop": ours.flop,
        "overhead": found.overhead,
        "compilations": compilations,
        "plan_s": took_s,
        **compared(expected.results(), ours.results()),
    }


def compared(expected: Sequence[Any], given: Sequence[Any]) -> dict[str, Any]:
    """How many arrays have the same bits, and the largest difference relative to the largest entry of all.

    Not to that of each array: the gradient of a bias of keys is zero but for rounding.
    """
    import numpy as np

    pairs = list(zip(expected, given, strict=True))
    return {
        "arrays": len(pairs),
        "identical": sum(np.array_equal(a, b) for a, b in pairs),
        "difference": max(float(np.abs(a - b).max()) for a, b in pairs) / max(float(np.abs(a).max()) for a, _ in pairs),
    }


def verdict(model: str, row: dict[str, Any]) -> list[str]:
    """What does not hold in a cell."""
    policy, plan = row.get("policy"), row.get("plan")
    if plan is None:
        return [f"{model}: no plan within its bytes"]
    broken = [
        f"{model}: {mib(p['temp_bytes'])} of {mib(p['room_bytes'])}" for p in of_cell(row) if p["temp_bytes"] > p["room_bytes"]
    ]
    broken += [f"{model}: {p['compilations']} compilations" for p in of_cell(row) if p["compilations"] > MOST]
    if "exact" in row and row["exact"]["identical"] < row["exact"]["arrays"]:
        broken.append(f"{model}: other bits")
    if model.endswith("%"):
        if plan["identical"] < plan["arrays"]:
            broken.append(f"{model}: other bits")
        if model.startswith("transformer") and abs(plan["planned_bytes"] / plan["temp_bytes"] - 1) > WITHIN:
            broken.append(f"{model}: planned {mib(plan['planned_bytes'])}, compiled {mib(plan['temp_bytes'])}")
    if policy is not None and plan["time_s"] > SLOWER * policy["time_s"]:
        broken.append(f"{model}: {plan['time_s'] / policy['time_s']:.3f} of the time")
    return broken


def of_cell(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The plans of a cell."""
    return [row[key] for key in ("uniform", "plan", "exact") if key in row]


if __name__ == "__main__":
    sys.exit(main())
