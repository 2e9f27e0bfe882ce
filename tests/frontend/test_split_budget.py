"""One budget divided among graphs that are in flight together."""

from __future__ import annotations

import itertools
import random

from checkmate import Graph, Op, Plan, Value
from checkmate.frontend.split_budget import PlanFootprint, divide, step_peak_bytes
from checkmate.frontend.step_memory import StepMemory


def test_a_division_is_the_best_of_all() -> None:
    """The mixed-integer program finds what trying every combination finds."""
    rng = random.Random(0)
    plan = Plan.from_order(Graph((Op("a", (), (0,), cost=1),), (Value("x", 1, kept=True),)), [0])

    def choice(held: int) -> PlanFootprint:
        peaks = [held + rng.randrange(50) for _ in range(2)]
        cost = 300 - held + rng.randrange(40)
        memory = StepMemory(
            forward_peak_bytes=peaks[0], saved_bytes=held, backward_peak_bytes=peaks[1], gradient_bytes=rng.randrange(20)
        )
        return PlanFootprint(plan=plan, cost=cost, memory=memory)

    for _ in range(30):
        offers = [[choice(rng.randrange(20, 200)) for _ in range(4)] for _ in range(3)]
        sequence = [rng.randrange(3) for _ in range(5)]
        sequence[:3] = [0, 1, 2]
        room = rng.randrange(200, 900)
        costs = {
            picked: sum(offers[g][picked[g]].cost for g in sequence)
            for picked in itertools.product(range(4), repeat=3)
            if step_peak_bytes(sequence, [offers[g][c] for g, c in enumerate(picked)]) <= room
        }
        found = divide(sequence, offers, room)
        assert (found is None) == (not costs)
        if found is not None:
            assert costs[tuple(found)] == min(costs.values())
