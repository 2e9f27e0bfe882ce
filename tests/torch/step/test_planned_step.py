"""A planned step says what it is in a few lines, and more where it is asked."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkmate
from checkmate import Auto, Graph, Plan, Problem, Termination, evaluate
from checkmate.core.errors import OptionError
from checkmate.solvers.session import Session
from checkmate.torch import PlannedStep, Step, compile, explain, last_plan  # noqa: A004
from checkmate.torch.steps.coordinator import coordinator
from tests.torch.steps import close

SCREEN = 24  # lines
WIDTH = 250
ROWS = 64


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.GELU())])


def step_within(budget: str, **options: Any) -> Step:
    model, x = network(), torch.ones(ROWS, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given: dict[str, Any] = {"budget": budget, "costs": "estimated", "time_limit_s": 2.0, **options}
    return compile(model, nn.functional.mse_loss, optimizer, example=(x, x), **given)


@pytest.fixture(scope="module")
def step() -> Step:
    return step_within("60%")


def test_a_step_and_its_parts_fit_a_screen(step: Step) -> None:
    """A notebook shows the repr of what a cell ends with; a list of a thousand steps tells nothing."""
    parts = (step, step.result, step.plan, step.graph, PlannedStep(graph=step.graph, result=step.result))
    for shown in parts:
        assert repr(shown) == str(shown)
        assert len(lines := repr(shown).splitlines()) <= SCREEN and max(map(len, lines)) <= WIDTH
    for shown in (step.explain(), checkmate.explain(step.graph, step.plan)):
        assert repr(shown) == str(shown) and len(repr(shown).splitlines()) <= 2 * SCREEN
    assert f"{len(step.graph.ops)} ops" in repr(step) and "overhead" in repr(step)


def test_a_small_graph_and_plan_are_shown_in_full() -> None:
    """They are what a test or a bug report is made of."""
    graph = Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[(0, 1)], kept=[1])
    plan = Plan.from_order(graph, [0, 1])
    assert "Op(name=" in repr(graph) and "Compute(op=0)" in repr(plan) and "Compute(op=0)" in repr(evaluate(graph, plan))


def test_a_step_explains_and_reports_itself(step: Step, tmp_path: Path) -> None:
    """Whoever has a step has its graph and its plan, and need not know which functions take them."""
    assert str(step.explain()) == str(explain(step)) == str(explain(step.graph, step.plan))
    page = step.report(tmp_path / "step.html")
    assert page == tmp_path / "step.html" and "<html" in page.read_text()


def test_a_measured_step_has_its_peak_and_its_time(step: Step) -> None:
    """The curve ends where it begins, its highest point is the planned peak, and the text has both times beside the gap."""
    x = torch.ones(ROWS, 16)
    found = step.measure(lambda: step(x, x))
    measured = found.result.measured
    assert measured is not None and close(measured.peak_bytes, step.result.peak_bytes)
    assert max(size for _, size in measured.curve) == measured.peak_bytes
    assert measured.curve[0][1] >= step.graph.resident_bytes and 0 <= measured.curve[0][0] < measured.curve[-1][0] <= 1
    assert "op costs sum to" in repr(found) and "op costs sum to" not in repr(step)


def test_lines_of_the_report_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line that a page tells to paste runs in the program that made the page, with its optimizer, within what it says."""
    model, x, loss = network(), torch.ones(ROWS, 16), nn.functional.mse_loss
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    given: dict[str, Any] = {"costs": "estimated", "time_limit_s": 2.0}
    step = compile(model, loss, optimizer, example=(x, x), budget="60%", **given)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"<pre>(.*?)</pre>", step.report(tmp_path / "step.html").read_text(), re.DOTALL)
    lines = [html.unescape(block) for block in blocks]
    names: dict[str, Any] = {
        "checkmate": checkmate,
        "model": model,
        "loss": loss,
        "optimizer": optimizer,
        "x": x,
        "y": x,
        "step": step,
    }
    peaks = []
    for line in lines:
        if line.startswith("step = ") and "host=" not in line:  # the host needs CUDA
            exec(line.replace("example=", "costs='estimated', example="), names)
            peaks.append(names["step"].result.peak_bytes)
        elif line.startswith(("found = ", "checkmate.write(")):
            exec(line.replace("example=", "time_limit_s=2, example="), names)
    assert len(peaks) == 2 and peaks[0] == step.result.peak_bytes
    assert names["step"].result.overhead == 1.0
    assert names["found"].result.peak_bytes <= names["found"].budget_bytes <= 1.01 * peaks[0]


def test_what_a_whole_step_saves_is_told(step: Step) -> None:
    """Its backward begins with the first op that reads and allocates: transposes of weights may be made at any time."""
    assert "aten.addmm.default" in {saved.kind for saved in step.explain().saved}


def test_the_plan_of_a_plain_loop_is_seen() -> None:
    """There is no step object to ask: the newest step of the process is the one that is meant."""
    coordinator().forget_steps()
    assert last_plan() is None
    model = torch.compile(network(), backend="checkmate", options={"budget": "1MiB", "costs": "estimated"})
    with pytest.raises(OptionError, match="OptimizedModule cannot be explained") as error:
        explain(model)  # type: ignore[arg-type]
    assert "last_plan()" in error.value.hint
    for _ in range(2):
        model(torch.ones(ROWS, 16)).square().mean().backward()
    planned = last_plan()
    assert planned is not None and planned.result.peak_bytes <= 2**20
    assert str(planned.explain()) == str(explain(planned))


@dataclass(frozen=True)
class Counted:
    """The default solver; counts its searches."""

    searches: list[int] = field(default_factory=list[int], repr=False)

    def run(self, problem: Problem, session: Session) -> Termination:
        self.searches.append(problem.budget_bytes)
        return Auto().run(problem, session)


def test_the_last_plan_of_a_model_that_returns_its_loss() -> None:
    """Its graph is a whole step: the plan that was made at compile is the step's."""
    torch._dynamo.reset()
    coordinator().forget_steps()
    model, x = network(), torch.ones(ROWS, 16)
    run = torch.compile(lambda: model(x).square().mean(), backend="checkmate", options={"budget": "1MiB", "costs": "estimated"})
    for _ in range(2):
        run().backward()
        model.zero_grad()
    planned = last_plan()
    assert planned is not None
    assert planned.result.peak_bytes <= planned.result.budget_bytes
    assert "peak" in str(planned.explain())


def test_a_smaller_last_batch_is_not_searched_for() -> None:
    """Training would stop for up to the time limit at the end of the first epoch, for one batch."""
    step = step_within("60%", solver=(solver := Counted()))
    x = torch.ones(ROWS, 16)
    step(x, x)
    before = len(solver.searches)
    for rows in (ROWS - 1, ROWS // 2, 2):
        prediction, _ = step(x[:rows], x[:rows])
        assert prediction.shape == (rows, 16)
    room = step.result.budget_bytes - step.graph.resident_bytes  # what else exists may grow
    assert all(result.peak_bytes - graph.resident_bytes <= room for graph, result in step._compiled.planned)
    assert len(solver.searches) == before
    step(torch.ones(2 * ROWS, 16), torch.ones(2 * ROWS, 16))
    assert len(solver.searches) > before


def test_a_smaller_last_batch_of_a_plain_loop_is_not_searched_for() -> None:
    """Its share has as many bytes as that of the larger batch had, and its step the order of that step's plan."""
    coordinator().forget_steps()
    model, x = network(), torch.ones(ROWS, 16)
    options = {"budget": "60%", "costs": "estimated", "time_limit_s": 5.0, "solver": (solver := Counted())}
    compiled = torch.compile(model, backend="checkmate", options=options)

    def train(rows: int) -> None:
        compiled(x[:rows]).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None

    for _ in range(3):
        train(ROWS)
    large = last_plan()
    before = len(solver.searches)
    for _ in range(3):  # the eager code of the second one is seen
        train(ROWS - 1)
    small = last_plan()
    assert large is not None and small is not None and small is not large
    assert small.result.peak_bytes <= small.result.budget_bytes
    assert small.result.budget_bytes - small.graph.resident_bytes <= large.result.budget_bytes - large.graph.resident_bytes
    assert len(solver.searches) == before
