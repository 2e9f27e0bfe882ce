"""Figures of steps for loggers: of a loop, of Hugging Face's Trainer, and of Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkmate.torch
from checkmate.torch.integrations import StepMetrics
from checkmate.torch.steps.coordinator import coordinator

PLAN = {f"checkmate/{name}" for name in ("budget_bytes", "planned_peak_bytes", "overhead", "gap")}
TIMES = {"checkmate/step_s", "checkmate/planned_over_measured_time"}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    coordinator().forget_steps()


class Network(nn.Module):
    """Layers whose output is the loss; Dynamo begins no graph in a module of a class of torch itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_a_loop_logs_the_figures_of_its_step() -> None:
    """Whatever the logger, it takes a dictionary of numbers; the first call has no step before it."""
    x = torch.ones(32, 16)
    given: dict[str, Any] = {"budget": "60%", "costs": "estimated", "time_limit_s": 2}
    step = checkmate.torch.compile(Network(), example={"x": x}, **given)
    metrics, logged = StepMetrics(step), []
    for _ in range(2):
        step(x=x)
        logged.append(metrics())
    assert set(logged[0]) == PLAN and set(logged[1]) == PLAN | TIMES
    assert logged[1]["checkmate/planned_peak_bytes"] == step.result.peak_bytes <= logged[1]["checkmate/budget_bytes"]
    assert logged[1]["checkmate/step_s"] > 0 and logged[1]["checkmate/overhead"] == step.result.overhead


def test_a_trainer_sends_the_figures_to_its_loggers(tmp_path: Path) -> None:
    """A logger's callback that comes after ours sees them; a trainer's own come first, which is why they are given by hand."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("accelerate", reason="needs accelerate")
    from checkmate.torch.integrations import BudgetCallback, PeakCallback

    sent: list[dict[str, Any]] = []

    class Logger(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
            sent.append(dict(logs or {}))

    class Model(Network):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (super().forward(x),)

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=8,
        logging_steps=1,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    callbacks = [BudgetCallback("70%", costs="estimated", time_limit_s=2), PeakCallback(step=3), Logger()]
    data = [{"x": torch.full((16,), float(k))} for k in range(32)]
    transformers.Trainer(Model(), arguments, train_dataset=data, callbacks=callbacks).train()
    entries = [entry for entry in sent if "loss" in entry]
    measured = "checkmate/measured_peak_bytes"
    assert [measured in entry for entry in entries] == [False, False, True, True]
    assert set(entries[-1]) >= PLAN | TIMES
    assert entries[-1][measured] <= entries[-1]["checkmate/planned_peak_bytes"] <= entries[-1]["checkmate/budget_bytes"]


@pytest.mark.filterwarnings("ignore")  # of lightning, about loggers and workers
def test_lightning_sends_the_figures_to_its_loggers(tmp_path: Path) -> None:
    """Loggers of Weights & Biases and of TensorBoard have one method in common, and steps that are not logged send nothing."""
    lightning = pytest.importorskip("lightning", reason="needs lightning")
    from lightning.pytorch.loggers import CSVLogger

    from checkmate.torch.integrations import MetricsCallback

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Network()
            self.net.compile(backend="checkmate", options={"budget": "100%", "costs": "estimated"})

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-2)

    sent: list[tuple[int, dict[str, float]]] = []
    logger = CSVLogger(tmp_path)
    logger.log_metrics = lambda metrics, step: sent.append((step, metrics))  # type: ignore[method-assign]
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=logger,
        log_every_n_steps=2,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[MetricsCallback()],
    )
    trainer.fit(Task(), torch.utils.data.DataLoader(torch.randn(48, 16), batch_size=8))
    ours = [(step, figures) for step, figures in sent if set(figures) >= PLAN]
    assert [step for step, _ in ours] == [2, 4, 6]
    assert set(ours[-1][1]) >= TIMES


def test_without_a_plan_there_are_no_figures() -> None:
    """A loop may log before its first step is planned."""
    assert StepMetrics()() == {}
