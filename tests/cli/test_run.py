"""`checkmate run`: a script runs as under python, and what it trains keeps the budget."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("torch", reason="needs the torch extra")

TRAIN = """
import sys
import torch
from torch import nn
import beside

assert __name__ == "__main__"
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    loss = model(torch.ones(32, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("arguments", sys.argv[1:], beside.__name__)
if "--fail" in sys.argv:
    raise ValueError("of the script")
sys.exit(3)
"""


@pytest.fixture
def scripts(run, tmp_path, environ):
    environ.pop("CHECKMATE_BUDGET", None)
    sys.modules.pop("train", None)  # of another test, whose file has the same name
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit('not today')\n")
    (tmp_path / "plain.py").write_text("x = 1\n")
    yield
    sys.modules.pop("beside", None)


def test_a_script_runs_as_under_python_and_its_plans_are_reported(run, scripts):
    """Its arguments, imports, prints and exit code are its own; the report comes last, on stderr."""
    done = run("run", "train.py", "--lr", "0.1", "--budget", "100%", "--out", "x", "--json")
    assert done.code == 3
    assert done.out == "arguments ['--lr', '0.1', '--out', 'x', '--json'] beside\n"
    assert "compiled  Sequential" in done.err and "steps     2, of which 2 ran plans" in done.err


def test_the_report_as_json_is_all_that_stdout_has(run, scripts):
    """A program reads it: what the script prints goes to stderr."""
    done = run("run", "--json", "--time-limit", "1", "train.py", "--budget=100%")
    assert (done.code, done.json["exit_code"], done.json["steps"]) == (3, 3, 2)
    assert "arguments []" in done.err


def test_an_exception_of_the_script_is_shown_as_python_shows_it(run, scripts):
    """From the script's first line on, without the lines of this package, and with exit code 1."""
    done = run("run", "train.py", "--budget", "100%", "--fail")
    assert done.code == 1
    shown = done.err[done.err.index("Traceback") :].split("\n\n")[0].splitlines()
    assert shown[1].startswith('  File "train.py"') and shown[-1] == "ValueError: of the script"


def test_a_report_after_an_interrupt_says_so(run, scripts, tmp_path):
    (tmp_path / "train.py").write_text("raise KeyboardInterrupt")
    done = run("run", "train.py", "--budget", "100%")
    assert done.code == 130
    assert "checkmate: interrupted; so far:" in done.err


def test_a_module_runs_by_its_name(run, scripts):
    """`-m` as for python, from the current folder."""
    done = run("run", "--budget", "100%", "-m", "train", "a")
    assert (done.code, done.out) == (3, "arguments ['a'] beside\n")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("plain.py",), 2, "--budget"),
        (("--budget", "1GiB", "absent.py"), 2, "absent.py: no such file"),
        (("--budget", "1GiB", "-m"), 2, "-m without a module"),
        (("--budget", "20 apples", "plain.py"), 2, "20 apples"),
        (("--budget", "1GiB", "exits.py"), 1, "not today"),
        (("--budget", "1GiB", "plain.py"), 0, "no optimizer was made"),
        (("--budget", "1GiB", "."), 2, ". is a folder"),
    ],
)
def test_what_cannot_be_done_is_said(run, scripts, words, code, said):
    """And a script without a training runs, but does not seem to be within a budget. One that fails before gets no advice."""
    done = run("run", *words)
    assert done.code == code and said in done.err, done.err
    assert ("  try" in done.err) == (code == 0)


def test_the_environment_has_the_budget_too(run, scripts, environ):
    """For jobs whose command lines are fixed."""
    environ["CHECKMATE_BUDGET"] = "1GiB"
    assert run("run", "plain.py").code == 0
