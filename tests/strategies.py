"""Random graphs with everything that `Graph` can say, from a seed: small enough for brute force."""

from __future__ import annotations

import random

import msgspec
from hypothesis import strategies as st

from checkmate import Compute, Discard, Fetch, Free, Graph, HostMemory, Offload, Op, Plan, Value


def random_graph(
    rng: random.Random, *, max_ops: int = 6, views: bool = True, rules: bool = True, training: bool | None = None
) -> Graph:
    """A graph of 1 to ``max_ops`` ops.

    Args:
        rng: Source of randomness.
        max_ops: Most ops.
        views: Whether ops may make views.
        rules: Whether some ops may not run again, are overwritten, are ordered or hold replay state.
        training: Whether it looks like forward and backward; at random by default.
    """
    training = rng.random() < 0.5 if training is None else training
    count = rng.randint(1, max_ops)
    ops: list[Op] = []
    values: list[Value] = []
    root: list[int] = []
    for o in range(count):
        inputs = _inputs(rng, len(values), o, count, training, ops)
        outputs: list[int] = []
        makes_view = views and inputs and rng.random() < 0.25
        for slot in range(rng.choice([1, 1, 1, 2])):
            v = len(values)
            if makes_view and (slot == 0 or rng.random() < 0.5):
                base = root[rng.choice(inputs)]
                values.append(Value(f"v{v}", 0, base))
                root.append(base)
            elif views and outputs and slot and values[outputs[0]].base is None and rng.random() < 0.1:
                values.append(Value(f"v{v}", 0, outputs[0]))
                root.append(outputs[0])
            else:
                values.append(Value(f"v{v}", rng.randint(0, 6)))
                root.append(v)
            outputs.append(v)
        phase = "forward" if not training or o < count // 2 else "loss" if o == count // 2 else "backward"
        ops.append(
            Op(
                name=f"f{o}",
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                cost=rng.randint(0, 6),
                workspace_bytes=rng.choice([0, 0, 0, 1, 3]) if not makes_view or rng.random() < 0.1 else 0,
                replay_bytes=rng.choice([0, 0, 0, 0, 1, 2]) if rules and not makes_view else 0,
                recomputable=not (rules and rng.random() < 0.12),
                clobbered_by=(rng.randint(o + 1, count - 1),) if rules and o + 1 < count and rng.random() < 0.08 else (),
                phase=phase,
            )
        )
    order = []
    if rules and count > 1 and rng.random() < 0.3:
        a, b = sorted(rng.sample(range(count), 2))
        order.append((a, b))
    kept = {v for v in range(len(values)) if rng.random() < 0.15} | ({len(values) - 1} if rng.random() < 0.6 else set())
    return Graph(
        ops=tuple(ops),
        values=tuple(Value(x.name, x.size_bytes, x.base, v in kept) for v, x in enumerate(values)),
        order=tuple(order),
        resident_bytes=rng.choice([0, 0, 5]),
        name="random",
    )


def with_views_of_views(rng: random.Random, graph: Graph) -> Graph:
    """The graph with more outputs of its ops, which are views of their outputs and of each other, listed in any order.

    Args:
        rng: Source of randomness.
        graph: The graph.
    """
    values = list(graph.values)
    ops: list[Op] = []
    for op in graph.ops:
        outputs = list(op.outputs)
        for _ in range(rng.choice([0, 1, 2, 3])):
            values.append(Value(f"v{len(values)}", 0, rng.choice(outputs)))
            outputs.append(len(values) - 1)
        rng.shuffle(outputs)
        ops.append(msgspec.structs.replace(op, outputs=tuple(outputs)))
    return msgspec.structs.replace(graph, ops=tuple(ops), values=tuple(values))


def with_more_kept(rng: random.Random, graph: Graph, chance: float) -> Graph:
    """The graph with some more of its values kept.

    Args:
        rng: Source of randomness.
        graph: The graph.
        chance: Probability for each value.
    """
    values = tuple(msgspec.structs.replace(x, kept=x.kept or rng.random() < chance) for x in graph.values)
    return msgspec.structs.replace(graph, values=values)


def with_host_values(rng: random.Random, graph: Graph, *, views: bool = True) -> Graph:
    """The graph with one to three values in front that are on the host before the step, each read by some ops, perhaps as a view.

    Args:
        rng: Source of randomness.
        graph: The graph.
        views: Whether some are read as views.
    """
    count = rng.randint(1, 3)
    ops = [Op(f"w{k}", (), (k,), 0, recomputable=False) for k in range(count)]
    values = [Value(f"w{k}", rng.randint(0, 6), on_host=True) for k in range(count)]
    viewed = [k for k in range(count) if views and rng.random() < 0.3]
    ops += [Op(f"w{k}.T", (k,), (count + i,), rng.choice([0, 0, 1])) for i, k in enumerate(viewed)]
    values += [Value(f"w{k}.T", 0, base=k) for k in viewed]
    first, more = len(ops), len(values)
    for op in graph.ops:
        fixed = tuple(v + more for v in op.inputs)
        read = tuple(v for v in range(more) if rng.random() < 0.4)
        moved = {"outputs": tuple(v + more for v in op.outputs), "clobbered_by": tuple(c + first for c in op.clobbered_by)}
        ops.append(msgspec.structs.replace(op, inputs=(*read, *fixed), **moved))
    values += [msgspec.structs.replace(x, base=None if x.base is None else x.base + more) for x in graph.values]
    order = tuple((a + first, b + first) for a, b in graph.order)
    return msgspec.structs.replace(graph, ops=tuple(ops), values=tuple(values), order=order)


def _inputs(rng: random.Random, made: int, o: int, count: int, training: bool, ops: list[Op]) -> list[int]:
    if not made:
        return []
    if training and ops:
        inputs = {rng.choice(ops[-1].outputs)}
        mirror = count - 1 - o
        if 0 <= mirror < len(ops) and rng.random() < 0.8:
            inputs.add(rng.choice(ops[mirror].outputs))
        return sorted(inputs)
    return sorted({rng.randrange(made) for _ in range(rng.choice([0, 1, 1, 2, 2, 3]))})


@st.composite
def graphs(draw: st.DrawFn, *, max_ops: int = 6, views: bool = True, rules: bool = True) -> Graph:
    """Hypothesis strategy of `random_graph`."""
    return random_graph(random.Random(draw(st.integers(0, 2**32 - 1))), max_ops=max_ops, views=views, rules=rules)


@st.composite
def graphs_and_orders(draw: st.DrawFn, *, max_ops: int = 6) -> tuple[Graph, list[int]]:
    """A graph and an order that computes every op at least once and reads only what is made."""
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    graph = random_graph(rng, max_ops=max_ops)
    return graph, random_order(rng, graph)


def random_order(rng: random.Random, graph: Graph) -> list[int]:
    """The graph's own order with recomputations that no rule forbids put in at random."""
    order: list[int] = []
    for o in range(len(graph.ops)):
        order.append(o)
        for again in range(o + 1):
            op = graph.ops[again]
            if op.recomputable and rng.random() < 0.15 and not any(c <= o for c in op.clobbered_by):
                order.append(again)
    return order


def random_host(rng: random.Random) -> HostMemory:
    """A host whose bus moves the bytes of random graphs in about the time of their ops, or much faster or slower."""
    rates = [rng.choice([3, 7, 10, 20, 50, 1000]) * 10**8 for _ in range(2)]
    return HostMemory(rng.choice([0, 4, 8, 1000]), *rates)


def random_copies(rng: random.Random, graph: Graph, host: HostMemory) -> Plan:
    """A plan that can run, with copies wherever a rule allows them: early, late, twice, of what is never read again.

    Its copies may take more of the host than there is. Of the values that are on the host before the step, some are on the device
    too.
    """
    there = {v for v, value in enumerate(graph.values) if value.on_host}
    absent = {v for v in there if rng.random() < 0.6}
    made = {graph.producer[v] for v in absent}
    given = [s for s in Plan.from_order(graph, random_order(rng, graph)).steps if not (isinstance(s, Compute) and s.op in made)]
    begin = max((p for p, s in enumerate(given) if s in [Compute(graph.producer[v]) for v in there]), default=-1)
    steps: list[Compute | Free | Offload | Fetch | Discard] = []
    live: set[int] = set()
    copied = set(there)
    away = set(absent)  # values that were freed early and that a later step may read
    owners = [v for v, value in enumerate(graph.values) if value.base is None]
    often = rng.choice([0.1, 0.3, 0.6])

    def fetch(v: int) -> None:
        steps.append(Fetch(v))
        live.add(v)
        away.discard(v)

    for p, step in enumerate(given):
        if isinstance(step, Compute):
            for v in graph.ops[step.op].inputs:
                if v in away:
                    fetch(v)
            live.update(graph.ops[step.op].outputs)
            away.difference_update(graph.ops[step.op].outputs)
            steps.append(step)
        elif isinstance(step, Free) and step.value in live:
            steps.append(step)
            live.remove(step.value)
        else:
            away.discard(step.value)
        for v in owners if p >= begin else ():
            if v in live and v not in copied and rng.random() < often:
                steps.append(Offload(v))
                copied.add(v)
            elif v in live and v in copied and rng.random() < often:
                steps.append(Free(v))
                live.remove(v)
                away.add(v)
            elif v in away and rng.random() < often / 2:
                fetch(v)
            elif v in copied - there and v not in away and rng.random() < often / 2:
                steps.append(Discard(v))
                copied.remove(v)
    for v, value in enumerate(graph.values):
        if value.kept and v in away and (v not in absent or rng.random() < 0.3):
            fetch(v)
    steps += [Discard(v) for v in sorted(copied - there) if rng.random() < 0.5]
    return Plan(tuple(steps), graph.digest, host)
