"""Whatever an optimizer trains is compiled within the budget, whichever way the code calls it; nothing else is touched."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from checkmate.core.errors import UnitError
from checkmate.frontend.options import budget_of_environment, lightning_callbacks
from checkmate.torch.integrations.script import TrainingReport, training_within
from checkmate.torch.steps.coordinator import coordinator

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of Dynamo itself
BUDGET = {"time_limit_s": 1, "costs": "estimated"}


class Network(nn.Module):
    """Layers in a module that is called, or whose parts are called one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)])
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Holder(nn.Module):
    """A module that is never called itself, as a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()


def step_of(optimizer, called, x):
    loss = called(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def whole(network):
    return network, network


def held(network):
    holder = Holder()
    holder.network = network
    return holder, holder.network


def in_parts(network):
    return network, lambda x: network.head(network.body(x))


def in_a_later_module(network):
    return network, lambda x: nn.Sequential(network)(x)


WAYS = {
    "whole": (whole, ["Network"]),
    "held by a module that is not called": (held, ["Network"]),
    "in parts": (in_parts, ["Sequential", "Linear"]),
    "in a module made after the optimizer": (in_a_later_module, ["Network"]),
}


def trained(way, steps=3):
    """Losses and parameters after a few steps."""
    owner, called = way(Network())
    optimizer = torch.optim.AdamW(owner.parameters(), 1e-2)
    torch.manual_seed(1)
    losses = [step_of(optimizer, called, torch.randn(64, 32)) for _ in range(steps)]
    return [*losses, *(p.detach() for p in owner.parameters())]


@pytest.mark.parametrize("name", WAYS)
def test_what_the_code_calls_to_train_is_compiled(name):
    """The root of the module tree is not always what is called; every step has a plan, and the bits are those of eager."""
    way, expected = WAYS[name]
    plain = trained(way)
    with training_within("70%", **BUDGET) as report:
        planned = trained(way)
    assert report.compiled == expected
    assert (report.steps, sum(count for count, *_ in report.planned.values())) == (3, 3)
    last = [*report.planned][-1]
    assert last.keep_all_bytes is not None
    assert last.peak_bytes <= last.budget_bytes < last.keep_all_bytes
    assert all(map(torch.equal, planned, plain))


def test_the_report_has_what_was_announced():
    """A first step may exceed the budget, which a warning says once: the report has it too."""
    coordinator().forget_steps()
    with training_within("70%", **BUDGET) as report:
        trained(lambda network: (network, lambda x: network(x) * torch.ones(64, 4096)), steps=1)  # eager code takes most
    assert report.announced_bytes > 64 * 4096 * 4
    assert any(name == "announced" and "MiB" in text for name, text in report.rows())


def test_a_module_of_torch_itself_is_compiled():
    """Dynamo begins no graph in torch.nn: `nn.Sequential(...).compile()` alone compiles nothing."""
    network = Network().body
    with training_within("100%", **BUDGET) as report:
        optimizer = torch.optim.SGD(network.parameters(), 0.1)
        step_of(optimizer, network, torch.randn(8, 32))
    assert (report.compiled, len(report.planned)) == (["Sequential"], 1)


def test_nothing_else_is_compiled():
    """A teacher without an optimizer, an average of the weights and calls without gradients run as they are."""
    with training_within("100%", **BUDGET) as report:
        network, teacher = Network(), Network()
        optimizer = torch.optim.SGD(network.parameters(), 0.1)
        average = copy.deepcopy(network)
        with torch.no_grad():
            network(torch.randn(8, 32)), average(torch.randn(8, 32))
        teacher(torch.randn(8, 32)).sum().backward()
        assert report.compiled == []
        step_of(optimizer, network, torch.randn(8, 32))
    assert report.compiled == ["Network"]


def test_all_is_as_before_when_the_block_is_over():
    """A module that was never called to be trained goes through nothing, and so do new optimizers."""
    before = torch.compile, torch.optim.Optimizer.__init__
    with training_within("100%", **BUDGET):
        network = Network()
        torch.optim.SGD(network.parameters(), 0.1)
        assert network._compiled_call_impl is not None
    assert (torch.compile, torch.optim.Optimizer.__init__) == before
    assert all(module._compiled_call_impl is None for module in network.modules())


@pytest.mark.parametrize("first", ["compile", "optimizer"])
def test_what_the_code_compiles_itself_is_compiled_within_the_budget(first, caplog):
    """Another backend keeps no budget: it is replaced, with one warning, whether the optimizer is made before or after."""
    with training_within("100%", **BUDGET) as report:
        network = Network()
        optimizer = torch.optim.SGD(network.parameters(), 0.1) if first == "optimizer" else None
        compiled = torch.compile(network, mode="max-autotune")
        criterion = torch.compile(lambda y: y.square().mean())
        optimizer = optimizer or torch.optim.SGD(network.parameters(), 0.1)
        criterion(compiled(torch.randn(8, 32))).backward()
        optimizer.step()
    assert report.compiled[0] == "Network" and len(report.compiled) == 2
    assert len(report.planned) == 1
    assert [r.getMessage() for r in caplog.records if "is used instead" in r.getMessage()] == [
        "torch.compile(..., backend='inductor') of the script: backend 'checkmate' is used instead"
    ]


def test_our_own_calls_of_torch_compile_keep_their_backends():
    """A script may use this package as well: its steps and backends have budgets of their own."""
    import checkmate.torch

    x, y = torch.randn(8, 32), torch.randn(8, 1)
    with training_within("1TiB", **BUDGET):
        network = Network()
        optimizer = torch.optim.SGD(network.parameters(), 0.1)
        step = checkmate.torch.compile(network, nn.functional.mse_loss, optimizer, example=(x, y), costs="estimated")
        step(x, y)
    assert step.whole


def test_a_wrong_budget_is_refused_at_once():
    """Not at the first step of a training, which may come hours later."""
    with pytest.raises(UnitError), training_within("20 apples"):
        raise AssertionError("the block runs")


@pytest.mark.parametrize(("optimizers", "said"), [(0, "no optimizer was made"), (1, "model.forward")])
def test_a_training_that_was_not_seen_is_told(optimizers, said):
    """Nothing is compiled where nothing is seen, and the budget is then not kept."""
    report = TrainingReport("1GiB")
    report.optimizers = optimizers
    assert said in report.advice()
    assert ("compiled", "nothing") in report.rows()


def test_the_environment_has_the_budget_of_trainers(environ):
    """`CHECKMATE_BUDGET=20GiB python train.py`: the callbacks need no argument, and one that is given comes first."""
    pytest.importorskip("accelerate", reason="needs accelerate")
    pytest.importorskip("transformers", reason="needs transformers")
    from checkmate.torch.integrations import BudgetCallback, BudgetPlugin

    environ.pop("CHECKMATE_BUDGET", None)
    assert budget_of_environment() is BudgetCallback().options["budget"] is None
    environ["CHECKMATE_BUDGET"] = "20GiB"
    assert BudgetCallback().options["budget"] == BudgetPlugin().options["budget"] == "20GiB"
    assert BudgetCallback("8GiB").options["budget"] == BudgetPlugin("8GiB").options["budget"] == "8GiB"


@pytest.mark.filterwarnings("ignore")  # of lightning, about loggers and workers
def test_lightning_finds_the_budget_of_the_environment(environ, tmp_path):
    """Its entry point makes the callbacks of every Trainer.

    Here the Trainer has two of them, where the package is installed: the one that it is given, and that of the entry point.
    """
    lightning = pytest.importorskip("lightning", reason="needs lightning")
    before = torch.compile, torch.optim.Optimizer.__init__  # which lightning replaces when it is imported

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = Network()

        def training_step(self, batch, index):
            return self.network(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2)

    environ["CHECKMATE_BUDGET"] = "100%"
    (callback,) = lightning_callbacks()
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
        default_root_dir=tmp_path,
    )
    trainer.fit(Task(), torch.utils.data.DataLoader(torch.randn(24, 32), batch_size=8))
    assert callback._report is not None
    assert (callback._report.compiled, callback._report.steps) == (["Network"], 3)
    assert sum(count for count, *_ in callback._report.planned.values()) == 3
    assert (torch.compile, torch.optim.Optimizer.__init__) == before
