"""Kernels are compiled when they are first needed, and no time limit counts it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from benchmarks.generate import chain
from checkmate import Limits, Problem
from checkmate.solvers.clocks import preparing
from checkmate.solvers.session import Session

SOLVE = """
import sys, time
from numba.core.dispatcher import Dispatcher
from numba.types import NamedTuple, NamedUniTuple
from benchmarks.generate import chain
from checkmate import Auto, Limits, Problem, solve

began = time.perf_counter()
result = solve(Problem(chain(40), 20), Auto(), limits=Limits(time_s=2, gap=0.0))
took = time.perf_counter() - began
assert took > result.elapsed_s + 1, (took, result.elapsed_s)
modules = [module for name, module in sys.modules.items() if name.startswith("checkmate.solvers.")]
kernels = {name: k for module in modules for name, k in vars(module).items() if isinstance(k, Dispatcher)}
assert len(kernels["repair"].signatures) == 1  # one version is enough
# Ctrl-C during a kernel that returns a named tuple to Python ends the process by a segmentation fault.
for name, k in kernels.items():
    returned = [s.return_type for s in k.nopython_signatures]
    assert not any(isinstance(r, (NamedTuple, NamedUniTuple)) for r in returned), (name, returned)
"""


def test_preparing_is_not_counted():
    """A machine that compiles slowly searches as long as any other; also in a solve within a solve."""
    session = Session(Problem(chain(4), 100), Limits(time_s=10))
    inner = Session(session.problem, Limits(time_s=5))
    with preparing(), preparing():
        time.sleep(0.2)
    assert inner.elapsed_s() < 0.2
    assert session.elapsed_s() < 0.2


@pytest.mark.slow
def test_compiling_is_not_counted(tmp_path):
    """In a process that finds no compiled kernels, which takes seconds for each of them."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SOLVE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
