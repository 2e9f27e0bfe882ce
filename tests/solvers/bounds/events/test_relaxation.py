"""Relaxations by rounds: the bound of all rows, from fewer of them, and one that holds after every round."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from checkmate import Problem
from checkmate.solvers.backends import highs
from checkmate.solvers.backends.highs import solve_linear
from checkmate.solvers.backends.program import Program, Solved, dual_bound
from checkmate.solvers.bounds.events import relaxation
from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.events.event_cuts import CutProgram, build_cuts
from checkmate.solvers.bounds.events.relaxation import LongSegments, RelaxationParameters, relax
from checkmate.solvers.bounds.floor import floor
from tests.solvers.bounds.events.test_event_cuts import some_chain, tight_problem
from tests.solvers.chains import uneven_chain


@pytest.fixture
def in_rounds(monkeypatch):
    """Also small programs are solved in rounds."""
    monkeypatch.setattr(relaxation, "PARAMETERS", RelaxationParameters(least_rows=0))


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
    cut = build_cuts(model, some_chain(rng, model), floating=rng.random() < 0.5, segments=rng.choice(["all", "end"]))
    return cut if not cut.impossible and cut.implied.any() and solve_linear(cut.program).finished else None


def rounds_of(monkeypatch, cut: CutProgram, **named: float) -> tuple[Solved, list[tuple[Program, Solved]]]:
    """A relaxation, and the programs that were solved for it."""
    rounds: list[tuple[Program, Solved]] = []

    def solve(program: Program, *, time_s: float = math.inf) -> Solved:
        rounds.append((program, solve_linear(program, time_s=time_s)))
        return rounds[-1][1]

    with monkeypatch.context() as patch:
        patch.setattr(highs, "solve_linear", solve)
        return relax(cut, **{"time_s": math.inf, **named}), rounds


@pytest.mark.usefixtures("in_rounds")
def test_rounds_end_at_the_bound_of_all_rows_with_fewer_of_them(monkeypatch):
    """Their row prices prove it on the whole program, and each round proves no less than the one before."""
    several = fewer = sharper = 0
    for seed, cut in programs(160):
        whole = solve_linear(cut.program).bound
        found, rounds = rounds_of(monkeypatch, cut)
        assert found.finished
        assert found.solution is None
        assert found.bound == pytest.approx(whole, abs=1e-6), seed
        if not math.isinf(whole):
            assert found.row_prices is not None
            assert dual_bound(cut.program, found.row_prices) == pytest.approx(whole, abs=1e-6), seed
        bounds = [solved.bound for _, solved in rounds]
        assert all(b >= a - 1e-9 for a, b in pairwise(bounds))
        sizes = [len(program.row_low) for program, _ in rounds]
        assert sizes[0] == (~cut.implied).sum()
        assert sizes == sorted(set(sizes))
        several += len(rounds) > 2
        fewer += sizes[-1] < len(cut.program.row_low)
        sharper += bounds[-1] > bounds[0] + 1e-6
    assert several > 10
    assert fewer > 50
    assert sharper > 5


def test_rows_of_longer_segments_are_clauses():
    """So no row asks for a column beyond its upper limit of 1."""
    for _, cut in programs(120):
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
    for seed, cut in programs(120):
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
    assert completed > 50
    assert contradicted > 50


def test_a_solution_outside_of_its_limits_by_a_tolerance_is_taken_as_the_nearest_inside():
    """Columns of -1e-7 made others raise each other for ever: a program of seven events of ResNet-50 did not end."""
    compared = 0
    for seed, cut in programs(120):
        solution = solve_linear(cut.program.with_rows(~cut.implied)).solution
        if solution is None:
            continue
        outside = np.where(solution <= cut.program.low, cut.program.low - 0.01, solution)
        segments = LongSegments(cut)
        assert np.array_equal(segments.contradiction(outside), segments.contradiction(solution)), seed
        compared += bool((outside < solution).any())
    assert compared > 50


@pytest.mark.usefixtures("in_rounds")
def test_a_contradiction_is_found_whole():
    """A row of ops between two events is one round, not a round for each op."""
    longest = 0
    for _, cut in programs(100):
        segments = LongSegments(cut)
        solution = solve_linear(cut.program.with_rows(~cut.implied)).solution
        if solution is None:
            continue
        found = segments.contradiction(solution)
        broken = (cut.program.row_low - cut.program.matrix @ solution)[found] > 1e-6
        longest = max(longest, int((~broken).sum()))
    assert longest > 3


def test_small_programs_are_solved_at_once(monkeypatch):
    _, cut = next(programs(50))
    monkeypatch.setattr(relaxation, "PARAMETERS", RelaxationParameters(least_rows=int(cut.implied.sum())))
    found, rounds = rounds_of(monkeypatch, cut)
    assert [program for program, _ in rounds] == [cut.program]
    assert (found.bound, found.finished) == (rounds[0][1].bound, True)
    assert found.row_prices is rounds[0][1].row_prices
    assert (found.solution, found.objective) == (None, math.inf)
    monkeypatch.setattr(relaxation, "PARAMETERS", RelaxationParameters(least_rows=int(cut.implied.sum()) - 1))
    assert rounds_of(monkeypatch, cut)[1][0][0] is not cut.program


@pytest.fixture(name="cut", scope="module")
def in_several_rounds() -> CutProgram:
    """A program whose relaxation takes four rounds at least, each with a gain."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relaxation, "PARAMETERS", RelaxationParameters(least_rows=0))
        for _, cut in programs(400):
            bounds = [solved.bound for _, solved in rounds_of(patch, cut)[1]]
            if len(bounds) > 3 and bounds[1] > bounds[0] + 1e-6:
                return cut
    pytest.fail("no such program")


@pytest.mark.usefixtures("in_rounds")
def test_out_of_time_it_returns_what_the_rounds_before_have_proven(monkeypatch, cut):
    """With their prices: a program for integers is made from them all the same."""
    _, rounds = rounds_of(monkeypatch, cut)
    for last in range(1, len(rounds)):
        answers = iter([*(solved for _, solved in rounds[:last]), Solved(-5.0, None, math.inf, False)])
        with monkeypatch.context() as patch:
            patch.setattr(highs, "solve_linear", lambda program, answers=answers, **_: next(answers))
            found = relax(cut, time_s=math.inf)
        assert not found.finished
        assert found.bound == max(solved.bound for _, solved in rounds[:last])
        assert found.row_prices is not None
        assert dual_bound(cut.program, found.row_prices) == pytest.approx(found.bound, abs=1e-9)
    none = relax(cut, time_s=0.0)
    assert (none.bound, none.finished, none.row_prices) == (-math.inf, False, None)


@pytest.mark.usefixtures("in_rounds")
def test_a_bound_of_the_round_that_was_cut_short_counts(monkeypatch, cut):
    first = rounds_of(monkeypatch, cut)[1][0][1]
    answers = iter([first, Solved(first.bound + 1.0, None, math.inf, False)])
    monkeypatch.setattr(highs, "solve_linear", lambda program, **_: next(answers))
    assert relax(cut, time_s=math.inf).bound == first.bound + 1.0


@pytest.mark.usefixtures("in_rounds")
def test_rounds_have_the_time_that_is_left(monkeypatch, cut):
    now = iter(range(100))
    limits: list[float] = []

    def solve(program: Program, *, time_s: float) -> Solved:
        limits.append(time_s)
        return solve_linear(program)

    monkeypatch.setattr(highs, "solve_linear", solve)
    monkeypatch.setattr(relaxation, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
    relax(cut, time_s=9.0)
    assert limits == [8.0 - k for k in range(len(limits))]
    assert len(limits) > 3


@pytest.mark.parametrize(
    ("gain", "patience", "bounds", "expected"),
    [
        (0.0, 1, (0.1, 0.2), 3),
        (0.0, 2, (0.1, 0.2), 4),
        (0.9, 1, (0.1, 0.2), 2),
        (0.9, 2, (0.1, 0.2), 3),
        (0.0, 2, (0.1, 0.1, 0.2), 5),  # a round with a gain between two without
    ],
)
def test_it_stops_after_rounds_of_little_gain(monkeypatch, cut, gain, patience, bounds, expected):
    """Of the distance to what is enough. The first round has gained."""
    monkeypatch.setattr(
        relaxation, "PARAMETERS", RelaxationParameters(least_rows=0, least_gain=max(gain, 1e-12), patience=patience)
    )
    proven = iter([*bounds, *[0.2] * 50])
    rows = np.flatnonzero(cut.implied)
    calls: list[int] = []

    def solve(program: Program, **_: float) -> Solved:
        calls.append(len(program.row_low))
        return Solved(next(proven), np.zeros(len(program.cost)), 0.0, True, row_prices=np.zeros(len(program.row_low)))

    monkeypatch.setattr(highs, "solve_linear", solve)
    monkeypatch.setattr(LongSegments, "contradiction", lambda self, solution: rows[: len(calls)])
    found = relax(cut, time_s=math.inf, enough=1.0)
    assert found.finished
    assert found.bound == 0.2
    assert len(calls) == expected


@pytest.mark.usefixtures("in_rounds")
def test_it_stops_at_what_is_enough(monkeypatch, cut):
    _, rounds = rounds_of(monkeypatch, cut)
    found, fewer = rounds_of(monkeypatch, cut, enough=rounds[1][1].bound)
    assert found.finished
    assert len(fewer) == 2
    assert found.bound == rounds[1][1].bound
