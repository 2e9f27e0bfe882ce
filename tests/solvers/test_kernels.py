"""Kernels are compiled before the clock starts, and not while it runs."""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.generate import chain
from checkmate import Limits, Problem
from checkmate.solvers.session import Session

SOLVE = """
from numba.core.dispatcher import Dispatcher
from numba.types import NamedTuple, NamedUniTuple
from benchmarks.generate import chain
from checkmate import Auto, Limits, Problem, solve
from checkmate.core.budget import keep_all_bytes
from checkmate.solvers.evict import decode, price, reorder, repair, schedule
from checkmate.solvers.states import exploration, kernel
from checkmate.solvers.evict.starts import load_kernels

def versions():
    kernels = [k for module in (decode, price, repair, reorder, schedule, kernel) for k in vars(module).items()]
    return {name: len(k.signatures) for name, k in kernels if isinstance(k, Dispatcher)}

# What only other kernels call has a version for each kind of constant argument where nothing was cached.
called = (
    "seed_random", "decode", "measure", "repair", "ruin_and_repair", "anneal", "lowest_peak", "begin", "expand"
)
load_kernels()
exploration.load_kernels()
before = versions()
for layers, share in ((8, 0.6), (8, 0.9), (40, 0.5)):
    graph = chain(layers)
    solve(Problem(graph, int(share * keep_all_bytes(graph))), Auto(), limits=Limits(time_s=3, gap=0.0))
assert versions() == before, (before, versions())
# Ctrl-C during a kernel that returns a named tuple to Python ends the process by a segmentation fault.
for module in (decode, price, repair, reorder, schedule, kernel):
    for name in set(called) & set(vars(module)):
        returned = [s.return_type for s in vars(module)[name].nopython_signatures]
        assert not any(isinstance(r, (NamedTuple, NamedUniTuple)) for r in returned), (name, returned)
assert max(before[name] for name in called) == 1, before
"""


def test_preparing_is_not_counted():
    """A machine that compiles slowly searches as long as any other."""
    session = Session(Problem(chain(4), 100), Limits(time_s=10))
    session.prepare(lambda: time.sleep(0.5))
    assert session.elapsed_s() < 0.5


def test_preparing_within_a_part_is_not_counted_in_the_whole():
    """A solve with a host solves without one first: what that loads took the time for copies in a fresh process."""
    session = Session(Problem(chain(4), 100), Limits(time_s=10))
    inner = Session(session.problem, Limits(time_s=5), outer=session)
    loaded = []
    inner.prepare(lambda: (time.sleep(0.5), loaded.append(True)))
    assert loaded == [True]
    assert inner.elapsed_s() < 0.5
    assert session.elapsed_s() < 0.5


def test_nothing_is_compiled_while_the_clock_runs():
    """One version of each kernel is enough, and it is there from the start; in a process where nobody else called one."""
    done = subprocess.run([sys.executable, "-c", SOLVE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
