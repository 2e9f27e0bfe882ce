"""Verbs write files that are read again, say the same in JSON, and exit as they promise."""

from __future__ import annotations

import html
import re
import shlex
from pathlib import Path

import msgspec
import pytest

import checkmate
from checkmate.core.result import Result
from tests.plot.graphs import AGAIN, KEEP_ALL, chain, plan
from tests.solvers.generators import weighted

BUDGET = "5.5MiB"


def test_plan_writes_what_verify_accepts(run):
    """A plan is a file that anyone can check."""
    planned = run("plan", "chain.graph.json", "--budget", BUDGET, "--json")
    assert planned.code == 0
    assert planned.err == ""
    said = planned.json
    held = run("verify", "chain.graph.json", said["plan"], "--budget", BUDGET, "--json")
    assert held.code == 0
    assert held.json["holds"] is True
    assert held.json["peak_bytes"] == said["peak_bytes"] <= said["budget_bytes"]
    assert held.json["cost"] == said["cost"]


def test_plan_in_json_is_the_result(run):
    """The numbers are those of `solve`."""
    said = run("plan", "chain.graph.json", "--budget", BUDGET, "--json").json
    result = checkmate.solve(checkmate.Problem(chain(), BUDGET))
    assert (said["cost"], said["bound"], said["status"]) == (result.cost, result.bound, result.termination.reason.value)
    assert said["recomputations"] == len(result.plan.order) - len(chain().ops)
    named = f"{chain().digest}+{chain().structure}"  # of a graph in a file, which another process may capture again
    assert checkmate.read(said["plan"]) == msgspec.structs.replace(result.plan, graph_digest=named)


def test_plan_file_is_named_after_graph_and_budget(run):
    """Plans for several budgets lie beside each other."""
    assert run("plan", "chain.graph.json", "--budget", "90%", "--json").json["plan"] == "chain-90pct.plan.json"
    assert run("plan", "chain.graph.json", "--budget", "7 MiB", "--json").json["plan"] == "chain-7MiB.plan.json"


@pytest.mark.parametrize("solver", ["auto", pytest.param("local-search", marks=pytest.mark.slow), "milp", "local_search"])
def test_solver_is_chosen_by_name(run, solver):
    """The names are those that `checkmate solvers` lists; an underscore is as good as a dash."""
    assert run("plan", "chain.graph.json", "--budget", BUDGET, "--solver", solver).code == 0


def test_order_of_the_graph_is_kept_on_request(run):
    """What must not be reordered is not, and verify holds the plan to it."""
    options = ("--budget", BUDGET, "--no-reorder", "--recompute", "forward")
    assert run("plan", "chain.graph.json", *options, "--out", "p.json").code == 0
    assert run("verify", "chain.graph.json", "p.json", *options).code == 0


def test_budget_too_small_exits_1_with_what_is_enough(run):
    """A script can raise the budget by itself."""
    outcome = run("plan", "chain.graph.json", "--budget", "2MiB", "--json")
    assert outcome.code == 1
    assert outcome.json["error"] == "InfeasibleBudgetError"
    assert outcome.json["smallest_bytes"] >= outcome.json["floor_bytes"] > outcome.json["budget_bytes"]
    assert "hint: raise the budget" in outcome.err


def test_verify_finds_a_missing_free_and_a_missing_op(run):
    """Breaking one step of a plan breaks the check."""
    whole = plan(AGAIN)
    computations = tuple(step for step in whole.steps if isinstance(step, checkmate.Compute))
    last = checkmate.Compute(AGAIN[-1])
    for steps in (whole.steps[1:], computations, tuple(step for step in whole.steps if step != last)):
        checkmate.write(checkmate.Plan(steps, whole.graph_digest), "broken.plan.json")
        outcome = run("verify", "chain.graph.json", "broken.plan.json", "--budget", BUDGET, "--json")
        assert outcome.code == 1
        assert outcome.json["violations"]


def test_verify_refuses_the_plan_of_another_graph(run):
    """The digest in a plan is checked before anything else."""
    checkmate.write(plan(AGAIN), "p.json")
    checkmate.write(checkmate.Graph.from_dag(cost=[1], size_bytes=[1], edges=[]), "other.graph.json")
    outcome = run("verify", "other.graph.json", "p.json", "--json")
    assert outcome.code == 1
    assert outcome.json["violations"][0]["rule"] == "graph"


def test_verify_reads_results_too(run):
    """A result file has its plan inside."""
    result = checkmate.solve(checkmate.Problem(chain(), BUDGET))
    assert isinstance(result, Result)
    checkmate.write(result, "result.json")
    assert run("verify", "chain.graph.json", "result.json", "--budget", BUDGET).code == 0


@pytest.mark.parametrize("budget", ["60 %", "5.5M"])
def test_commands_in_hints_can_be_pasted_into_a_shell(run, tmp_path, budget):
    """A budget and the name of a file may have spaces; a shell splits at them."""
    (tmp_path / "my model.graph.json").write_bytes((tmp_path / "chain.graph.json").read_bytes())
    words = ["plan", "my model.graph.json", "--budget", budget]
    for _ in range(2):  # the plan, its check, and what they hint at
        outcome = run(*words)
        assert outcome.code == 0, outcome
        for command in re.findall(r"`checkmate ([^`]+)`", outcome.out + outcome.err):
            words = shlex.split(command)
            assert run(*words).code == 0, words


@pytest.mark.parametrize("verb", ["plan", "verify"])
def test_a_share_is_told_as_itself(run, verb):
    """No user who asked for a half knows 4.62 MiB again."""
    assert run("plan", "chain.graph.json", "--budget", "50 %", "--out", "p.json").code == 0
    words = ["plan", "chain.graph.json"] if verb == "plan" else ["verify", "chain.graph.json", "p.json"]
    said = run(*words, "--budget", "50 %").out
    (line,) = [line for line in said.splitlines() if line.startswith("budget")]
    assert re.fullmatch(r"budget +50 % of what can be given up: \S+ MiB of 7.50 MiB in all", line), line


def test_a_share_that_is_refused_is_not_asked_for_its_unit(run, tmp_path):
    """A share of a small graph is a few bytes; that no unit was forgotten shows in its sign."""
    chain = checkmate.Graph.from_dag(cost=[1] * 4, size_bytes=[100] * 4, edges=[(0, 1), (1, 2), (2, 3)])
    checkmate.write(chain, tmp_path / "small.graph.json")
    outcome = run("plan", "small.graph.json", "--budget", "1%")
    assert outcome.code == 1, outcome
    said = " ".join(outcome.err.split())
    assert "budget 1% of what can be given up: 2 B of 200 B in all, is below the smallest possible peak" in said
    assert "did you mean" not in said
    assert "did you mean '4%' or '4MiB'?" in " ".join(run("plan", "small.graph.json", "--budget", "4").err.split())


def test_solvers_are_those_of_the_registry(run):
    """What is listed can be chosen."""
    said = run("solvers", "--json").json["solvers"]
    names = [solver["name"] for solver in said]
    assert {"auto", "brute-force", "keep-all", "local-search", "milp"} <= set(names)
    assert all(solver["about"] for solver in said)


class Broken:
    """A solver with a bug."""

    def run(self, problem, session):
        raise ZeroDivisionError("division by zero")


def test_a_fault_of_ours_exits_3_and_says_where(run, use):
    """A bug is not passed off as bad input; the traceback is for the report."""
    use(Broken())
    outcome = run("plan", "chain.graph.json", "--budget", BUDGET, "--json")
    assert outcome.code == 3
    assert "Traceback" in outcome.err
    assert outcome.json["error"] == "ZeroDivisionError"


def test_no_batch_within_the_budget_exits_1(run):
    """As for a plan: what would be enough is said."""
    outcome = run("max-batch", "chain.graph.json", "--batch", "1", "--budget", "1KiB", "--json")
    assert outcome.code == 1
    assert outcome.json["error"] == "InfeasibleBudgetError"
    assert not list(Path().glob("*.plan.json"))


def test_largest_batch_comes_with_its_graph_and_plan(run):
    """Two captures give the step at any batch; what is written can be verified."""
    checkmate.write(checkmate.AffineGraph.proportional(chain())(3), "three.graph.json")
    said = run(
        *("max-batch", "chain.graph.json", "three.graph.json", "--batch", "1", "--large-batch", "3"),
        *("--budget", "20MiB", "--max-overhead", "1.2", "--json"),
    ).json
    assert said["batch"] <= said["upper_bound"]
    assert said["overhead"] <= 1.2
    assert run("verify", said["graph"], said["plan"], "--budget", "20MiB").code == 0


def test_largest_batch_takes_the_bus_of_a_device(run):
    """Weights on the host are fetched over it: without a host no batch fits, and the plan that is written has its copies."""
    checkmate.write(weighted(4, weight=2**30), "weighted.graph.json")
    asked = ("max-batch", "weighted.graph.json", "--batch", "1", "--budget", "3GiB", "--max-overhead", "1e7", "--json")
    assert run(*asked).code == 1
    said = run(*asked, "--time-limit", "2", "--host", "8GiB", "--device", "H100").json
    assert run("verify", said["graph"], said["plan"], "--budget", "3GiB").code == 0
    assert checkmate.read(said["plan"]).host is not None
    assert run(*asked, "--host", "8GiB").code == 2


def test_smallest_budget_with_weights_on_the_host(run):
    """It is smaller, its plan is right, and the command that it names plans within it."""
    checkmate.write(weighted(4, weight=2**30), "weighted.graph.json")
    asked = ("min-budget", "weighted.graph.json", "--time-limit", "2", "--json")
    alone = run(*asked).json["smallest_bytes"]
    said = run(*asked, "--host", "8GiB", "--device", "H100").json
    assert said["smallest_bytes"] < alone
    assert run("verify", "weighted.graph.json", said["plan"], "--budget", str(said["smallest_bytes"])).code == 0
    hint = run(*asked[:-1], "--host", "8GiB", "--device", "H100").err
    assert "--host 8GiB --device H100" in hint
    assert run(*asked, "--host", "8GiB").code == 2


def test_explanation_adds_up_to_the_peak(run):
    """Everything in JSON, and its bytes are the peak that verify finds."""
    checkmate.write(plan(AGAIN), "p.json")
    said = run("explain", "chain.graph.json", "p.json", "--json").json
    verified = run("verify", "chain.graph.json", "p.json", "--json").json
    assert sum(entry["size_bytes"] for entry in said["held"]) == said["peak_bytes"] == verified["peak_bytes"]
    assert sum(remat["times"] for remat in said["computed_again"]) == len(AGAIN) - len(chain().ops)


def test_difference_is_signed(run):
    """Swapping the plans swaps the sides."""
    checkmate.write(plan(AGAIN), "a.json")
    checkmate.write(plan(KEEP_ALL), "b.json")
    ab = run("diff", "chain.graph.json", "a.json", "b.json", "--json").json
    ba = run("diff", "chain.graph.json", "b.json", "a.json", "--json").json
    assert ab["peak_bytes"] == ba["peak_bytes"][::-1]
    assert ab["more_in_first"] == ba["more_in_second"] != []
    assert ab["held_in_second"] == ba["held_in_first"] != []


def test_result_file_carries_the_proof_into_the_report(run):
    """The page says how far from the best the plan is, which a plan file alone cannot."""
    run("plan", "chain.graph.json", "--budget", BUDGET, "--out", "p.json", "--result", "r.json")
    assert run("report", "chain.graph.json", "r.json", "--out", "r.html").code == 0
    assert run("report", "chain.graph.json", "p.json", "--out", "p.html").code == 0
    assert "proven, for every plan and order" in Path("r.html").read_text()
    assert "proven, for every plan and order" not in Path("p.html").read_text()


def test_report_names_the_step_and_not_its_files(run):
    """A file name is no title: `gpt2.result.json` says nothing about what the page shows."""
    checkmate.write(msgspec.structs.replace(chain(), name=""), "gpt2.graph.json")
    checkmate.write(plan(AGAIN), "gpt2.plan.json")
    assert run("report", "gpt2.graph.json", "gpt2.plan.json", "--against", "gpt2.plan.json").code == 0
    page = Path("report.html").read_text()
    assert "<h1>gpt2: a training step in 5.50 MiB</h1>" in page
    assert re.findall(r"<h3>(.*?)</h3>", page)[:3] == ["keeping everything", "the plan", "the other plan"]
    rows = [re.findall(r"<td.*?>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    assert ["file", "", "gpt2.plan.json", "gpt2.plan.json"] in rows


@pytest.mark.parametrize("order", [pytest.param(KEEP_ALL, marks=pytest.mark.slow), AGAIN])
def test_commands_of_a_report_run(run, order):
    """What the page proposes to do next works as it is written, and a budget that it proposes has a plan."""
    checkmate.write(plan(order), "a plan.json")
    assert run("pareto", "chain.graph.json", "--points", "3", "--out", "c.json").code == 0
    for more in ([], ["--curve", "c.json"]):
        assert run("report", "chain.graph.json", "a plan.json", *more).code == 0
        commands = re.findall(r"<pre>checkmate (.*?)</pre>", Path("report.html").read_text())
        assert commands
        for command in commands:
            assert run(*shlex.split(html.unescape(command))).code == 0
