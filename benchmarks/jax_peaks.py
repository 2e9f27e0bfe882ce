"""Compiled bytes, FLOPs and times of plans in JAX: networks in Flax NNX and Equinox, against the policies of `jax.checkpoint`.

For every network: five budgets, with the same bits at each (`exact=True`); every policy on each block, and a plan within the
bytes that the policy needs; the smallest bytes of both. A loop over 32 layers: five budgets between saving nothing and saving
everything, with one choice for all layers and with layers that differ. Bytes are those of temporary values as XLA compiles loss
and gradients, FLOPs those of the compiled program, times the least processor time of several runs, policy and plan in turn.
Exit status 1 if a promise breaks.

    python benchmarks/jax_peaks.py [--models transformer-nnx scan-equinox] [--time-limit 4] [--rounds 7]

Networks that are not named keep their rows of the last run.
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
from fresh import by_model, mib, ran_on

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
SCAN = "scan"
BUDGETS = ("85%", "70%", "55%", "40%", "25%")
MOST = 4
"""Most compilations of a request."""
WITHIN = 0.05
SLOWER = 1.03
NAMES = ("transformer", "bert", "vit", "unet", "resnet", "llama", SCAN)
LIBRARIES = ("nnx", "equinox")
COMPARED = "nnx"
MODELS = [f"{name}-{library}" for name in NAMES for library in LIBRARIES]
SCAN_SHARES = (0.85, 0.7, 0.5, 0.35, 0.2)
NESTED = "nested, sqrt"
POLICIES = ("nothing_saveable", "dots_with_no_batch_dims_saveable", "dots_saveable")


def main() -> int:
    """Run the benchmark, or one child of it."""
    return by_model(
        __file__,
        str(__doc__),
        MODELS,
        run=run,
        table=table,
        verdict=verdict,
        rounds=7,
        packages=("jax", "jaxlib", "flax", "equinox"),
    )


def run(model: str, time_limit_s: float, rounds: int) -> dict[str, Any]:
    """All rows of a network."""
    name, library = model.split("-")
    return run_scan(library, rounds) if name == SCAN else run_network(name, library, time_limit_s, rounds)


class Program:
    """A compiled program and what is known of it.

    Args:
        function: The function.
        arguments: Its arguments.
    """

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        import jax

        import checkmate.jax as cj

        self._run = jax.jit(function, compiler_options=cj.compiler_options()).lower(*arguments).compile()
        self._arguments = arguments
        self.temp_bytes = int(self._run.memory_analysis().temp_size_in_bytes)
        self.flop = float(self._run.cost_analysis()["flops"])

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
        from checkmate.jax.measure import calibrate
        from checkmate.jax.scan import search

        self.count = 0
        for module in (calibrate, search):
            module.temp_bytes = functools.partial(self._compile, module.temp_bytes)

    def _compile(self, original: Callable[..., int], *arguments: Any) -> int:
        self.count += 1
        return original(*arguments)

    def during(self, act: Callable[[], Any]) -> tuple[Any, int]:
        """What an action returns, and how many programs it compiled."""
        before = self.count
        return act(), self.count - before


def run_network(name: str, library: str, time_limit_s: float, rounds: int) -> dict[str, Any]:
    """A network whose blocks are not in a loop."""
    import jax
    from jax_networks import LIBRARIES, NETWORKS, in_groups

    import checkmate
    import checkmate.jax as cj

    lib = LIBRARIES[library]()
    network = NETWORKS[name](lib)
    compilations = Compilations()
    plain = Program(jax.value_and_grad(network.loss), network.arguments)
    rounded = plain.results()
    reference = Program(jax.value_and_grad(cj.remat(network.loss, exact=True)), network.arguments)
    exact_bits = reference.results()

    def planned(budget: Any, *, exact: bool = False) -> tuple[Any, dict[str, Any]]:
        loss = cj.remat(network.loss, budget=budget, time_limit_s=time_limit_s, exact=exact)
        began = time.perf_counter()
        _, count = compilations.during(lambda: jax.eval_shape(jax.value_and_grad(loss), *network.arguments))
        took = time.perf_counter() - began
        program = Program(jax.value_and_grad(loss), network.arguments)
        resident = loss.graph.resident_bytes
        return program, {
            "ops": len(loss.graph.ops),
            "resident_bytes": resident,
            "room_bytes": loss.budget_bytes - resident,
            "planned_bytes": loss.result.peak_bytes - resident,
            "temp_bytes": program.temp_bytes,
            "flop": program.flop,
            "overhead": loss.result.overhead,
            "gap": loss.result.gap,
            "compilations": count,
            "plan_s": took,
            **compared(exact_bits if exact else rounded, program.results()),
        }

    def within(budget: Any, *, exact: bool = False) -> dict[str, Any]:
        """The plan within a budget, or within the smallest one if it is refused."""
        try:
            return planned(budget, exact=exact)[1]
        except checkmate.InfeasibleBudgetError as refused:
            return planned(refused.smallest_bytes, exact=exact)[1]

    row: dict[str, Any] = {
        "plain": {"temp_bytes": plain.temp_bytes, "flop": plain.flop},
        "exact": {"temp_bytes": reference.temp_bytes, "flop": reference.flop},
        "points": [],
        "policies": {},
    }
    row["plain"]["time_s"], row["exact"]["time_s"] = in_turn([plain, reference], rounds)
    for budget in BUDGETS:
        point = within(budget, exact=True)
        row["points"].append({"budget": budget, **point})
        said(name, library, budget, mib(point["temp_bytes"]), "of", mib(point["room_bytes"]), point["plan_s"])
    if library != COMPARED:  # the same computation: policies save the same
        return row
    row["smallest"] = within("1%")
    wraps = {p: functools.partial(lib.checkpoint, policy=getattr(jax.checkpoint_policies, p)) for p in POLICIES}
    losses = {p: functools.partial(network.loss, wrap=wrap) for p, wrap in wraps.items()}
    if name not in ("unet", "resnet"):
        losses[NESTED] = functools.partial(network.loss, run=functools.partial(in_groups, lib))
    for policy, loss in losses.items():
        theirs = Program(jax.value_and_grad(loss), network.arguments)
        found: dict[str, Any] = {"temp_bytes": theirs.temp_bytes, "flop": theirs.flop}
        row["policies"][policy] = found
        try:
            ours, plan = planned(row["smallest"]["resident_bytes"] + theirs.temp_bytes)
        except checkmate.InfeasibleBudgetError:
            continue
        found["time_s"], plan["time_s"] = in_turn([theirs, ours], rounds)
        found["plan"] = plan
        said(name, library, policy, mib(theirs.temp_bytes), plan["flop"] / theirs.flop, plan["time_s"] / found["time_s"])
    return row


def run_scan(library: str, rounds: int) -> dict[str, Any]:
    """A loop over 32 layers: one choice for all layers, layers that differ, and the policies of `jax.checkpoint`."""
    import jax
    from jax_networks import LENGTH, LIBRARIES, scanned_layer

    import checkmate
    import checkmate.jax as cj

    block, carry, slices = scanned_layer(LIBRARIES[library]())
    specs = [jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), nest) for nest in (carry, slices)]
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), specs[1])
    compilations = Compilations()

    def program(loop: Callable[..., Any]) -> Program:
        def total(carry: Any, slices: Any) -> Any:
            return (loop(carry, slices)[0] ** 2).sum()

        return Program(jax.value_and_grad(total, argnums=(0, 1)), (carry, slices))

    def under(policy: Any) -> Callable[..., Any]:
        return lambda carry, slices: jax.lax.scan(jax.checkpoint(block, policy=policy), carry, slices)

    def nested(carry: Any, slices: Any) -> Any:
        inner = LENGTH // (outer := 2 ** round(math.log2(LENGTH) / 2))
        folded = jax.tree.map(lambda a: a.reshape(outer, inner, *a.shape[1:]), slices)
        body = jax.checkpoint(lambda carry, some: jax.lax.scan(jax.checkpoint(block), carry, some))
        return jax.lax.scan(body, carry, folded)

    plain = program(lambda carry, slices: jax.lax.scan(block, carry, slices))
    losses = {p: under(getattr(jax.checkpoint_policies, p)) for p in POLICIES} | {NESTED: nested}
    theirs = {p: program(loss) for p, loss in losses.items()}
    fixed = 2 * sum(a.nbytes for a in jax.tree.leaves((carry, slices))) + 2 * carry.nbytes
    expected = plain.results()

    def planned(find: Callable[..., Any], budget_bytes: int) -> tuple[Program, dict[str, Any]]:
        began = time.perf_counter()
        found, count = compilations.during(lambda: find(block, specs[0], one, length=LENGTH, budget=budget_bytes))
        took = time.perf_counter() - began
        loop = found
        if isinstance(found, cj.ScanPolicy):
            body, policy = found
            loop = lambda carry, slices: jax.lax.scan(jax.checkpoint(body, policy=policy), carry, slices)  # noqa: E731
        ours = program(loop)
        groups = [[g.layers, g.nested, len(g.names)] for g in getattr(found, "groups", ())]
        return ours, {
            "room_bytes": budget_bytes - (found.peak_bytes - found.temp_bytes),
            "planned_bytes": found.temp_bytes,
            "temp_bytes": ours.temp_bytes,
            "flop": ours.flop,
            "overhead": found.overhead,
            "bound": found.bound,
            "compilations": count,
            "plan_s": took,
            "groups": groups,
            **compared(expected, ours.results()),
        }

    low = theirs["nothing_saveable"].temp_bytes
    row: dict[str, Any] = {"plain": {"temp_bytes": plain.temp_bytes, "flop": plain.flop}, "points": [], "policies": {}}
    for share in SCAN_SHARES:
        budget = fixed + low + int(share * (plain.temp_bytes - low))
        uniform, one_choice = planned(cj.policy, budget)
        groups, differing = planned(cj.scan, budget)
        one_choice["time_s"], differing["time_s"] = in_turn([uniform, groups], rounds)
        row["points"].append({"share": share, "uniform": one_choice, "groups": differing})
        said(SCAN, library, share, one_choice["overhead"], differing["overhead"], differing["groups"])
    for policy, found in theirs.items():
        row["policies"][policy] = {"temp_bytes": found.temp_bytes, "flop": found.flop}
        try:
            ours, plan = planned(cj.scan, fixed + found.temp_bytes)
        except checkmate.InfeasibleBudgetError:
            continue
        row["policies"][policy]["time_s"], plan["time_s"] = in_turn([found, ours], rounds)
        row["policies"][policy]["plan"] = plan
    return row


def verdict(model: str, row: dict[str, Any]) -> list[str]:
    """What does not hold."""
    if model.startswith(SCAN):
        points = [point[kind] for point in row["points"] for kind in ("uniform", "groups")]
        broken = [] if better(row) >= 3 else [f"{model}: layers that differ are 5 % better at {better(row)} budgets"]
    else:
        points = [*row["points"], *(p["plan"] for p in row["policies"].values() if "plan" in p)]
        points += [row["smallest"]] if "smallest" in row else []
        broken = [f"{model}: other bits" for p in row["points"] if p["identical"] < p["arrays"]]
        if model.startswith("transformer"):
            off = [p for p in points if abs(p["planned_bytes"] / p["temp_bytes"] - 1) > WITHIN]
            broken += [
                f"{model} at {p['share']}: planned {mib(p['planned_bytes'])}, compiled {mib(p['temp_bytes'])}" for p in off
            ]
    broken += [f"{model}: {mib(p['temp_bytes'])} of {mib(p['room_bytes'])}" for p in points if p["temp_bytes"] > p["room_bytes"]]
    broken += [f"{model}: {p['compilations']} compilations" for p in points if p["compilations"] > MOST]
    for policy, theirs in row["policies"].items():
        plan = theirs.get("plan")
        if plan is None:
            broken.append(f"{model}: no plan within the bytes of {policy}")
        elif plan["flop"] > theirs["flop"]:
            broken.append(f"{model}: {plan['flop'] / theirs['flop']:.3f} of the FLOPs of {policy}")
        elif plan["time_s"] > SLOWER * theirs["time_s"]:
            broken.append(f"{model}: {plan['time_s'] / theirs['time_s']:.3f} of the time of {policy}")
    return broken


def better(row: dict[str, Any]) -> int:
    """Budgets at which layers that differ compute 5 % less again than one choice for all layers."""
    return sum(p["groups"]["overhead"] - 1 <= (1 - WITHIN) * (p["uniform"]["overhead"] - 1) for p in row["points"])


def table(report: dict[str, Any]) -> str:
    """The page of the documentation."""
    rows = report["models"]
    lowest = [
        model
        for model, row in rows.items()
        if "smallest" in row and row["smallest"]["temp_bytes"] < min(p["temp_bytes"] for p in row["policies"].values())
    ]
    compared_with = [model for model, row in rows.items() if "smallest" in row]
    lines = [
        "# JAX: compiled bytes of plans, and the policies of `jax.checkpoint`",
        "",
        "Made by `benchmarks/jax_peaks.py`; do not edit. Every network has a process of its own. Bytes are MiB of temporary",
        "values of loss and gradients: *planned* by the plan, *compiled* by XLA. *Overhead* is the plan's cost over keeping",
        "everything.",
        "*Exact* plans (`exact=True`) are compared bit by bit with the exact program that keeps everything, other plans with the",
        "plain function.",
        "",
        ran_on(report),
        "",
        f"The smallest bytes of a plan are below those of every policy for {len(lowest)} of {len(compared_with)} networks.",
    ]
    for model, row in rows.items():
        lines += ["", f"## {model}", ""]
        lines += scan_lines(row) if model.startswith(SCAN) else network_lines(row)
        if not row["policies"]:
            continue
        lines += [
            "",
            "| policy | compiled | plan compiled | FLOPs of the plan | time of the plan |",
            "|---|---:|---:|---:|---:|",
        ]
        for policy, theirs in row["policies"].items():
            plan = theirs.get("plan")
            ours = (
                f"{mib(plan['temp_bytes'])} | {plan['flop'] / theirs['flop']:.3f} | {plan['time_s'] / theirs['time_s']:.3f}"
                if plan
                else "refused | |"
            )
            lines.append(f"| {policy} | {mib(theirs['temp_bytes'])} | {ours} |")
    return "\n".join(lines) + "\n"


def network_lines(row: dict[str, Any]) -> list[str]:
    """Budgets of a network, exact, then plans within the bytes of policies."""
    plain, exact = row["plain"], row["exact"]
    lines = [
        f"{row['points'][0]['ops']} ops. Without a plan {mib(plain['temp_bytes'])}; every op alone, and everything kept, "
        f"{mib(exact['temp_bytes'])} in {exact['time_s'] / plain['time_s']:.2f} of the time.",
        "",
        "| | budget | planned | compiled | planned / compiled | overhead | gap | compilations | seconds | same bits |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    points = [(f"exact, {p['budget']}", p) for p in row["points"]]
    points += [("smallest", row["smallest"])] if "smallest" in row else []
    points += [(f"as {policy}", p["plan"]) for policy, p in row["policies"].items() if "plan" in p]
    for kind, p in points:
        bits = f"{p['identical']} of {p['arrays']}" + (f", {p['difference']:.0e}" if p["difference"] else "")
        lines.append(
            f"| {kind} | {mib(p['room_bytes'])} | {mib(p['planned_bytes'])} | {mib(p['temp_bytes'])} "
            f"| {p['planned_bytes'] / p['temp_bytes']:.3f} | {p['overhead']:.4f} | {100 * p['gap']:.1f} % | {p['compilations']} "
            f"| {p['plan_s']:.1f} | {bits} |"
        )
    return lines


def scan_lines(row: dict[str, Any]) -> list[str]:
    """Budgets of a loop over layers."""
    lines = [
        f"Without a plan {mib(row['plain']['temp_bytes'])}; one choice for all layers against layers that differ. Groups are",
        "layers and the number of values that each of them saves.",
        "",
        "| budget | one: compiled | overhead | differ: compiled | overhead | bound | less again | time | groups |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for p in row["points"]:
        one, other = p["uniform"], p["groups"]
        less = 1 - (other["overhead"] - 1) / (one["overhead"] - 1) if one["overhead"] > 1 else 0.0
        groups = ", ".join(
            f"{n} save {names}" + (f" in loops of {nested}" if nested > 1 else "") for n, nested, names in other["groups"]
        )
        lines.append(
            f"| {mib(one['room_bytes'])} | {mib(one['temp_bytes'])} | {one['overhead']:.4f} | {mib(other['temp_bytes'])} "
            f"| {other['overhead']:.4f} | {other['bound']:.4f} | {100 * less:.1f} % "
            f"| {other['time_s'] / one['time_s']:.3f} | {groups} |"
        )
    return lines


def said(*words: Any) -> None:
    """Tell how far the benchmark is."""
    print(*(f"{word:.4g}" if isinstance(word, float) else word for word in words), file=sys.stderr, flush=True)


def compared(expected: Sequence[Any], given: Sequence[Any]) -> dict[str, Any]:
    """How many arrays have the same bits, and the largest difference relative to the largest entry of its array."""
    import numpy as np

    pairs = list(zip(expected, given, strict=True))
    return {
        "arrays": len(pairs),
        "identical": sum(np.array_equal(a, b) for a, b in pairs),
        "difference": max(float(np.abs(a - b).max() / (np.abs(a).max() + 1e-30)) for a, b in pairs),
    }


if __name__ == "__main__":
    sys.exit(main())
