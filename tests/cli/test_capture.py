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


def with_optimizer():
    model, loss, example = build(32)
    return model, loss, torch.optim.AdamW(model.parameters()), example


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


@pytest.mark.slow
def test_a_graph_in_pieces_needs_less(run, model):
    """`min-budget` and `report` take it as any other."""
    assert run("capture", "tiny_model.py:large_loss", "--out", "whole.graph.json").code == 0
    assert run("capture", "tiny_model.py:large_loss", "--chunking", "auto", "--out", "pieces.graph.json").code == 0
    smallest = [
        run("min-budget", f"{name}.graph.json", "--time-limit", "2", "--json").json["smallest_bytes"]
        for name in ("whole", "pieces")
    ]
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


RUNS = {
    "an optimizer by name": (("build", "--optimizer", "adamw"), "whole"),
    "the optimizer of build()": (("with_optimizer",), "whole"),
    "no optimizer": (("build",), "split"),
    "the backend": (("build", "--optimizer", "adamw", "--plain-loop"), "backend"),
}


def trained(model, kind, loss, example, plan):
    """One step of a kind with a plan; the loss."""
    import torch

    import checkmate.torch

    optimizer = torch.optim.AdamW(model.parameters())
    if kind == "whole":
        return checkmate.torch.compile(model, loss, optimizer, example=example, plan=plan)(*example)[1]
    if kind == "split":
        return checkmate.torch.compile(model, loss, example=example, plan=plan)(*example)[1]
    value = loss(torch.compile(model, backend="checkmate", options={"plan": plan})(example[0]), example[1])
    value.backward()
    return value.detach()


@pytest.mark.parametrize("case", RUNS)
def test_a_plan_of_a_captured_step_runs_where_it_was_captured_for(run, model, case):
    """`capture`, `plan` and the training call: the optimizer's state is in the graph, and a plan for another kind of step is
    refused with the command that captures the right one."""
    import torch

    torch._dynamo.reset()  # Dynamo takes a plan of the same name for the same plan
    (function, *options), kind = RUNS[case]
    assert run("capture", f"tiny_model.py:{function}", *options, "--out", "step.graph.json").code == 0
    assert run("plan", "step.graph.json", "--budget", "100%", "--out", "step.plan.json").code == 0
    graph = checkmate.read("step.graph.json")
    assert any(op.phase == "optimizer" for op in graph.ops) is (kind == "whole")
    weights = 4 * (8 * 16 + 16 + 16 * 2 + 2)
    assert (graph.resident_bytes >= 3 * weights) is (kind != "split")
    namespace: dict = {}
    exec(MODEL, namespace)
    network, loss, *_, example = namespace[function]()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        value = trained(network, kind, loss, example, "step.plan.json")
    network, *_ = namespace[function]()
    torch.manual_seed(1)
    assert torch.equal(value, loss(network(example[0]), example[1]).detach())
    other = {"whole": "split", "split": "backend", "backend": "whole"}[kind]
    command = {"whole": "build --optimizer adamw`", "split": "build`", "backend": "build --plain-loop`"}[other]
    with pytest.raises(checkmate.WrongGraphError) as caught:
        trained(namespace[function]()[0], other, loss, example, "step.plan.json")
    assert command in caught.value.hint


def test_a_step_of_a_device_that_is_not_here_is_captured(run, model):
    """As `fits` has it: sizes are those of the device's allocator, and nothing is measured."""
    assert run("capture", "tiny_model.py:build", "--device", "H100", "--optimizer", "adamw", "--out", "h100.graph.json").code == 0
    graph = checkmate.read("h100.graph.json")
    assert all(value.size_bytes % 512 == 0 for value in graph.values if value.base is None)


def test_prints_of_the_file_do_not_reach_the_data(run, tmp_path):
    """Files that train when they are imported print; stdout is for the JSON object."""
    (tmp_path / "talks.py").write_text(
        "import sys\nprint('imported', sys.argv)\n" + MODEL.replace("def build", "print()\ndef build")
    )
    done = run("capture", "talks.py:build", "--json")
    assert done.code == 0 and done.json["ops"]
    assert "imported ['talks.py']" in done.err


ARGUMENTS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, {})
arguments = parser.parse_args()
"""


def test_a_file_that_parses_arguments_sees_none(run, tmp_path):
    """Those of `checkmate` are not its own; where it needs some, the message is that of its parser."""
    (tmp_path / "parses.py").write_text(ARGUMENTS.format("default=0.1") + MODEL)
    assert run("capture", "parses.py:build", "--json").code == 0
    (tmp_path / "needs.py").write_text(ARGUMENTS.format("required=True") + MODEL)
    done = run("capture", "needs.py:build")
    assert done.code == 2
    assert "needs.py: error: the following arguments are required: --lr" in done.err
    assert "needs.py ended the program with exit code 2\n" in done.err


FAULTS = {
    "syntax": ("def build(:\n", "raised SyntaxError at faulty.py:1", "correct the function"),
    "missing package": ("\nimport no_such_package.of_mine\n", "at {here}:2: No module", "pip install no_such_package\n"),
    "inside torch": (
        "import torch\ndef build():\n    return torch.nn.Linear(2, 3)(torch.ones(1, 5))\n",
        "raised RuntimeError at {here}:3: mat1 and mat2",
        "correct the function: it has to run without Checkmate",
    ),
    "no CUDA": (
        "def build():\n    raise AssertionError('Torch not compiled with CUDA enabled')\n",
        "raised AssertionError at {here}:2",
        "build the model and the batch on the CPU",
    ),
    "no optimizer": (
        "import torch\ndef build():\n    return torch.nn.Linear(2, 3), None, 'adam', (torch.ones(1, 2),)\n",
        "returned str for the optimizer",
        "return (model, loss, example) or (model, loss, optimizer, example)",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_error_of_the_users_code_is_shown_at_the_users_line(run, tmp_path, name):
    """Not at the line of the library that raised it; the hint is a cure for this error."""
    text, message, hint = FAULTS[name]
    (tmp_path / "faulty.py").write_text(text)
    done = run("capture", "faulty.py:build")
    assert done.code == 2
    assert message.format(here="faulty.py") in done.err.replace(str(tmp_path) + "/", ""), done.err
    assert f"hint: {hint}" in done.err
