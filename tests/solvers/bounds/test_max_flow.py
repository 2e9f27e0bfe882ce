"""Maximum flow: that of scipy, with a cut that proves it, and a feasible flow whenever it is ended."""

from __future__ import annotations

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import maximum_flow

from checkmate.solvers.bounds.max_flow import Network
from checkmate.solvers.clocks import no_alarm


def random_network(seed: int) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """Nodes and arcs, some of them parallel, some back to the source."""
    rng = np.random.default_rng(seed)
    nodes = int(rng.integers(2, 14))
    count = int(rng.integers(0, 5 * nodes))
    tails, heads = rng.integers(0, nodes, count), rng.integers(0, nodes, count)
    return nodes, tails, heads, rng.integers(0, 20, count)


def test_the_flow_is_the_largest_and_its_cut_proves_it():
    """The capacity of the arcs that leave the source's side is the flow: no other flow is larger."""
    positive = 0
    for seed in range(150):
        nodes, tails, heads, capacity = random_network(seed)
        flow, near = Network(nodes, [(tails, heads)]).flow(capacity, no_alarm())
        matrix = sparse.coo_matrix((capacity, (tails, heads)), shape=(nodes, nodes)).tocsr().astype(np.int32)
        matrix.setdiag(0)
        assert flow == maximum_flow(matrix, 0, 1).flow_value, seed
        assert near[0]
        assert not near[1]
        assert capacity[near[tails] & ~near[heads]].sum() == flow, seed
        positive += flow > 0
    assert positive > 33


def test_a_large_capacity_is_counted_exactly():
    """Capacities have 52 bits."""
    network = Network(3, [(np.array([0]), np.array([2]))], [(np.array([2]), np.array([1]))])
    assert network.flow(np.array([2**52 + 1]), no_alarm())[0] == 2**52 + 1


def test_a_raised_flag_ends_it():
    """With a flow that may be too small, and never too large."""
    flag = no_alarm()
    flag[0] = 1
    for seed in range(50):
        nodes, tails, heads, capacity = random_network(seed)
        network = Network(nodes, [(tails, heads)])
        assert network.flow(capacity, flag)[0] <= network.flow(capacity, no_alarm())[0]
