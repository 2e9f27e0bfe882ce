"""A step on another device or at another size, with regions that run piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from checkmate.core.errors import GraphError, InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.evaluate import evaluate
from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, MinBudget, Result
from checkmate.solvers.solve import solve
from checkmate.torch.chunking.choose import (
    ChunkableStep,
    ChunkedStep,
    Chunks,
    choose_chunks,
    cuttable,
    with_pieces,
    with_smallest_peak,
)
from checkmate.torch.chunking.program import ChunkOp, NotChunkable, chunk_ops_of
from checkmate.torch.chunking.region_groups import RegionGroup
from checkmate.torch.chunking.regions import Region, grow
from checkmate.torch.chunking.replace import with_regions
from checkmate.torch.chunking.rules.lookup import rules_of
from checkmate.torch.chunking.rules.placements import Split
from checkmate.torch.chunking.stages import stages_of, with_private_operands
from checkmate.torch.chunking.unit_tangent import unit_tangent_of
from checkmate.torch.forecast.tracer import TracedStep
from checkmate.torch.graph.traced import outputs, producer
from checkmate.torch.joint.capture import Capture
from checkmate.torch.options import Chunking

_ANY = Chunks(exact=False)


def least_peak(step: TracedStep, chunking: Chunking) -> ChunkedStep[Capture]:
    """A step with those regions in pieces that lower its smallest peak; with ``"off"`` there are none."""
    return ChunkedStep(step.captured.whole, ()) if chunking == "off" else with_smallest_peak(step.captured, _ANY)


def best_in_pieces(
    step: TracedStep, least: ChunkedStep[Capture], smallest: MinBudget, budget_bytes: int, time_limit_s: float
) -> tuple[Graph, Result] | None:
    """The cheapest plan found within a budget, with its graph; None if none was found.

    The last resort is the plan of the smallest peak, on the graph of ``least``.
    """

    def plan(capture: Capture, time_s: float | None) -> Result:
        return solve(Problem(capture.graph, budget_bytes), limits=Limits(time_s=time_s))

    try:
        found = choose_chunks(step.captured, _ANY, budget_bytes, time_limit_s, plan)
    except (InfeasibleBudgetError, PlanNotFoundError):
        found = None
    if found is not None:
        return found[0].graph, found[1]
    if smallest.peak_bytes > budget_bytes:
        return None
    graph = least.captured.graph
    return graph, with_pieces(evaluate(graph, smallest.plan, budget_bytes), step.graph, least.groups)


def why_in_pieces(why: str, kinds: Sequence[RegionGroup]) -> str:
    """The reason for a bound that holds for plans with some regions piece by piece."""
    return ", ".join([why, *(f"with {kind.place} in pieces" for kind in kinds)])


def with_same_regions(step: ChunkableStep[Capture], kinds: Sequence[RegionGroup]) -> ChunkedStep[Capture]:
    """A step with the regions of another trace in pieces, and the same number of pieces.

    Sizes decide which regions are found in a trace. The regions of the other trace are therefore grown again from the tensors of
    the same names. A `GraphError` tells that at these sizes a region has other ops, or cannot run in as many pieces.
    """
    if not kinds:
        return ChunkedStep(step.whole, ())
    (whole,) = step.joints
    joint = cuttable(whole)
    nodes = {node.name: node for node in joint.graph.nodes}
    found = tuple(_same_kind(kind, joint.graph, nodes) for kind in kinds)
    try:
        return ChunkedStep(step.captured([with_regions(joint, [part for kind in found for part in kind.chunk_ops])]), found)
    except NotChunkable as error:
        raise _differs(str(error)) from error


def _same_kind(kind: RegionGroup, graph: fx.Graph, nodes: dict[str, fx.Node]) -> RegionGroup:
    early = any(part.stage.unit_tangent is not None for part in kind.chunk_ops)
    regions = tuple(_grown(region, graph, nodes) for region in kind.regions)
    return replace(kind, regions=regions, chunk_ops=tuple(part for region in regions for part in _parts(region, graph, early)))


def _grown(region: Region, graph: fx.Graph, nodes: dict[str, fx.Node]) -> Region:
    """The region with the same ops, grown from the tensor of the same name."""
    seed = nodes.get(region.seed.name)
    names = {op.name for op in region.rules}
    if seed is None:
        raise _differs(f"there is no {region.seed.name}")
    for split in _splits(region, seed):
        found = grow(seed, split, region.count, exact=region.exact)
        if found is None:
            continue
        for one in (found, with_private_operands(found, stages_of(found, graph), graph, lambda op: True)):
            if {op.name for op in one.rules} == names:
                return one
    raise _differs(f"the region of {region.seed.name} has other ops")


def _splits(region: Region, seed: fx.Node) -> list[Split]:
    """Ways to cut a seed, first the region's own. One sequence may be cut along another dimension than several."""
    op = producer(seed)
    place = outputs(op).index(seed)
    placements = [rule.outputs[place] for rule in rules_of(op)]
    return list(dict.fromkeys([region.splits[region.seed], *(p for p in placements if isinstance(p, Split))]))


def _parts(region: Region, graph: fx.Graph, early: bool) -> list[ChunkOp]:
    ahead = unit_tangent_of(region, graph) if early else None
    if early and ahead is None:
        raise _differs(f"the gradients of {region.seed.name} cannot be computed ahead of the backward")
    try:
        return chunk_ops_of(region, graph, ahead)
    except NotChunkable as error:
        raise _differs(str(error)) from error


def _differs(why: str) -> GraphError:
    return GraphError(
        f"what runs piece by piece at one size cannot at another: {why}",
        hint="give an example whose sizes are multiples of 32, such as the number of tokens, and near the one that is looked for",
    )
