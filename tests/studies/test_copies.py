"""What explains and draws plans counts the bytes of plans with copies as `simulate` does."""

from __future__ import annotations

import random

import numpy as np

from checkmate import explain, simulate
from checkmate.report.data import _code
from checkmate.studies.lifetimes import by_category
from checkmate.studies.reserved import requests
from tests.strategies import random_copies, random_graph, random_host


def plans(count: int):
    for seed in range(count):
        rng = random.Random(seed)
        graph, host = random_graph(rng, max_ops=7), random_host(rng)
        yield graph, random_copies(rng, graph, host)


def test_categories_sum_to_the_bytes():
    """A fetched storage lives from its fetch on; an offloaded one until it is freed."""
    for graph, plan in plans(80):
        assert np.array_equal(by_category(graph, plan).sum(axis=0), simulate(graph, plan).bytes)


def test_requests_come_to_the_peak():
    """Replayed one after another, they hold as much as the plan does at its peak."""
    for graph, plan in plans(80):
        held = most = graph.resident_bytes
        sizes: dict[int, int] = {}
        for request in requests(graph, plan):
            if request.size_bytes:
                sizes[request.block] = request.size_bytes
                held += request.size_bytes
                most = max(most, held)
            else:
                held -= sizes.pop(request.block)
        assert most == simulate(graph, plan).peak_bytes


def test_explanations_list_the_bytes_of_the_peak():
    """Every storage at the peak has a reason, fetched ones too."""
    for graph, plan in plans(80):
        explanation = explain(graph, plan)
        assert sum(held.size_bytes for held in explanation.held) == explanation.peak_bytes


def test_codes_of_a_report_tell_steps_apart():
    """The page draws computations, frees and fetches; other copies change nothing that it draws."""
    for graph, plan in plans(40):
        for step in plan.steps:
            code, count = _code(graph, step), len(graph.values)
            kind = type(step).__name__
            assert (code >= 0) == (kind == "Compute")
            assert (-count <= code < 0) == (kind == "Free")
            assert (code < -1 - count) == (kind == "Fetch")
