"""nnU-Net within a budget: the file that the documents give, with nnU-Net itself and with a stub of the shape of version 2.8."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from checkmate.torch._compat.profiler import memory_trace
from checkmate.torch.integrations.script import training_within

pytestmark = pytest.mark.filterwarnings("ignore")  # of nnU-Net and what it imports
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "for-images.md"
MODULE = "nnunetv2.training.nnUNetTrainer.nnUNetTrainer"
SIZE, WIDTHS = 32, (4, 8)


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.convolution = nn.Conv3d(before, after, 3, stride, 1)
        self.norm = nn.InstanceNorm3d(after, affine=True)
        self.skip = nn.Conv3d(before, after, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.leaky_relu(self.norm(self.convolution(x)) + self.skip(x), inplace=True)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deep_supervision = True
        pairs = [*zip(WIDTHS[:0:-1], WIDTHS[-2::-1], strict=True)]
        self.up = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, 2) for a, b in pairs)
        self.stages = nn.ModuleList(Block(2 * b, b) for _, b in pairs)
        self.heads = nn.ModuleList(nn.Conv3d(b, 3, 1) for _, b in pairs)


class UNet(nn.Module):
    """As ``ResidualEncoderUNet``: a list of results if ``decoder.deep_supervision``, the largest first."""

    def __init__(self) -> None:
        super().__init__()
        widths = [*zip((1, *WIDTHS[:-1]), WIDTHS, strict=True)]
        self.encoder = nn.ModuleList(
            nn.Sequential(Block(a, b, 1 if a == 1 else 2), *(Block(b, b) for _ in range(3))) for a, b in widths
        )
        self.decoder = Decoder()

    def forward(self, x: torch.Tensor) -> Any:
        skips, found = [], list[torch.Tensor]()
        for block in self.encoder:
            x = block(x)
            skips.append(x)
        for k, (up, stage, head) in enumerate(zip(self.decoder.up, self.decoder.stages, self.decoder.heads, strict=True)):
            x = stage(torch.cat((up(x), skips[-k - 2]), 1))
            found.append(head(x))
        return found[::-1] if self.decoder.deep_supervision else found[-1]


class Stub:
    """As ``nnUNetTrainer`` in ``nnunetv2/training/nnUNetTrainer/nnUNetTrainer.py``."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_ddp, self.network = device, False, None
        self.grad_scaler = torch.amp.GradScaler("cpu")

    def _do_i_compile(self) -> bool:
        return True

    def initialize(self) -> None:
        self.network = torch.compile(UNet()) if self._do_i_compile() else UNet()
        self.optimizer = torch.optim.SGD(self.network.parameters(), 1e-2, momentum=0.99, nesterov=True, weight_decay=3e-5)

    def loss(self, output: list[torch.Tensor], target: list[torch.Tensor]) -> torch.Tensor:
        losses = [nn.functional.cross_entropy(o, t[:, 0].long()) for o, t in zip(output, target, strict=True)]
        return sum((loss / 2**k for k, loss in enumerate(losses)), torch.zeros(()))

    def train_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.network(batch["data"]), batch["target"])  # type: ignore[misc]
        self.grad_scaler.scale(loss).backward()
        self.grad_scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.network.parameters(), 12)  # type: ignore[union-attr]
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        return {"loss": loss.detach().numpy()}


ARCHITECTURE = {
    "n_stages": 2, "features_per_stage": list(WIDTHS), "conv_op": "torch.nn.modules.conv.Conv3d",
    "kernel_sizes": [[3, 3, 3]] * 2, "strides": [[1, 1, 1], [2, 2, 2]], "n_blocks_per_stage": [3, 3],
    "n_conv_per_stage_decoder": [1], "conv_bias": True, "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
    "norm_op_kwargs": {"eps": 1e-5, "affine": True}, "dropout_op": None, "dropout_op_kwargs": None,
    "nonlin": "torch.nn.LeakyReLU", "nonlin_kwargs": {"inplace": True},
}  # fmt: skip
PLANS = {
    "data_identifier": "plans", "batch_size": 2, "patch_size": [SIZE] * 3, "spacing": [1, 1, 1], "batch_dice": False,
    "normalization_schemes": ["ZScoreNormalization"], "use_mask_for_norm": [False],
    "architecture": {
        "network_class_name": "dynamic_network_architectures.architectures.unet.ResidualEncoderUNet",
        "arch_kwargs": ARCHITECTURE, "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    },
}  # fmt: skip


def made(trainer: type) -> Any:
    """A trainer of a tiny residual encoder U-Net, without a data set."""
    torch.manual_seed(0)
    if issubclass(trainer, Stub):
        return trainer(torch.device("cpu"))
    plans = {"continue_training": False, "dataset_name": "Dataset001_Toy", "plans_name": "nnUNetResEncUNetXLPlans",
             "transpose_forward": [0, 1, 2], "configurations": {"3d_fullres": PLANS}}  # fmt: skip
    labels = {"channel_names": {"0": "CT"}, "labels": {"background": 0, "a": 1, "b": 2}, "file_ending": ".nii.gz"}
    found = trainer(plans, "3d_fullres", 0, labels, torch.device("cpu"))
    found.grad_scaler = torch.amp.GradScaler("cpu")
    return found


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of search for each plan."""
    compiled = nn.Module.compile

    def compile_quickly(module: nn.Module, *, backend: str, options: dict[str, Any]) -> None:
        compiled(module, backend=backend, options={"time_limit_s": 1, "chunking": "off", **options})

    monkeypatch.setattr(nn.Module, "compile", compile_quickly)


def trained(trainer: Any) -> tuple[list[torch.Tensor], int]:
    """The weights after four steps, and the peak of the last one, weights and momentum included."""
    trainer.initialize()
    trainer.network.train()
    for k in range(4):
        torch.manual_seed(k)
        target = [torch.randint(3, (2, 1, *[SIZE // 2**s] * 3)).float() for s in range(len(WIDTHS) - 1)]
        with memory_trace() as trace:
            trainer.train_step({"data": torch.randn(2, 1, *[SIZE] * 3), "target": target})
    weights = [p.detach() for p in trainer.network.parameters()]
    return weights, trace.peak() + 2 * sum(p.nbytes for p in weights)


@pytest.fixture(params=["stub", pytest.param("nnunetv2", marks=pytest.mark.slow)])
def trainer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type:
    """The class of nnU-Net that all trainers are made of."""
    if request.param == "stub":
        for name in ["nnunetv2", "nnunetv2.training", "nnunetv2.training.nnUNetTrainer", MODULE]:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[MODULE].nnUNetTrainer = Stub  # type: ignore[attr-defined]
        monkeypatch.setattr(Stub, "_do_i_compile", lambda self: False)  # on a CPU nnU-Net does not compile
        return Stub
    pytest.importorskip("nnunetv2", reason="needs nnU-Net: pip install nnunetv2")
    for name in ("raw", "preprocessed", "results"):
        monkeypatch.setenv(f"nnUNet_{name}", str(tmp_path / name))
    data = tmp_path / "preprocessed" / "Dataset001_Toy" / "plans"
    data.mkdir(parents=True)
    (data / "case.b2nd").touch()
    return importlib.import_module(MODULE).nnUNetTrainer


def test_the_file_of_the_documents_trains_within_a_budget(trainer: type, environ: Any, quick: None) -> None:
    """At 70 % of what keeping everything takes: bits, the planned peak, and weights that are saved under their own names."""
    (source,) = [s for s in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "class nnUNetTrainer" in s]
    names: dict[str, Any] = {}
    exec(source, names)
    expected, plain = trained(made(trainer))
    environ["CHECKMATE_BUDGET"] = str(budget := int(0.7 * plain))
    within = made(names["nnUNetTrainerCheckmate"])
    found, peak = trained(within)
    assert all(map(torch.equal, found, expected))
    assert peak <= budget
    assert not any(name.startswith("_orig_mod") for name in within.network.state_dict())
    within.network.decoder.deep_supervision = False
    assert isinstance(within.network(torch.randn(2, 1, *[SIZE] * 3)), torch.Tensor)


@pytest.mark.slow
def test_the_script_runs_within_a_budget(trainer: type) -> None:
    """``checkmate run -m nnunetv2.run.run_training``: no file at all."""
    expected, plain = trained(made(trainer))
    budget = int(0.7 * plain)
    with training_within(budget, time_limit_s=1, chunking="off") as report:
        found, peak = trained(made(trainer))
    assert all(map(torch.equal, found, expected))
    assert peak <= budget
    assert len(report.compiled) == 1
