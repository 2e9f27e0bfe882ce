"""Twenty naive lines that say what a plan holds: the third account, for the tests only."""

from __future__ import annotations

from checkmate import Compute, Graph, Plan


def naive_bytes(graph: Graph, plan: Plan) -> list[int]:
    """Bytes at every step: live storages are a set of objects, found again at each step."""
    runs: dict[int, list[int]] = {}
    for step, what in enumerate(plan.steps):
        if isinstance(what, Compute):
            runs.setdefault(what.op, []).append(step)
    newest: dict[int, tuple[int, int]] = {}  # value -> (owner of its storage, step that made the storage)
    held: list[int] = []
    for step, what in enumerate(plan.steps):
        extra = 0
        if isinstance(what, Compute):
            op, old = graph.ops[what.op], dict(newest)
            for v in sorted(op.outputs, key=lambda v: graph.values[v].base is not None):
                base = graph.values[v].base
                if base is None:
                    newest[v] = (v, step)
                elif base in op.outputs or base in op.inputs:
                    newest[v] = (newest if base in op.outputs else old)[base]
                else:
                    newest[v] = old[next(u for u in op.inputs if graph.root[u] == graph.root[v])]
            extra = op.workspace_bytes + sum(graph.values[s[0]].size_bytes for s in set(old.values()) - set(newest.values()))
        else:
            del newest[what.value]
        replays = sum(
            graph.ops[o].replay_bytes for o, at in runs.items() if len(at) > 1 and (at[0] <= step < at[-1] or step == at[-1])
        )
        held.append(graph.resident_bytes + sum(graph.values[s[0]].size_bytes for s in set(newest.values())) + extra + replays)
    return held
