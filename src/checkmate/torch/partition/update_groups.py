"""Updates of a whole step in groups: one call of the optimizer for several parameters, where the plan has room for gradients.

A graph has one update for each parameter, and a plan runs it as soon as the gradient is complete. Each call of an optimizer costs
time that does not depend on the number of its parameters: the Python code of its step, and on a GPU a dozen launches. An update
may run later than planned, together with others, if their gradients fit into memory until then.

No group raises the peak of its plan. The smallest possible budget is therefore that of updates one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from torch import fx

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Free, Plan, Step
from checkmate.core.simulate import Timeline, simulate
from checkmate.frontend.counted_memory import Counted
from checkmate.torch.graph.optimizer_ops import UPDATE, update_parameters, updates_of
from checkmate.torch.joint.capture import Capture

WORKSPACE = "checkmate_workspace"
"""Key in a node's metadata: the workspace of a call that no planner has seen, in bytes."""


class Group(NamedTuple):
    """Updates that run in one call, and the workspace of this call."""

    ops: tuple[int, ...]
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class _Update:
    """An update in a plan: the step that runs it, the steps that free what only it still reads, and how long it can wait."""

    op: int
    at: int
    frees: tuple[int, ...]
    freed_bytes: int
    deadline: int  # the first later step that it has to precede


def group_updates(capture: Capture, plan: Plan, counted: Counted | None) -> tuple[Plan, list[Group]]:
    """The plan with updates postponed into as few groups as possible without a higher peak, and the groups in its order.

    ``counted`` gives the bytes of a plan that count against the budget, if these are more than its peak: they do not rise either.
    """
    graph = capture.graph
    timeline = simulate(graph, plan)
    updates = _updates(timeline)
    limit = timeline.peak_bytes
    before = counted(graph, plan) if counted is not None and updates else 0
    for _ in range(3 if updates else 0):
        groups = _groups(capture, timeline, updates, limit)
        postponed = _postponed(plan, updates, groups)
        as_run = _with_workspace(graph, groups), msgspec.structs.replace(postponed, graph_digest="")
        after = simulate(*as_run)
        excess = max(after.peak_bytes - timeline.peak_bytes, 0 if counted is None else counted(*as_run) - before)
        if excess <= 0 and after.cost == timeline.cost:
            return postponed, groups
        limit -= excess
    return plan, [Group((u.op,), graph.ops[u.op].workspace_bytes) for u in updates]


def call_in_groups(module: fx.GraphModule, groups: Sequence[Group]) -> None:
    """Replace the updates of a module that runs a plan by one call for each group, in place."""
    graph = module.graph
    updates = iter(graph.find_nodes(op="call_function", target=UPDATE, sort=True))
    for ops, workspace in groups:
        nodes = [next(updates) for _ in ops]
        _, gradients, keys, which = zip(*(node.args for node in nodes), strict=True)
        with graph.inserting_before(nodes[-1]):
            call = graph.call_function(update_parameters, (list(gradients), keys[0], which))
        call.meta = {**nodes[-1].meta, WORKSPACE: workspace}
        for node in nodes:
            graph.erase_node(node)
    graph.lint()
    module.recompile()


def _updates(timeline: Timeline) -> list[_Update]:
    graph, steps, held = timeline.graph, timeline.plan.steps, timeline.bytes
    after: dict[int, set[int]] = {o: {*op.clobbered_by} for o, op in enumerate(graph.ops) if op.phase == "optimizer"}
    for a, b in graph.order:
        if a in after:
            after[a].add(b)
    later: dict[int, int] = {}  # op -> its first computation after the present one
    found: list[_Update] = []
    for p, step in reversed([*enumerate(steps)]):
        if not isinstance(step, Compute):
            continue
        if step.op in after:
            op = graph.ops[step.op]
            frees, freed, now = list[int](), 0, int(held[p]) - op.workspace_bytes
            for q in range(p + 1, len(steps)):
                following = steps[q]
                if not isinstance(following, Free):
                    break
                if following.value in (*op.inputs, *op.outputs):
                    frees.append(q)
                    freed += now - int(held[q])
                now = int(held[q])
            blocking = after[step.op] | {graph.producer[v] for v in op.inputs}
            deadline = min((later[o] for o in blocking if o in later), default=len(steps))
            found.append(_Update(step.op, p, tuple(frees), freed, deadline))
        later[step.op] = p
    return found[::-1]


def _groups(capture: Capture, timeline: Timeline, updates: Sequence[_Update], limit: int) -> list[Group]:
    """The fewest groups of consecutive updates, each of which runs in the place of its last one.

    A group that is possible without its first update is possible, too, if it begins later: the longest group at each place
    makes the fewest of them.
    """
    graph, held = timeline.graph, timeline.bytes
    groups: list[Group] = []
    first = 0
    while first < len(updates):
        waiting, deadline = 0, len(timeline.plan.steps)
        longest = Group((updates[first].op,), graph.ops[updates[first].op].workspace_bytes)
        for k in range(first + 1, len(updates)):
            last, update = updates[k - 1], updates[k]
            waiting, deadline = waiting + last.freed_bytes, min(deadline, last.deadline)
            # The plan's peak stays the peak of the step: an update that has it runs alone.
            possible = held[last.at] < timeline.peak_bytes and update.at < deadline
            if not possible or held[last.at + 1 : update.at].max(initial=0) + waiting > limit:
                break
            ops = tuple(u.op for u in updates[first : k + 1])
            workspace = _workspace_bytes(capture, ops)
            if held[update.at] - graph.ops[update.op].workspace_bytes + waiting + workspace <= limit:
                longest = Group(ops, workspace)
        groups.append(longest)
        first += len(longest.ops)
    return groups


def _workspace_bytes(capture: Capture, ops: Sequence[int]) -> int:
    alone, optimizer = dict[int, int](), 0
    for o in ops:
        node = capture.members[o].node
        assert node is not None
        _, _, optimizer, which = node.args
        alone[which] = capture.graph.ops[o].workspace_bytes  # type: ignore[index]
    return updates_of(optimizer).workspace_bytes(alone)  # type: ignore[arg-type]


def _postponed(plan: Plan, updates: Sequence[_Update], groups: Sequence[Group]) -> Plan:
    known = {update.op: update for update in updates}
    moved: dict[int, list[Step]] = {p: [] for u in updates for p in (u.at, *u.frees)}
    for ops, _ in groups:
        members = [known[o] for o in ops]
        positions = [u.at for u in members] + [q for u in members for q in u.frees]
        moved[members[-1].at] = [plan.steps[p] for p in positions]
    steps = [new for p, step in enumerate(plan.steps) for new in moved.get(p, [step])]
    return msgspec.structs.replace(plan, steps=tuple(steps))


def _with_workspace(graph: Graph, groups: Sequence[Group]) -> Graph:
    """The graph with the workspace of each group at its last update."""
    workspace = {o: w if o == ops[-1] else 0 for ops, w in groups for o in ops}
    ops = (msgspec.structs.replace(op, workspace_bytes=workspace.get(o, op.workspace_bytes)) for o, op in enumerate(graph.ops))
    return msgspec.structs.replace(graph, ops=tuple(ops))
