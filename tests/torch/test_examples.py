"""The examples of training loops: a lower measured peak and the same losses, asserted by each itself."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDED = {
    "plain_loop": (),
    "with_accelerate": ("accelerate",),
    "with_lightning": ("lightning",),
    "with_trainer": ("accelerate",),
    "large_vocabulary": ("transformers",),
}


def run(*command: str) -> str:
    """What an example prints, run from beginning to end in a fresh process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDED)
def test_a_trainer_keeps_a_budget(name: str) -> None:
    """Compiled before the trainer gets it, and nothing else changed."""
    missing = [package for package in NEEDED[name] if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    assert "within the budget" in run(str(EXAMPLES / f"{name}.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_two_ranks_keep_a_budget(name: str) -> None:
    """By the command that the example names."""
    said = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / f"{name}.py"))
    assert all(f"rank {rank}: peak" in said for rank in range(2))
