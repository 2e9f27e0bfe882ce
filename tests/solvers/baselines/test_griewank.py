"""Binomial checkpointing."""

from __future__ import annotations

from functools import cache
from math import comb

import pytest

from checkmate import Griewank, Problem, solve
from checkmate.solvers.baselines.griewank import first_state, held_states
from tests.solvers.chains import unit_chain


@cache
def optimum(steps: int, states: int) -> int:
    """Fewest forward steps by dynamic programming over every first state."""
    if steps < 2:
        return 0
    if not states:
        return steps * (steps - 1) // 2
    return min(m + optimum(steps - m, states - 1) + optimum(m, states) for m in range(1, steps))


def steps_taken(steps: int, states: int) -> int:
    """Forward steps of the schedule that `first_state` describes."""
    if steps < 2 or not states:
        return steps * (steps - 1) // 2
    m = first_state(steps, states)
    return m + steps_taken(steps - m, states - 1) + steps_taken(m, states)


def test_the_binomial_schedule_is_optimal():
    """The schedule and the dynamic program agree."""
    for steps in range(1, 40):
        for states in range(steps):
            assert steps_taken(steps, states) == optimum(steps, states)


def test_the_longest_chains_are_binomial_numbers():
    """C(c + r, c) steps are the most that c slots reverse with no step computed more than r times."""
    for slots in (1, 2, 3, 4):
        for repetitions in (1, 2, 3):
            longest = comb(slots + repetitions, slots)
            fewest = steps_taken(longest, slots - 1)
            assert fewest == repetitions * longest - comb(slots + repetitions, repetitions - 1)
            assert steps_taken(longest + 1, slots - 1) - fewest == repetitions + 1


def test_no_more_states_are_held_than_allowed():
    """At the reversal of every step."""
    for steps in range(2, 30):
        for states in range(steps):
            held = held_states(steps, states)
            for now in range(1, steps + 1):
                assert sum(i < now <= since for i, since in held.items()) <= states


@pytest.mark.parametrize(("layers", "budget", "cost"), [(16, 6, 47), (32, 10, 89)])
def test_unit_chains_cost_what_the_best_known_plans_do(layers, budget, cost):
    """Where memory for a few states is left, revolve reaches the best plans known."""
    assert solve(Problem(unit_chain(layers), budget), Griewank("linearized")).cost == cost


def test_logarithmic_memory_is_enough():
    """A chain of 64 layers in 9 units, where segments need 19."""
    assert solve(Problem(unit_chain(64), 9), Griewank()).overhead < 2.5
