"""Dynamic programming over a training chain whose layers differ in cost and size (Beaumont et al. 2019).

The recursion: with the input of a part of the chain held, either compute up to some layer, hold that one, do the part above it
first and then the part below; or keep the top layer and run the next backward step. A part is a `_State`; the choice of the
layer to hold next is an `_Option`. Optimal substructure needs persistence: a held value is not dropped before its last
read, so that the part above and the part below do not share memory in any other way than by the values held between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from checkmate.core.errors import OptionError
from checkmate.core.problem import Problem
from checkmate.core.result import Reason, Termination
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.reductions.training_chain import TrainingChain
from checkmate.solvers.session import Session

Ints = npt.NDArray[np.int64]

_NOTHING: Final = -(1 << 60)
"""Peak of doing nothing: below any other, and with room to add bytes without overflow."""


@dataclass(frozen=True, slots=True)
class ChainDP:
    """The cheapest persistent plan of a `TrainingChain`, exact to the byte.

    Beaumont et al. (2019), "Optimal checkpointing for heterogeneous chains: how to train deep neural networks with limited
    memory", with frontiers of (peak, cost) in place of a table over memory rounded to slots: rounding either
    breaks the budget or wastes a part of it, and one run with frontiers answers every budget below its own.
    Exact among the plans that

    - compute the first of all layers, and the steps after them, in the given order, each step once, and
    - are persistent: a layer's value that is held beyond the computation of the next layer is held until it
      is read for the last time.

    That holds the best plan known of every unit chain; where sizes differ, one that is not persistent may be
    cheaper, so the cost is reported as the optimum of the class, not as a bound. Any other graph is
    refused: a step is an op of the loss or the backward pass, and may read the two highest layers
    that are still to be read, no others.

    Attributes:
        max_points: A frontier with more points is thinned, after which plans may not be the cheapest.
    """

    max_points: int = 4096

    def __post_init__(self) -> None:
        if self.max_points < 1:
            raise OptionError(f"max_points={self.max_points!r} must be one or more")

    def run(self, problem: Problem, session: Session) -> Termination:
        """Fill the table and offer the cheapest plan within the budget."""
        fold = FoldViews.of(problem.graph)
        folded = fold.apply(problem)
        chain = TrainingChain.of(folded)
        if isinstance(chain, str):
            return Termination(Reason.NOT_FOUND, detail=f"not a training chain: {chain}")
        budget = problem.budget_bytes - problem.graph.resident_bytes
        table = _Table(chain, budget, self.max_points)
        if not table.fill(session):
            return Termination(Reason.NOT_FOUND, limit="time")
        if not len(table.frontiers[_START].cost):
            detail = "thinned frontiers have none within the budget" if table.thinned else "no persistent plan keeps the budget"
            return Termination(Reason.NOT_FOUND, detail=detail)
        session.offer(fold.invert(table.order(budget)))
        exact = "thinned frontiers: possibly not the cheapest" if table.thinned else "the cheapest persistent plan of the chain"
        session.remark(exact)
        return Termination(Reason.FEASIBLE)


class _State(NamedTuple):
    """A part of the problem: all steps from one on that read above a layer, which is held and not counted.

    Attributes:
        layer: The layer; none of those above it is held, but perhaps the highest.
        step: Next step.
        has_top: Whether the highest layer still to be read is held; its bytes are counted.
    """

    layer: int
    step: int
    has_top: bool


_START = _State(0, 0, False)


class _Option(NamedTuple):
    """A choice in a state: compute layers and hold the last of them for a part of the rest, or run a step.

    Attributes:
        computed: Layers computed.
        ran: Step that is run, or -1.
        peak: Most bytes while that happens.
        inner: Part that is done first, while the last of the computed layers is held and not counted in it; or None.
        after: Part that is done afterwards.
    """

    computed: range
    ran: int
    peak: int
    inner: _State | None
    after: _State


class _Frontier(NamedTuple):
    """Pareto frontier of the ways to finish a part: peaks ascend, costs fall. Shapes ``[point]``."""

    peak: Ints
    cost: Ints

    def at(self, limit: int) -> int | None:
        """Least cost within a peak, or None."""
        place = int(np.searchsorted(self.peak, limit, side="right")) - 1
        return None if place < 0 else int(self.cost[place])


class _Table:
    """The frontier of every state, from the last layer down and the last step back."""

    def __init__(self, chain: TrainingChain, budget: int, max_points: int) -> None:
        self.chain = chain
        self.budget = budget
        self.max_points = max_points
        self.thinned = False
        self.frontiers: dict[_State, _Frontier] = {}
        self.done = _frontier([_NOTHING], [0])
        self.ends = [chain.end(i) for i in range(len(chain.layers))]
        self.paid = np.cumsum(chain.costs).tolist()

    def fill(self, session: Session) -> bool:
        """Compute the frontiers of all states that can be reached from the first; False if time is up."""
        # Top-down for the states that matter, bottom-up for their values: plain recursion would be as deep as the chain is long.
        states, todo = {_START}, [_START]
        while todo:
            for option in self._options(todo.pop()):
                for state in (option.after, option.inner):
                    if state is not None and state not in states and state.step < self.ends[state.layer]:
                        states.add(state)
                        todo.append(state)
        # An option leads to a state with a higher layer, a later step, or the top held: all larger as tuples, so they are
        # filled before it.
        for state in sorted(states, reverse=True):
            if session.left_s() <= 0:
                return False
            self.frontiers[state] = self._cheapest([self._value(option) for option in self._options(state)])
        return True

    def order(self, limit: int) -> list[int]:
        """Ops of the cheapest plan within a peak."""
        chain, out = self.chain, list[int]()
        todo = [(_START, limit)]
        while todo:
            state, limit = todo.pop()
            if state.step >= self.ends[state.layer]:
                continue
            cost = self.frontiers[state].at(limit)
            # The first option with the cost of the frontier. Storing the choice with each point would take more memory than the
            # frontiers themselves.
            option = next(option for option in self._options(state) if self._value(option).at(limit) == cost)
            out += [chain.layers[i] for i in option.computed]
            if option.ran > 0:
                out.append(chain.steps[option.ran])
            todo.append((option.after, limit))
            # The stack runs the inner part first. Within it the layer that is held outside takes its bytes of the limit.
            if option.inner is not None:
                todo.append((option.inner, limit - chain.sizes[option.inner.layer]))
        return out

    def _options(self, state: _State) -> Iterator[_Option]:
        """Ways on whose own bytes are within the budget."""
        return (option for option in self._all_options(state) if option.peak <= self.budget)

    def _all_options(self, state: _State) -> Iterator[_Option]:
        """Run the next step if its layers are there; else compute up to a layer below the top, or to the top, and hold that."""
        chain, (low, k, has_top) = self.chain, state
        top = chain.top[k]
        missing = {i for i in chain.reads[k] if i > low and not (has_top and i == top)}
        held = chain.sizes[top] if has_top else 0
        if not missing:
            # The layer below is counted outside; where it is dead already, that was too much.
            dead = chain.sizes[low] if has_top and chain.below[k] < low else 0
            yield _Option(range(0), k, chain.during[k] + held - dead, None, self._next(low, k + 1, has_top, top))
            return
        # ``reached`` is the peak of computing up to a layer while nothing but the layer below it is held.
        reached = 0
        for middle in range(low + 1, top):
            reached = max(reached, self._during(low, middle))
            after = self._next(low, self.ends[middle], True, middle)
            yield _Option(range(low + 1, middle + 1), -1, chain.before[k] + held + reached, _State(middle, k, has_top), after)
        if not has_top:
            reached = max(reached, self._during(low, top))
            yield _Option(range(low + 1, top + 1), -1, chain.before[k] + reached, None, _State(low, k, True))

    def _next(self, low: int, step: int, holds: bool, layer: int) -> _State:
        """State at a step, where a layer is held if it is the highest that is still to be read."""
        return _State(low, step, holds and self.chain.top[step] == layer)

    def _during(self, low: int, layer: int) -> int:
        """Bytes while a layer is computed on the way up from a held one."""
        chain = self.chain
        return (chain.sizes[layer - 1] if layer - 1 > low else 0) + chain.sizes[layer] + chain.workspaces[layer]

    def _value(self, option: _Option) -> _Frontier:
        """Frontier of an option: peaks of its parts by maximum, costs by sum."""
        cost = self.paid[option.computed.stop - 1] - self.paid[option.computed.start - 1] if option.computed else 0
        rest = self._frontier_of(option.after)
        if option.inner is None:
            return _Frontier(np.maximum(rest.peak, option.peak), rest.cost + cost)
        inner = self._frontier_of(option.inner)
        inner_peak = inner.peak + self.chain.sizes[option.inner.layer]
        if not len(inner_peak) or not len(rest.peak):
            return _frontier([], [])
        # Costs fall only at the peaks of one of the two, from where both have a point.
        lowest = max(int(inner_peak[0]), int(rest.peak[0]), option.peak)
        peaks = np.unique(np.concatenate([np.maximum(inner_peak, lowest), np.maximum(rest.peak, lowest)]))
        at_inner = np.searchsorted(inner_peak, peaks, side="right") - 1
        at_rest = np.searchsorted(rest.peak, peaks, side="right") - 1
        return _Frontier(peaks, inner.cost[at_inner] + rest.cost[at_rest] + cost)

    def _frontier_of(self, state: _State) -> _Frontier:
        return self.done if state.step >= self.ends[state.layer] else self.frontiers[state]

    def _cheapest(self, frontiers: list[_Frontier]) -> _Frontier:
        """Points that no other one is as low and as cheap as."""
        peak = np.concatenate([np.zeros(0, dtype=np.int64), *(f.peak for f in frontiers)])
        cost = np.concatenate([np.zeros(0, dtype=np.int64), *(f.cost for f in frontiers)])
        # By peak, then cost: a point stays if it is cheaper than all before it.
        order = np.lexsort((cost, peak))
        peak, cost = peak[order], cost[order]
        best_before = np.minimum.accumulate(np.concatenate([[np.iinfo(np.int64).max], cost]))[:-1]
        better = (cost < best_before) & (peak <= self.budget)
        peak, cost = peak[better], cost[better]
        if len(peak) > self.max_points:
            self.thinned = True
            # Evenly spaced, both ends among them: the least peak decides feasibility, the least cost what a large budget gives.
            places = np.linspace(0, len(peak) - 1, self.max_points).round().astype(np.int64)
            peak, cost = peak[places], cost[places]
        return _Frontier(peak, cost)


def _frontier(peak: list[int], cost: list[int]) -> _Frontier:
    return _Frontier(np.array(peak, dtype=np.int64), np.array(cost, dtype=np.int64))
