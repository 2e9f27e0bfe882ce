"""The plan that ``torch.utils.checkpoint`` runs with given regions and saved ops, on the graph of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from checkmate.core.graph import BOUNDARY, Graph
from checkmate.core.plan import Compute, Plan, Step
from checkmate.core.simulate import simulate
from checkmate.regions.blocks import Region

Choice = Mapping[Region, frozenset[int]]
"""The checkpointed regions, each with the ops that it saves. Regions that are not here keep what autograd saves."""


class Schedule:
    """Plans, peaks and costs of choices on one graph.

    Args:
        graph: A step whose optimizer is not part of it.
        regions: Its regions.
        region_bytes: Bytes that each checkpointed region holds beside the values of the graph: the saved random state.
    """

    def __init__(self, graph: Graph, regions: Sequence[Region], region_bytes: int = 0) -> None:
        self.graph, self.regions, self.region_bytes = graph, regions, region_bytes
        self._boundary = next(o for o, op in enumerate(graph.ops) if op.kind == BOUNDARY)
        self._region_of = {o: region for region in regions for o in region.backward}
        self._maker = {o: region for region in regions for o in region.forward}
        self._known: dict[tuple[tuple[Region, frozenset[int]], ...], int] = {}

    def recomputed(self, region: Region, saved: frozenset[int]) -> list[int]:
        """Ops that the backward of a checkpointed region runs again: all that are not saved."""
        return [o for o in region.ops if o not in saved]

    def cost(self, choice: Choice) -> int:
        """Cost of the recomputations of a choice."""
        ops = self.graph.ops
        return sum(ops[o].cost for region, saved in choice.items() for o in self.recomputed(region, saved))

    def plan(self, choice: Choice) -> Plan:
        """The plan of a choice: each region is run again before the first op of the backward that needs any of it."""
        order = list(range(self._boundary + 1))
        again: dict[Region, tuple[int, int]] = {}  # first and last position of the recomputation
        for o in range(self._boundary + 1, len(self.graph.ops)):
            region = self._region_of.get(o)
            if region is not None and region in choice and region not in again:
                recomputed = self.recomputed(region, choice[region])
                again[region] = (len(order), len(order) + len(recomputed) - 1)
                order += recomputed
            order.append(o)
        return self._with_late_frees(Plan.from_order(self.graph, order), choice, again)

    def peak_bytes(self, choice: Choice) -> int:
        """Peak of a choice."""
        key = tuple(sorted(choice.items(), key=lambda item: item[0].name))
        if key not in self._known:
            peak = simulate(self.graph, self.plan(choice)).peak_bytes
            self._known[key] = peak + self.region_bytes * len(choice)
        return self._known[key]

    def _with_late_frees(self, plan: Plan, choice: Choice, again: Mapping[Region, tuple[int, int]]) -> Plan:
        """Free later what a checkpointed region frees later than its last read.

        Results of saved ops are held until the recomputation is over, also those that no recomputed op reads. Every value of a
        region is held until the forward of the module returns, and again until the recomputation is over: a variable of the
        forward may hold it.
        """
        saved = {o for region, ops in choice.items() if region in again for o in ops}
        late: dict[int, list[Step]] = {}
        steps: list[Step] = []
        position = -1
        for step in plan.steps:
            if isinstance(step, Compute):
                steps += late.pop(position, ())
                position += 1
                steps.append(step)
                continue
            producer = self.graph.producer[step.value]
            region = self._maker.get(producer)
            until = position
            if region is not None and position <= self._boundary:
                until = again[region][1] if producer in saved else max(position, region.last)
            elif region is not None and region in again and again[region][0] <= position:
                until = max(position, again[region][1])
            if until > position:
                late.setdefault(until, []).append(step)
            else:
                steps.append(step)
        return Plan((*steps, *(step for rest in late.values() for step in rest)), plan.graph_digest)
