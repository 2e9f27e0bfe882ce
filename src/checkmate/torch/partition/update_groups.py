"""Updates of a whole step in groups: one call of the optimizer for several parameters, where a plan has room for their gradients.

A graph has one update for each parameter, and a plan runs it as soon as the gradient is complete. A call of the optimizer takes
time that does not depend on the number of its parameters: Python code, and on a GPU a dozen launches. An update can run later
than planned, together with others, if their gradients fit into memory until then. No group raises the peak of its plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from torch import fx

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Discard, Free, Plan, with_frees
from checkmate.core.simulate import Timeline, simulate
from checkmate.frontend.counted_memory import Counted
from checkmate.torch.graph.optimizer_ops import UPDATE, update_parameters

WORKSPACE = "checkmate_workspace"
"""Key in a node's metadata: bytes of workspace of a call that is no op of a captured graph."""


class Update(NamedTuple):
    """An update in a plan: its op and step, its workspace, the bytes freed after it, and the first step that has to follow it."""

    op: int
    at: int
    workspace_bytes: int
    freed_bytes: int
    deadline: int


Group = Sequence[Update]  # runs in one call: ``foreach`` then has the temporary tensors of all its parameters at once


def group_updates(graph: Graph, plan: Plan, counted: Counted | None) -> tuple[Plan, list[Group]]:
    """The plan with updates postponed into as few groups as possible without a higher peak, and the groups in its order.

    ``counted`` gives the bytes of a plan that count against the budget, if these are more than its peak: they do not rise either.
    """
    timeline = simulate(graph, plan)
    updates, limit = _updates(timeline), timeline.peak_bytes
    before = counted(graph, plan) if counted is not None and updates else 0
    for _ in range(3 if updates else 0):
        groups = _groups(timeline, updates, limit)
        postponed = _postponed(graph, plan, groups)
        ops, workspace = [*graph.ops], {group[-1]: sum(u.workspace_bytes for u in group) for group in groups}
        for u in updates:
            ops[u.op] = msgspec.structs.replace(ops[u.op], workspace_bytes=workspace.get(u, 0))
        as_run = msgspec.structs.replace(graph, ops=ops), msgspec.structs.replace(postponed, graph_digest="")
        after = simulate(*as_run)
        excess = max(after.peak_bytes - timeline.peak_bytes, 0 if counted is None else counted(*as_run) - before)
        if excess <= 0 and after.cost == timeline.cost:  # no longer waits for copies
            return postponed, groups
        limit -= excess
    return plan, [[update] for update in updates]


def call_in_groups(module: fx.GraphModule, groups: Sequence[Group]) -> None:
    """Replace the updates of a module that runs a plan by one call for each group, in place."""
    updates = iter(module.graph.find_nodes(op="call_function", target=UPDATE, sort=True))
    for group in groups:
        nodes = [next(updates) for _ in group]
        _, gradients, keys, which = zip(*(node.args for node in nodes), strict=True)
        with module.graph.inserting_before(nodes[-1]):
            call = module.graph.call_function(update_parameters, (list(gradients), keys[0], which))
        call.meta = {**nodes[-1].meta, WORKSPACE: sum(update.workspace_bytes for update in group)}
        for node in nodes:
            module.graph.erase_node(node)
    module.recompile()


def _updates(timeline: Timeline) -> list[Update]:
    graph, steps, held = timeline.graph, timeline.plan.steps, timeline.bytes
    first = {step.op: p for p, step in reversed([*enumerate(steps)]) if isinstance(step, Compute)}
    later = {o: {*op.clobbered_by} for o, op in enumerate(graph.ops) if op.phase == "optimizer"}
    for a, b in graph.order:
        later.get(a, set()).add(b)
    found: list[Update] = []
    for o in sorted(later, key=first.__getitem__):
        at, workspace, deadline = first[o], graph.ops[o].workspace_bytes, min((first[b] for b in later[o]), default=len(steps))
        end = next((q for q in range(at + 1, len(steps)) if not isinstance(steps[q], Free)), len(steps))
        found.append(Update(o, at, workspace, int(held[at] - workspace - held[end - 1]) if end > at + 1 else 0, deadline))
    return found


def _groups(timeline: Timeline, updates: Group, limit: int) -> list[Group]:
    """The fewest groups of consecutive updates, each of which runs in the place of its last one.

    A group that is possible is also possible without its first updates: the longest group at each place makes the fewest.
    """
    held, groups, k = timeline.bytes, list[Group](), 0
    while k < len(updates):
        end, waiting, deadline = k + 1, 0, len(held)
        for j, update in enumerate(updates[k:], k):
            if held[update.at] + waiting + sum(u.workspace_bytes for u in updates[k:j]) <= limit:
                end = max(end, j + 1)
            waiting, deadline = waiting + update.freed_bytes, min(deadline, update.deadline)
            following = updates[j + 1].at if j + 1 < len(updates) else deadline
            between = held[update.at + 1 : following].max(initial=0)
            # The peak of the step stays the plan's: an update that has it is not postponed.
            if held[update.at] == timeline.peak_bytes or following >= deadline or between + waiting > limit:
                break
        groups.append(updates[k:end])
        k = end
    return groups


def _postponed(graph: Graph, plan: Plan, groups: Sequence[Group]) -> Plan:
    """The plan with the updates of a group in the place of its last one; a gradient is freed after the update that reads it."""
    members = {u.op: [Compute(u.op) for u in group] if u is group[-1] else [] for group in groups for u in group}
    made = {v for o in members for v in graph.ops[o].outputs}
    steps = [s for s in plan.steps if not isinstance(s, Discard) and not (isinstance(s, Free) and s.value in made)]
    return with_frees(graph, (n for s in steps for n in (members.get(s.op, [s]) if isinstance(s, Compute) else [s])), plan.host)
