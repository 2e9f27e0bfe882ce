"""`checkmate capture` writes a graph that can be planned where there is no framework."""

from __future__ import annotations

import pytest

import checkmate

MODEL = """
import torch
from torch import nn


def build(batch=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
    return model, nn.MSELoss(), (torch.ones(batch, 8), torch.zeros(batch, 2))


def misfit():
    return nn.Linear(8, 2), nn.MSELoss(), (torch.ones(4, 9), torch.zeros(4, 2))


def no_model():
    return 3, nn.MSELoss(), (torch.ones(4, 8), torch.zeros(4, 2))


def large_loss():
    torch.manual_seed(0)
    return nn.Linear(16, 1024), nn.CrossEntropyLoss(), (torch.ones(256, 16), torch.zeros(256, dtype=torch.long))


def frozen():
    return nn.Linear(8, 2).requires_grad_(False), nn.MSELoss(), (torch.ones(4, 8), torch.zeros(4, 2))
"""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "tiny_model.py").write_text(MODEL)


@pytest.mark.parametrize("target", ["tiny_model.py:build", "tiny_model:build"])
def test_captured_graph_is_planned_and_verified(run, model, target):
    """The three verbs in a row, as the README has them."""
    captured = run("capture", target, "--out", "tiny.graph.json", "--json")
    assert captured.code == 0, captured
    graph = checkmate.read("tiny.graph.json")
    assert captured.json["graph_digest"] == graph.digest
    assert captured.json["resident_bytes"] == graph.resident_bytes >= 4 * (8 * 16 + 16 + 16 * 2 + 2)
    assert {op.phase for op in graph.ops} >= {"forward", "backward"}
    assert run("plan", "tiny.graph.json", "--budget", "100%", "--out", "tiny.plan.json").code == 0
    assert run("verify", "tiny.graph.json", "tiny.plan.json", "--budget", "100%").code == 0


def test_a_graph_in_pieces_needs_less(run, model):
    """`min-budget` and `report` take it as any other."""
    assert run("capture", "tiny_model.py:large_loss", "--out", "whole.graph.json").code == 0
    assert run("capture", "tiny_model.py:large_loss", "--chunking", "auto", "--out", "pieces.graph.json").code == 0
    smallest = [run("min-budget", f"{name}.graph.json", "--json").json["smallest_bytes"] for name in ("whole", "pieces")]
    assert smallest[1] < 0.7 * smallest[0]
    assert run("plan", "pieces.graph.json", "--budget", str(smallest[1]), "--out", "pieces.plan.json").code == 0
    reported = run("report", "pieces.graph.json", "pieces.plan.json", "--out", "pieces.html")
    assert reported.code == 0


def test_capture_says_what_it_wrote_and_what_is_next(run, model):
    """The file is named after the model's."""
    outcome = run("capture", "tiny_model.py:build")
    assert outcome.code == 0
    assert outcome.out.startswith("graph     tiny_model.graph.json  ")
    assert "wrote   tiny_model.graph.json" in outcome.err
    assert "checkmate plan tiny_model.graph.json --budget 50%" in outcome.err


@pytest.mark.parametrize(
    ("function", "named"),
    [("misfit", "model and loss raise"), ("no_model", "returned int for the model"), ("frozen", "requires a gradient")],
)
def test_models_that_cannot_be_captured_are_bad_input(run, model, function, named):
    """It is the model that is wrong, so it gets words and no traceback."""
    outcome = run("capture", f"tiny_model.py:{function}")
    assert outcome.code == 2, outcome
    assert named in outcome.err
    assert "Traceback" not in outcome.err


JAX_STEP = """
import jax
import jax.numpy as jnp


def build(batch=4):
    def loss(w, x):
        return jnp.tanh(x @ w).sum()

    return jax.value_and_grad(loss), (jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((batch, 8), jnp.float32))


def misfit():
    return jnp.dot, (jnp.ones((2, 3)), jnp.ones((2, 3)))
"""


def test_a_step_of_jax_is_recognised(run, tmp_path):
    """By what the function returns: (step, arguments)."""
    pytest.importorskip("jax")
    (tmp_path / "jax_step.py").write_text(JAX_STEP)
    captured = run("capture", "jax_step.py:build", "--batch", "16", "--json")
    assert captured.code == 0, captured
    graph = checkmate.read("jax_step-batch16.graph.json")
    assert {op.phase for op in graph.ops} == {"forward", "backward"}
    assert any("jax_step.py" in op.source for op in graph.ops)
    assert run("plan", "jax_step-batch16.graph.json", "--budget", "100%").code == 0
    refused = run("capture", "jax_step.py:misfit")
    assert refused.code == 2, refused
    assert "Traceback" not in refused.err
