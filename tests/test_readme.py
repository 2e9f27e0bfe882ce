"""The README works as it stands: on the page of a package index, and on a machine with nothing but what it installs."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.test_docs import OWN

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = {kind: re.findall(rf"^```{kind}\n(.*?)^```", README, re.DOTALL | re.MULTILINE) for kind in ("python", "sh")}
COMMANDS = [line for block in BLOCKS["sh"] for line in block.splitlines() if line.startswith("checkmate ")]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/quickstart.md"])
def test_the_name_to_install_comes_first(page):
    """Two other packages install the same import name and the same command, so that nobody guesses the name of this one."""
    before_the_first_block = (ROOT / page).read_text().split("```")[0]
    assert "checkmate-remat" in before_the_first_block.replace(OWN, "")
    if page != "docs/quickstart.md":
        assert "checkmate-remat" in before_the_first_block.splitlines()[0]


def test_links_and_pictures_are_absolute():
    """The page of a package index has none of the files of the repository."""
    text = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(targets) > 10
    assert [target for target in targets if not target.startswith("https://")] == []
    assert all(t.startswith(f"{OWN}/raw/") for t in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", text))


def test_every_block_is_run_by_a_test():
    """A new block belongs to one of the tests below, or to the two lines that install, which `.ci/run` runs."""
    kinds = [next((name for name in STANDINS if name in block), "") for block in BLOCKS["python"]]
    assert sorted(kinds) == sorted(STANDINS)
    rest = [line for block in BLOCKS["sh"] for line in block.splitlines() if line not in COMMANDS]
    assert all(line.startswith("pip install -c constraints.txt ") for line in rest)
    assert "$(grep '^checkmate ' README.md)" in (ROOT / ".ci" / "run").read_text()


TORCH = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
loss, optimizer = torch.nn.functional.mse_loss, torch.optim.AdamW(model.parameters())
x, y = torch.randn(4, 8), torch.randn(4, 1)
batches = [(x, y)] * 2
"""
KERAS = """
import keras
import numpy
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
loss, optimizer = keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.1)
x, y = numpy.ones((4, 8), "float32"), numpy.ones((4, 1), "float32")
"""
STANDINS = {
    "torch.compile(model, loss, optimizer, example=(x, y), budget": (TORCH, "assert prediction.shape == y.shape"),
    "checkmate.tf2.compile": (KERAS, "step(x, y)"),
    "checkmate.jax.remat": (
        "import jax\ndef loss_fn(w): return (w * w).sum()\n",
        "assert jax.value_and_grad(loss)(jax.numpy.ones(3))[0] == 3",
    ),
    "checkmate.keras.fit_within": (KERAS + "model.compile(optimizer, loss)\n", "model.fit(x, y, verbose=0)"),
    'backend="checkmate"': (TORCH, "model(x).sum().backward()"),
    "plan=": ("", None),
}
"""A text of each block, the definitions that it takes for granted, and how it is used; None for a block after commands."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of TensorFlow's and JAX's own
@pytest.mark.parametrize("text", [text for text, (_, used) in STANDINS.items() if used is not None])
def test_a_block_of_python_runs(text):
    """With its own imports: a reader types nothing besides."""
    before, after = STANDINS[text]
    block = next(block for block in BLOCKS["python"] if text in block)
    for framework in ("torch", "jax"):
        if f"checkmate.{framework}" in block:
            pytest.importorskip(framework)
    if "tf2" in block or "keras" in block:
        pytest.importorskip("tensorflow")
    namespace: dict[str, object] = {}
    for code in (before, block, after):
        exec(compile(code or "", "README.md", "exec"), namespace)


def test_the_lines_of_jax_keep_a_budget_on_a_cpu():
    """In `jax.jit` without options, with a share in place of a budget that this small network would always keep.

    Another part of the process has asked for the options.
    """
    jax = pytest.importorskip("jax")
    pytest.importorskip("checkmate.jax").compiler_options()

    def loss_fn(weights, x):
        for w in weights:
            x = jax.numpy.tanh(x @ w)
        return (x**2).mean()

    arguments = [jax.numpy.ones((64, 64)) / 64] * 12, jax.numpy.ones((1024, 64))
    block = next(block for block in BLOCKS["python"] if "checkmate.jax.remat" in block)
    namespace: dict[str, object] = {"loss_fn": loss_fn}
    exec(compile(block.replace("8GiB", "50%"), "README.md", "exec"), namespace)
    programs = [jax.jit(jax.value_and_grad(f)).lower(*arguments).compile() for f in (loss_fn, namespace["loss"])]
    plain, planned = (program.memory_analysis().temp_size_in_bytes for program in programs)
    assert planned <= 0.5 * plain


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_are_understood(line):
    """Verbs, options and files of the repository exist; `.ci/run` runs the lines where the README's own line installed."""
    pytest.importorskip("cyclopts")
    from checkmate.cli.app import application
    from checkmate.cli.run import arranged

    words = shlex.split(line, comments=True)[1:]
    words = ["run", *arranged(words[1:])] if words[0] == "run" else words
    application().parse_args(words, exit_on_error=False, print_error=False)
    files = [word.partition(":")[0] for word in words if ".py" in word]
    assert [file for file in files if not (ROOT / file).is_file()] == []


@pytest.mark.slow
def test_the_commands_run_and_the_plan_trains(inside, capsys):
    """From the top: the example with a smaller model, and then the block of Python that takes the plan."""
    pytest.importorskip("torch")
    pytest.importorskip("cyclopts")
    from checkmate.cli import main

    (inside / "examples").mkdir()
    for path in sorted((ROOT / "examples").glob("*.py")):
        shutil.copy(path, inside / "examples" / path.name)
    small = inside / "examples" / "language_model.py"
    text = small.read_text().replace("VOCABULARY = 4, 128, 4096", "VOCABULARY = 4, 64, 64")
    small.write_text(text.replace("LAYERS = 256, 4, 6", "LAYERS = 32, 4, 3"))
    for line in COMMANDS:
        words = shlex.split(line, comments=True)
        if words[1] != "demo":
            assert main(words[1:]) == 0, capsys.readouterr().err
    assert (inside / "report.html").exists()
    code = """
import sys
sys.path.insert(0, "examples")
import torch, checkmate.torch
from language_model import build
model, loss, (x, y) = build()
optimizer = torch.optim.AdamW(model.parameters())
"""
    namespace: dict[str, object] = {}
    path = [*sys.path]
    block = next(block for block in BLOCKS["python"] if "plan=" in block)
    exec(compile(code + block + "\nstep(x, y)\n", "README.md", "exec"), namespace)
    sys.path[:] = path
    sys.modules.pop("language_model", None)
