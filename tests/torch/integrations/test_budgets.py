"""A budget in two lines for accelerate and for Hugging Face's Trainer, without a name in accelerate's list of backends."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import nn

accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")
ROOT = Path(__file__).parents[3]


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(64, 1))


def gradients(model: nn.Module, inner: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model(torch.ones(256, 64)).square().mean().backward()
    return [p.grad.clone() for p in inner.parameters()]


@pytest.fixture
def accelerator():
    """Makes an `Accelerator`; accelerate has one state for the process."""
    from accelerate.state import AcceleratorState

    def make(plugin):
        AcceleratorState._reset_state(reset_partial_state=True)
        return accelerate.Accelerator(cpu=True, dynamo_plugin=plugin)

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_compiles_within_the_budget(accelerator):
    """`prepare` is where accelerate compiles; the gradients are those of the plain model, and too small a budget is refused."""
    from checkmate.torch.integrations import BudgetPlugin

    plain = network()
    expected = gradients(plain, plain)
    inner = network()
    model = accelerator(BudgetPlugin("60%", time_limit_s=1)).prepare(inner)
    assert all(map(torch.equal, gradients(model, inner), expected))
    inner = network()
    model = accelerator(BudgetPlugin("10KiB")).prepare(inner)
    with pytest.raises(Exception, match=r"10\.00 KiB"):
        gradients(model, inner)


def test_settings_for_other_backends_are_not_used(environ):
    """`accelerate launch` writes its defaults into the environment of the script; they are those of other backends."""
    from checkmate.torch.integrations import BudgetPlugin

    for name, value in (("USE_REGIONAL_COMPILATION", "True"), ("USE_DYNAMIC", "False"), ("MODE", "max-autotune")):
        environ[f"ACCELERATE_DYNAMO_{name}"] = value
    plugin = BudgetPlugin("8GiB", reserve=7)
    assert plugin.to_kwargs() == {"backend": "checkmate", "dynamic": None, "options": {"budget": "8GiB", "reserve": 7}}
    assert not plugin.use_regional_compilation
    assert plugin.to_dict()["backend"] == "checkmate"


def test_the_callback_compiles_the_model_in_place():
    """Within the budget: nothing has to be reserved, since the optimizer's state counts by itself."""
    pytest.importorskip("transformers", reason="needs transformers")
    from checkmate.torch.integrations import BudgetCallback

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            return self.inner(x)

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    BudgetCallback("10KiB", time_limit_s=3).on_train_begin(None, None, None, model=model, optimizer=optimizer)
    with pytest.raises(Exception, match=r"10\.00 KiB"):
        gradients(model, model)


@pytest.mark.slow
@pytest.mark.skipif(version("accelerate") != "1.15.0", reason="the patch is made for accelerate 1.15.0")
def test_the_proposed_change_of_accelerate_applies_and_works(tmp_path):
    """What is proposed to another project has been tried on its sources."""
    installed, copy = Path(accelerate.__file__).parent, tmp_path / "src" / "accelerate"
    shutil.copytree(installed, copy, ignore=shutil.ignore_patterns("__pycache__"))
    patch = ROOT / "docs" / "upstream" / "accelerate-dynamo-backend.patch"
    subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True, capture_output=True)
    done = subprocess.run([sys.executable, "-c", PATCHED], cwd=copy.parent, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, [str(copy / "__init__.py"), "checkmate", "checkmate", "refused"]), (
        done.stderr
    )


PATCHED = """
import accelerate
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import TorchDynamoPlugin
print(accelerate.__file__)
print(launch_command_parser().parse_args(["--dynamo_backend", "checkmate", "train.py"]).dynamo_backend)
print(TorchDynamoPlugin(backend="checkmate").to_kwargs()["backend"])
try:
    TorchDynamoPlugin(backend="chequemate")
except ValueError:
    print("refused")
"""
