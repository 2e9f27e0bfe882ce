"""The papers' networks, written as layers, are the committed graphs to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest

import checkmate
from benchmarks.networks import NETWORKS, training_step

GRAPHS = Path(__file__).parent.parent / "benchmarks" / "graphs"
FILES = sorted(path for path in GRAPHS.glob("*_b*.graph.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_code_gives_the_file(path):
    """Names, costs, sizes, edges and parameters: nothing of a committed graph comes from anywhere else."""
    name, _, batch = path.name.removesuffix(".graph.json").rpartition("_b")
    assert training_step(name, int(batch)) == checkmate.read(path)


def test_every_network_has_a_file():
    """None is written down and compared with nothing."""
    names = {path.name.rpartition("_b")[0] for path in FILES}
    assert set(NETWORKS) <= names


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("VGG11", 132_863_336),
        ("VGG13", 133_047_848),
        ("ResNet101", 44_707_176),
        ("ResNet152", 60_419_944),
        ("DenseNet169", 14_307_880),
        ("DenseNet201", 20_242_984),
    ],
)
def test_other_depths_have_the_published_numbers_of_parameters(name: str, parameters: int):
    """Those of Keras, and of torchvision for VGG."""
    assert training_step(name).resident_bytes == 8 * parameters
