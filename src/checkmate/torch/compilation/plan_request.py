"""Second step of a compilation: the plan of a captured graph, for all ranks that plan together; some ops may run in pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from torch import fx

from checkmate.core.budget import Budget, keep_all_bytes
from checkmate.core.errors import InfeasibleBudgetError
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.frontend.counted_memory import resolved_budget
from checkmate.studies.larger_step import plan_of_larger, remember
from checkmate.torch.chunking.choose import ChunkableStep, Chunks, choose_chunks, with_offer, with_smallest_peak
from checkmate.torch.compilation.graph_planner import GraphPlanner, part_of_a_step
from checkmate.torch.compilation.resident_account import ResidentAccount
from checkmate.torch.distributed.consensus import Ranks
from checkmate.torch.distributed.plan_on_rank0 import plan_on_rank0
from checkmate.torch.graph.op_properties import op_names
from checkmate.torch.joint.capture import Capture, Costs
from checkmate.torch.options import Options

Recapture = Callable[[fx.GraphModule], Capture]
Plan = Callable[[Capture, Recapture], tuple[Capture, Result]]


class PlanRequest:
    """Plans the captures of one Dynamo graph."""

    def __init__(
        self,
        options: Options,
        planner: GraphPlanner,
        ranks: Ranks | None,
        account: ResidentAccount,
        captured: Callable[[ChunkableStep[Capture]], NoReturn] | None,
    ) -> None:
        self._options, self.planner, self.ranks, self._account, self._captured = options, planner, ranks, account, captured

    def plan(self, capture: Capture, recapture: Recapture) -> tuple[Capture, Result]:
        """The plan of a capture, and the capture that was planned: with regions in pieces, or figures that ranks agreed on."""
        planned, result = self._planned(capture, recapture)
        if self.planner.is_alone(capture.graph):
            remember(self.planner.options.budget, capture.graph, result, whole=planned.joint is capture.joint)
        return planned, result

    def _planned(self, capture: Capture, recapture: Recapture) -> tuple[Capture, Result]:
        step = ChunkableStep(capture, (capture.joint,), lambda modules: recapture(modules[0]))
        if self._captured is not None:
            self._captured(step)
        is_alone, budget = self.planner.is_alone(capture.graph), self.planner.options.budget
        try:
            if self.chunks is not None and not self.planner.keeps_everything:
                if not is_alone:
                    capture = with_smallest_peak(step, self.chunks, budget.total_bytes if budget else None).captured
                elif (chosen := self._in_pieces(step, self.chunks)) is not None:
                    return chosen
            early = frozenset[int]() if is_alone else self._account.early_ops(capture)
            graph, result = self.agreed(capture.graph, lambda graph: self.planner.plan(graph, early))
        except InfeasibleBudgetError as error:
            # If tensors that stay to the end set the floor, no op is too large.
            if error.binding_op and self.offered is not None:
                part = ChunkableStep(_part(capture), step.joints, lambda modules: _part(recapture(modules[0])))
                raise with_offer(error, step if is_alone else part, self.offered, part=not is_alone) from None
            raise
        return replace(capture, graph=graph), result

    def agreed(self, graph: Graph, plan: Callable[[Graph], Result]) -> tuple[Graph, Result]:
        """The plan of a graph. If several ranks plan together, rank 0 makes it for all of them, from figures they agree on."""
        if self.ranks is None:
            return graph, plan(graph)
        return plan_on_rank0(self.ranks, graph, f"a budget of {self.planner.options.budget}", plan)

    @functools.cached_property
    def chunks(self) -> Chunks | None:
        """The ops that may run piece by piece, if there is a budget to keep; None if none may."""
        return None if self._options.chunking == "off" else self._chunkable(exact=self._options.chunking == "exact")

    @property
    def offered(self) -> Chunks | None:
        """The ops that could run piece by piece, if the options do not allow all of them."""
        return None if self._options.chunking == "auto" else self._chunkable(exact=False)

    def _chunkable(self, *, exact: bool) -> Chunks | None:
        options, allows = self._options, self._allowed_in_pieces()
        eager = options.compiler == "eager" and options.host is None and options.budget_of != "reserved"
        return None if options.budget is None or not eager or allows is None else Chunks(exact, allows)

    @property
    def in_pieces(self) -> Callable[[fx.Node], bool] | None:
        """The ops that run piece by piece under Inductor, in regions that compute nothing twice; None if none may."""
        return self._allowed_in_pieces() if self._options.chunking == "auto" else None

    def _allowed_in_pieces(self) -> Callable[[fx.Node], bool] | None:
        options = self._options
        if self.ranks is not None or options.checkpoints != "hints" or options.plan is not None:
            return None
        excluded = frozenset(options.no_recompute)
        return lambda op: excluded.isdisjoint(op_names(op))

    def _in_pieces(self, step: ChunkableStep[Capture], chunks: Chunks) -> tuple[Capture, Result] | None:
        """The fastest plan found if regions may run piece by piece; None if there is nothing to gain."""
        options = self.planner.options
        assert options.budget is not None
        known = plan_of_larger(options.budget, step.whole.graph, options.counted)
        if known is not None:
            return step.whole, known
        budget_bytes = resolved_budget(options.budget, step.whole.graph, options.counted)
        within = options.budget.with_total(budget_bytes, step.whole.graph)

        def solve(capture: Capture, time_s: float | None) -> Result:
            return self.planner.plan_within(capture.graph, within, budget_bytes, time_s)

        return choose_chunks(step, chunks, budget_bytes, options.time_limit_s, solve)

    def evaluation(self, budget: Budget, measured: Costs, estimated: Costs) -> tuple[Costs, Plan]:
        """The costs and the plan of a graph without a backward, measured if estimates, which may be too large, matter."""
        costs = estimated

        def plan(capture: Capture, recapture: Recapture) -> tuple[Capture, Result]:
            nonlocal costs
            if keep_all_bytes(capture.graph) > budget.resolve(capture.graph):
                costs = measured
                capture = recapture(capture.joint)
            return capture, self.planner.plan_evaluation(capture.graph, budget)

        return lambda nodes: costs(nodes), plan


def _part(capture: Capture) -> Capture:
    """A capture with the graph of `part_of_a_step`."""
    return replace(capture, graph=part_of_a_step(capture.graph))
