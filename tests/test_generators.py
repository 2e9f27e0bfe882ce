"""Graphs made by rule are what their names say, and the same every time."""

from __future__ import annotations

from pathlib import Path

import pytest

import checkmate
from benchmarks.generate import chain, gpt, gpt_of, layered

GRAPHS = Path(__file__).parent.parent / "benchmarks" / "graphs"


@pytest.mark.parametrize("layers", [4, 8, 16, 32])
def test_chains_are_the_papers(layers):
    """The committed graphs of the paper's networks have the same chains."""
    assert chain(layers) == checkmate.read(GRAPHS / f"linear{layers}_b1.graph.json")


def test_a_seed_is_a_graph():
    """Results that name a seed can be made again."""
    assert layered(60, seed=4) == layered(60, seed=4)
    assert layered(60, seed=4).digest != layered(60, seed=5).digest
    assert gpt(2) == gpt(2)


@pytest.mark.parametrize("nodes", [3, 10, 100, 250])
def test_layered_graphs_have_one_source_and_one_sink(nodes):
    """Every node lies on a way from the source to the sink, so no op is there for nothing."""
    for seed in range(5):
        graph = layered(nodes, seed=seed)
        assert len(graph.ops) == nodes
        assert [o for o, op in enumerate(graph.ops) if not op.inputs] == [0]
        assert [v for v, readers in enumerate(graph.readers) if not readers] == [nodes - 1]


@pytest.mark.parametrize("ops", [1000, 4000])
def test_gpt_has_about_the_ops_that_were_asked_for(ops):
    """A benchmark of a thousand ops has a thousand, within a layer."""
    graph = gpt_of(ops)
    assert abs(len(graph.ops) - ops) < 66
    assert sum(not op.recomputable for op in graph.ops) == 1
    assert any(value.base is not None for value in graph.values)
    assert len([value for value in graph.values if value.kept]) > 2
