"""Reproductions for other projects: each still shows what the page of proposed changes says, or the page is out of date."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

UPSTREAM = Path(__file__).parents[1] / "docs" / "upstream"
pytestmark = pytest.mark.slow


def printed(name: str) -> list[list[str]]:
    """The columns that a script prints."""
    settings = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, UPSTREAM / name], capture_output=True, text=True, check=True, env=settings)
    return [re.split(r"\t|  +", line) for line in done.stdout.splitlines()]


def test_dropout_is_drawn_again_at_every_budget_below_one() -> None:
    """In both backends; where this fails, PyTorch is mended and the comment is not to be sent."""
    _, *rows = printed("activation_memory_budget.py")
    assert [row[0] for row in rows] == ["aot_eager", "inductor"]
    for _, everything, *others in rows:
        assert float(everything) < 1e-5 and all(float(error) > 0.5 for error in others)


def test_a_loop_reads_before_the_scatter_in_old_releases() -> None:
    """Renamed it has all numbers; as it is, from 2.14 on."""
    found = {name: int(count) for name, count in (line[0].rsplit(" ", 1) for line in printed("scatter_before_read.py")[1:])}
    assert found["renamed"] == found["eager"] > 0
    assert found["as it is"] == (found["eager"] if float(".".join(version("torch").split(".")[:2])) >= 2.14 else 0)


@pytest.mark.skipif(not find_spec("jax") or not version("jaxlib").startswith("0.10."), reason="measured with jaxlib 0.10")
def test_a_checkpoint_merges_with_its_first_computation() -> None:
    """The plain program and that of `jax.checkpoint` have as many products; with barriers to the end there are more."""
    plain, checkpoint, barriers = (int(row[-1]) for row in printed("xla_cpu_barriers.py")[2:])
    assert plain == checkpoint < barriers


@pytest.mark.skipif(not find_spec("torchtitan"), reason="needs torchtitan 0.3.0")
def test_the_proposed_change_of_torchtitan_applies_and_works(tmp_path: Path) -> None:
    """A policy that another package registered is taken by its name, and a name that none has is refused by the registry."""
    import shutil

    import torchtitan

    shutil.copytree(Path(torchtitan.__file__).parent, tmp_path / "torchtitan", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", UPSTREAM / "torchtitan-memory-policy.patch"], cwd=tmp_path, check=True, capture_output=True)
    done = subprocess.run([sys.executable, "-c", PATCHED], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (
        0,
        [str(tmp_path / "torchtitan" / "__init__.py"), "checkmate", "refused"],
    ), done


PATCHED = """
from types import SimpleNamespace
import torchtitan, tyro
from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig
from torchtitan.experiments.graph_trainer.memory_policy import tag_with_memory_policy_pass
from torchtitan.experiments.graph_trainer.registry import register_memory_policy
register_memory_policy("checkmate")(lambda gm, *, config: gm)
print(torchtitan.__file__)
print(tyro.cli(GraphTrainerCompileConfig, args=["--memory-policy", "checkmate"]).memory_policy)
try:
    tag_with_memory_policy_pass(None, config=SimpleNamespace(compile=SimpleNamespace(memory_policy="chequemate")))
except ValueError:
    print("refused")
"""
