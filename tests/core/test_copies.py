"""Copies to the host: three accounts of bytes and time agree, and bytes do not depend on time."""

from __future__ import annotations

import random

import numpy as np
import pytest

import checkmate
from checkmate import Compute, Discard, Fetch, Free, Graph, HostMemory, Offload, Plan, PlanError, simulate, validate
from tests.oracle import naive_bytes, naive_end, naive_host_bytes
from tests.strategies import random_copies, random_graph, random_host

BUS = HostMemory(100, 10**9, 5 * 10**8)  # a byte takes 1 ns out and 2 ns back


def chain() -> Graph:
    """Three forward and two backward ops; the last reads the first's output."""
    return Graph.from_dag(
        cost=[3, 3, 3, 3, 3], size_bytes=[6, 2, 2, 2, 2], edges=[(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)], kept=[4], name="chain"
    )


def offloaded(*, fetch_after: int = 2, free_after: int = 1) -> Plan:
    """The chain with its first value on the host between two of its ops."""
    steps: list[object] = []
    for o in range(5):
        if o == 4 and fetch_after == 4:
            steps.append(Fetch(0))
        steps.append(Compute(o))
        if o == 0:
            steps.append(Offload(0))
        if o == free_after:
            steps.append(Free(0))
        if o == fetch_after:
            steps.append(Fetch(0))
        if 0 < o < 4 and o - 1 > 0:
            steps.append(Free(o - 1))
    return Plan((*steps, Free(3), Discard(0), Free(0)), chain().digest, BUS)  # type: ignore[arg-type]


def accounts_agree(seed: int) -> Plan:
    """Compare the three accounts on one random instance."""
    rng = random.Random(seed)
    graph, host = random_graph(rng, max_ops=rng.choice([3, 6, 9])), random_host(rng)
    plan = random_copies(rng, graph, host)
    timeline = simulate(graph, plan)
    assert timeline.bytes.tolist() == naive_bytes(graph, plan)
    on_host = naive_host_bytes(graph, plan)
    assert timeline.host_bytes.tolist() == on_host
    assert timeline.cost == naive_end(graph, plan, host)
    peak, top = timeline.peak_bytes, max(on_host, default=0)
    roomy = HostMemory(top, host.out_bytes_per_s, host.in_bytes_per_s)
    assert validate(graph, plan, peak, host=roomy, cost=timeline.cost) == ()
    assert [v.rule for v in validate(graph, plan, peak, host=roomy, cost=timeline.cost + 1)] == ["cost"]
    if peak:
        assert [v.rule for v in validate(graph, plan, peak - 1, host=roomy)] == ["budget"]
    if top:
        tight = HostMemory(top - 1, host.out_bytes_per_s, host.in_bytes_per_s)
        assert [v.rule for v in validate(graph, plan, peak, host=tight)] == ["host"]
    elsewhere = simulate(graph, plan, random_host(rng))
    assert np.array_equal(elsewhere.bytes, timeline.bytes)
    assert np.array_equal(elsewhere.host_bytes, timeline.host_bytes)
    assert validate(graph, plan, peak, host=random_host(rng)) == () or top > 0
    return plan


def test_three_accounts_agree_on_random_copies():
    """Bytes on both sides and the end of the step; the bytes are the same on any bus."""
    plans = [accounts_agree(seed) for seed in range(400)]
    kinds = {type(step) for plan in plans for step in plan.steps}
    assert kinds == {Compute, Free, Offload, Fetch, Discard}
    assert sum(plan.host is not None for plan in plans) > 250


@pytest.mark.slow
def test_three_accounts_agree_on_ten_thousand_random_copies():
    """The same for many more seeds."""
    copied = sum(accounts_agree(seed).host is not None for seed in range(1000, 14_000))
    assert copied >= 10_000


