"""``CHECKMATE_BUDGET=8GiB python train.py`` with the shapes of configurations of projects that train with Lightning."""

from __future__ import annotations

import functools
import importlib
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkmate.frontend import options
from checkmate.torch.integrations.script import training_within

pytestmark = pytest.mark.filterwarnings("ignore")  # of lightning, about loggers and workers
ROOT = Path(__file__).parents[3]


class Pairs(nn.Module):
    """A trunk of a few blocks over pairs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)) for _ in range(2)]
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(32, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        z = batch["pair"]
        for block in self.blocks:
            z = z + block(z)
        return {"pair": z, "distance": self.head(z)}


class Forces(Pairs):
    """Energies and their derivatives, which the loss derives once more."""

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        places = batch["pair"].detach().requires_grad_()
        found = super().forward({"pair": places})
        (forces,) = torch.autograd.grad(found["distance"].sum(), places, create_graph=True)
        return {**found, "distance": found["distance"] + forces.square().mean(-1, keepdim=True)}


class Task:
    """What the tasks of all projects have: dict batches, and a loss outside of the model."""

    model_type: type[nn.Module] = Pairs

    def __init__(self) -> None:
        super().__init__()
        self.model = self.model_type()

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self.model(batch)

    def loss_of(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (self(batch)["distance"] - batch["target"]).square().mean()

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> Any:
        return self.loss_of(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class Anemoi(Task):
    """``training/src/anemoi/training/train/methods/single.py``: a rollout of two steps, the loss under a checkpoint."""

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> Any:
        loss = torch.zeros(())
        for _ in range(2):
            found = self(batch)
            loss = loss + torch.utils.checkpoint.checkpoint(
                lambda y, target: (y - target).square().mean(), found["distance"], batch["target"], use_reentrant=False
            )
            batch = {**batch, "pair": found["pair"]}
        return loss / 2


class Boltz(Task):
    """``src/boltz/model/models/boltz1.py``: an average of the weights by a callback, parts of the model called one by one."""

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        z = batch["pair"]
        for block in self.model.blocks:
            z = z + block(z)
        with torch.autocast("cpu", enabled=False):
            return {"distance": self.model.head(z.float())}


class OpenFold(Task):
    """``openfold3/core/runners/model_runner.py``: an average that the task updates, parameters by groups."""

    def on_before_zero_grad(self, *_: Any) -> None:
        average = getattr(self, "average", None) or [p.detach().clone() for p in self.model.parameters()]
        for mean, p in zip(average, self.model.parameters(), strict=True):
            mean.lerp_(p.detach(), 0.1)
        self.average = average

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.model.blocks.parameters()}, {"params": self.model.head.parameters(), "lr": 1e-3}]
        optimizer = torch.optim.Adam(groups, 1e-2, eps=1e-5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class NequIP(Task):
    """``nequip/train/lightning.py``: its own ``optimizer_step``, with an average of the weights after it."""

    model_type = Forces

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure=closure)
        if not hasattr(self, "average"):
            self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.average.update_parameters(self.model)


class ByHand(Task):
    """Manual optimization: two updates a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(batch))
            self.clip_gradients(optimizer, gradient_clip_val=1.0)
            optimizer.step()


def average_callback(package: Any) -> Any:
    class Average(package.Callback):  # as ``src/boltz/model/optim/ema.py``
        def on_train_batch_end(self, trainer: Any, task: Any, *_: Any) -> None:
            self.weights = [p.detach().clone() for p in task.model.parameters()]

    return Average()


CASES: dict[str, tuple[str, type, dict[str, Any]]] = {
    "anemoi": (
        "pytorch_lightning",
        Anemoi,
        {"precision": "bf16-mixed", "gradient_clip_val": 32.0, "gradient_clip_algorithm": "value"},
    ),
    "boltz": ("pytorch_lightning", Boltz, {"precision": "32", "gradient_clip_val": 10.0, "accumulate_grad_batches": 2}),
    "openfold-3": ("pytorch_lightning", OpenFold, {"precision": "bf16-mixed", "gradient_clip_val": 10.0}),
    "nequip": ("lightning.pytorch", NequIP, {"precision": "32"}),
    "by hand": ("lightning.pytorch", ByHand, {"precision": "32"}),
}


def trained(name: str, folder: Path, callbacks: list[Any]) -> list[torch.Tensor]:
    """The weights after four batches."""
    of, task, settings = CASES[name]
    package = importlib.import_module(of)
    batches = [{"pair": torch.randn(2, 16, 16, 32), "target": torch.randn(2, 16, 16, 1)} for _ in range(4)]
    trainer = package.Trainer(
        **settings, max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=[*callbacks, average_callback(package)],
    )  # fmt: skip
    made = type(name, (task, package.LightningModule), {})()
    trainer.fit(made, torch.utils.data.DataLoader(batches, batch_size=None))
    return [p.detach() for p in made.model.parameters()]


@pytest.mark.parametrize("name", CASES)
def test_a_script_trains_within_the_budget_of_the_environment(
    name: str, environ: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The plans keep the budget, and the weights are to the bit those without one (float32), else near them.

    Models with derivatives that are derived again are trained as they are, and a warning says what to do.
    """
    pytest.importorskip(CASES[name][0], reason="needs lightning and pytorch_lightning")
    quick = functools.partial(training_within, time_limit_s=1, costs="estimated")
    monkeypatch.setattr("checkmate.torch.integrations.lightning.training_within", quick)
    environ.pop("CHECKMATE_BUDGET", None)
    torch.manual_seed(1)
    expected = trained(name, tmp_path, [])
    environ["CHECKMATE_BUDGET"] = "80%"
    (callback,) = {"lightning.pytorch": options.lightning_callbacks, "pytorch_lightning": options.pytorch_lightning_callbacks}[
        CASES[name][0]
    ]()
    torch.manual_seed(1)
    found = trained(name, tmp_path, [callback])
    report = callback._report
    if name == "nequip":
        assert report.compiled == [] and "Forces derives with create_graph=True" in caplog.text
        assert all(map(torch.equal, found, expected))
        return
    assert report.compiled
    assert report.planned and sum(count for count, *_ in report.planned.values()) == report.steps
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in report.planned)
    exact = CASES[name][2]["precision"] == "32"
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-2, atol=1e-2)


def test_both_packages_of_lightning_have_an_entry_point(environ: Any) -> None:
    """``pytorch_lightning`` looks for a name of its own, and so do Boltz, OpenFold-3 and anemoi with it."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for package in ("lightning.pytorch", "pytorch_lightning"):
        module, _, function = groups[f"{package}.callbacks_factory"]["checkmate"].partition(":")
        factory = getattr(importlib.import_module(module), function)
        environ.pop("CHECKMATE_BUDGET", None)
        assert factory() == []
        found = pytest.importorskip(package, reason="needs lightning and pytorch_lightning")
        environ["CHECKMATE_BUDGET"] = "8GiB"
        assert all(isinstance(callback, found.Callback) for callback in factory()) and len(factory()) == 1
        with training_within("70%"):
            assert factory() == []
