"""Relaxations by rounds: the bound of all rows, from fewer of them, and one that holds after every round."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from checkmate import Problem
from checkmate.solvers.backends.highs import solve_linear
from checkmate.solvers.backends.program import dual_bound
from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.events.event_cuts import CutProgram, build_cuts
from checkmate.solvers.bounds.events.relaxation import LongSegments, relax
from checkmate.solvers.bounds.floor import floor
from tests.solvers.bounds.events.test_event_cuts import some_chain, tight_problem
from tests.solvers.chains import uneven_chain


def uneven_problem(rng: random.Random) -> Problem:
    """A training chain whose values have different sizes, at a budget near the smallest: many events bind."""
    graph = uneven_chain(rng, rng.randint(6, 14))
    return Problem(graph, floor(graph).peak_bytes + rng.randint(1, 6))


def programs(count: int) -> Iterator[tuple[int, CutProgram]]:
    """Programs of chains of events that have a solution, with rows of longer segments."""
    for seed in range(count):
        cut = program(seed)
        if cut is not None:
            yield seed, cut


@cache
def program(seed: int) -> CutProgram | None:
    """One of them by number; no test changes it."""
    rng = random.Random(seed)
    model = CutModel(uneven_problem(rng) if seed % 2 else tight_problem(rng, most_ops=(12, 18, 30)))
    cut = build_cuts(model, some_chain(rng, model), floating=rng.random() < 0.5, all_segments=rng.random() < 0.5)
    return cut if not cut.impossible and cut.implied.any() and solve_linear(cut.program).finished else None


def test_rounds_end_at_the_bound_of_all_rows():
    """Their row prices prove it on the whole program, as those of a program that is solved at once do."""
    in_rounds = 0
    for seed, cut in programs(40):
        whole = solve_linear(cut.program).bound
        for at_once in (0, 10_000):
            found = relax(cut, time_s=math.inf, at_once=at_once)
            assert found.finished
            assert found.solution is None
            assert found.bound == pytest.approx(whole, abs=1e-6), seed
            if not math.isinf(whole):
                assert found.row_prices is not None
                assert dual_bound(cut.program, found.row_prices) == pytest.approx(whole, abs=1e-6), seed
        in_rounds += solve_linear(cut.program.with_rows(~cut.implied)).bound < whole - 1e-6
    assert in_rounds > 1


def test_it_ends_at_what_is_enough_and_with_its_time():
    """A bound of some rounds is one of the whole program; without time there is none."""
    earlier = 0
    for _, cut in programs(40):
        whole = solve_linear(cut.program).bound
        first = solve_linear(cut.program.with_rows(~cut.implied)).bound
        found = relax(cut, time_s=math.inf, enough=first, at_once=0)
        assert found.finished
        assert first - 1e-9 <= found.bound <= whole + 1e-6
        earlier += found.bound < whole - 1e-6
        none = relax(cut, time_s=0.0, at_once=0)
        assert (none.bound, none.finished, none.row_prices) == (-math.inf, False, None)
    assert earlier > 1


def test_rows_of_longer_segments_are_clauses():
    """So no row asks for a column beyond its upper limit of 1."""
    for _, cut in programs(48):
        rows = cut.program.matrix[cut.implied]
        assert set(rows.data.tolist()) <= {1.0, -1.0}
        negative = np.asarray((rows < 0).sum(axis=1)).ravel()
        assert np.array_equal(cut.program.row_low[cut.implied], 1.0 - negative)
        assert np.isinf(cut.program.row_high[cut.implied]).all()
        assert (cut.program.high[np.unique(rows.indices)] == 1.0).all()


def completions(cut: CutProgram, solution: np.ndarray) -> bool:
    """Whether the columns that only implied rows have can be chosen so that all rows hold, by another solver."""
    matrix = cut.program.matrix
    free = np.ones(len(solution), dtype=bool)
    free[matrix[~cut.implied].indices] = False
    low, high = (np.where(free, limit, solution) for limit in (cut.program.low, cut.program.high))
    slack = 1e-6
    rows = LinearConstraint(matrix, cut.program.row_low - slack, cut.program.row_high + slack)
    return milp(np.zeros(len(solution)), bounds=Bounds(low, high), constraints=rows).success


def test_a_solution_without_a_contradiction_can_be_completed():
    """And one with a contradiction breaks one of its rows itself, so that no round is in vain."""
    completed = contradicted = 0
    for seed, cut in programs(48):
        segments = LongSegments(cut)
        rows = ~cut.implied
        for _ in range(8):
            solution = solve_linear(cut.program.with_rows(rows)).solution
            if solution is None:
                assert math.isinf(solve_linear(cut.program).bound)
                break
            given = solution.copy()
            found = segments.contradiction(solution)
            assert np.array_equal(solution, given)
            assert cut.implied[found].all()
            if not len(found):
                assert completions(cut, solution), seed
                completed += 1
                break
            short = cut.program.row_low[found] - cut.program.matrix[found] @ solution
            assert short.max() > 1e-9
            assert not rows[found[short > 1e-6]].any()
            rows[found] = True
            contradicted += 1
    assert completed > 16
    assert contradicted > 16


@pytest.mark.slow
def test_a_solution_outside_of_its_limits_by_a_tolerance_is_taken_as_the_nearest_inside():
    """Columns of -1e-7 made others raise each other for ever: a program of seven events of ResNet-50 did not end."""
    compared = 0
    for seed, cut in programs(48):
        solution = solve_linear(cut.program.with_rows(~cut.implied)).solution
        if solution is None:
            continue
        outside = np.where(solution <= cut.program.low, cut.program.low - 0.01, solution)
        segments = LongSegments(cut)
        assert np.array_equal(segments.contradiction(outside), segments.contradiction(solution)), seed
        compared += bool((outside < solution).any())
    assert compared > 16


def test_a_contradiction_is_found_whole():
    """A row of ops between two events is one round, not a round for each op."""
    longest = 0
    for _, cut in programs(40):
        segments = LongSegments(cut)
        solution = solve_linear(cut.program.with_rows(~cut.implied)).solution
        if solution is None:
            continue
        found = segments.contradiction(solution)
        broken = (cut.program.row_low - cut.program.matrix @ solution)[found] > 1e-6
        longest = max(longest, int((~broken).sum()))
    assert longest > 1
