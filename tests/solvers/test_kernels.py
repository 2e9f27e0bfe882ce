"""Kernels are compiled before the clock starts, and not while it runs."""

from __future__ import annotations

import time
from typing import Any

from numba.core.dispatcher import Dispatcher

from benchmarks.generate import chain
from checkmate import Auto, Limits, Problem, solve
from checkmate.core.problem import keep_all_bytes
from checkmate.solvers.evict import decode, reorder, repair, schedule
from checkmate.solvers.session import Session
from checkmate.solvers.states import exploration, kernel
from checkmate.solvers.targets import load_kernels


def signatures() -> dict[str, int]:
    """How many versions of each kernel are compiled."""
    modules: tuple[Any, ...] = (decode, repair, reorder, schedule, kernel)
    return {
        f"{module.__name__}.{name}": len(function.signatures)
        for module in modules
        for name, function in vars(module).items()
        if isinstance(function, Dispatcher)
    }


def test_preparing_is_not_counted():
    """A machine that compiles slowly searches as long as any other."""
    session = Session(Problem(chain(4), 100), Limits(time_s=10))
    session.prepare(lambda: time.sleep(0.5))
    assert session.elapsed_s() < 0.5


def test_nothing_is_compiled_while_the_clock_runs():
    """One version of each kernel is enough, and it is there from the start."""
    load_kernels()
    exploration.load_kernels()
    before = signatures()
    for layers, share in ((8, 0.6), (8, 0.9), (40, 0.5)):
        graph = chain(layers)
        solve(Problem(graph, int(share * keep_all_bytes(graph))), Auto(), limits=Limits(time_s=3, gap=0.0))
    assert signatures() == before
    assert max(before.values()) == 1
