"""The report in a real browser: every figure read back from the page is what `simulate` says."""

from __future__ import annotations

import ast
import base64
import re
import time
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

import checkmate
from benchmarks.generate import gpt_of
from checkmate import Compute, Plan, simulate
from checkmate.core.result import Measured
from checkmate.report import PageText, html_report
from checkmate.studies.explain import held_at
from tests.plot.graphs import AGAIN, KEEP_ALL, chain, plan
from tests.report.plans import again, captured


@pytest.fixture(scope="module")
def curve():
    return checkmate.pareto(chain(), points=4)


@pytest.fixture
def page(open_page, curve):
    result = checkmate.solve(checkmate.Problem(chain(), "5.5MiB"))
    return open_page(html_report(chain(), plan(AGAIN), against=result.plan, result=result, curve=curve))


def test_nothing_is_loaded_and_nothing_goes_wrong(page):
    """One file, offline: no request but its own, no word on the console."""
    assert page.console == []
    assert page.ask("performance.getEntriesByType('resource').length") == 0
    assert page.text("h1") == "chain: a training step in 5.50 MiB"


def test_bytes_drawn_are_those_of_simulate(page):
    """At every step, of each of the three plans; the categories sum to the whole."""
    drawn = page.ask("window.checkmate.step.runs.map((run) => run.total)")
    second = page.ask("window.checkmate.step.runs[2].steps")
    third = tuple(Compute(code) if code >= 0 else checkmate.Free(-1 - code) for code in second)
    for total, steps in zip(drawn, (plan(KEEP_ALL), plan(AGAIN), Plan(third)), strict=True):
        assert total == simulate(chain(), steps).bytes.tolist()


@pytest.mark.parametrize("name", ["unet", "bert", "resnet50_split", "gpt2_loss"])
def test_captured_steps_are_drawn_as_simulated(open_page, name):
    """Views, several outputs, workspace and replay of random ops: the page's account is the third, and it agrees."""
    graph, found = captured(name)
    page = open_page(html_report(graph, found))
    timeline = simulate(graph, found)
    assert page.console == []
    assert page.ask("window.checkmate.step.runs[1].total") == timeline.bytes.tolist()
    held = page.ask("window.checkmate.step.runs[1].heldAt(arguments[0]).map((entry) => entry.bytes)", timeline.peak_step)
    assert held == [entry.size_bytes for entry in held_at(graph, found, timeline.peak_step)]
    assert sum(held) == timeline.peak_bytes


def test_schedule_is_the_papers(page):
    """The stages drawn are those of `Plan.stages`: R is what is computed, S what is handed over."""
    stages = page.ask("window.checkmate.step.runs[1].stages()")
    R, S = plan(AGAIN).stages(chain())
    computed, handed = np.zeros_like(R), np.zeros_like(S)
    for cell in stages["cells"]:
        computed[cell["row"], cell["op"]] = True
    for span in stages["held"]:
        handed[span["from"] : span["to"], span["op"]] = True
    assert (computed == R).all()
    assert (handed == S).all()
    assert page.text("#schedule-legend").split("held")[0].split() == ["computed", "first", "(12)", "computed", "again", "(3)"]


def test_table_at_the_top_has_the_numbers(page):
    """Peak, overhead and how much is computed again, a column a plan."""
    rows = page.ask("[...document.querySelectorAll('#facts tr')].map((row) => [...row.cells].map((cell) => cell.innerText))")
    facts = {name: cells for name, *cells in rows}
    assert facts["peak"][:2] == ["7.50 MiB", "5.50 MiB"]
    assert facts["computed again"][:2] == ["0", "3"]
    assert facts["overhead"][1] == f"{simulate(chain(), plan(AGAIN)).cost / chain().cost:.4f}x"
    assert facts["budget"][1] == "5.50 MiB"


def test_what_is_held_sums_to_the_peak(page):
    """The table below the figures adds up, and says so in words."""
    timeline = simulate(chain(), plan(AGAIN))
    rows = page.ask("[...document.querySelectorAll('#held tbody tr[data-bytes]')].map((row) => Number(row.dataset.bytes))")
    assert sum(rows) == timeline.peak_bytes
    assert page.text("#held tr.total").startswith("5.50 MiB")
    assert f"step {timeline.peak_step}" in page.text("#chosen")


def test_curve_has_its_points_and_the_plans_own(page, curve):
    """The image can be decoded, and the table below it has its numbers."""
    rows = page.ask(
        "[...document.querySelectorAll('#points tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    expected = [[checkmate.format_bytes(p.budget_bytes), f"{p.overhead:.4f}x", f"{p.gap:.2%}"] for p in curve.points]
    assert [[row[0], row[2], row[4]] for row in rows] == expected
    assert page.ask("document.getElementById('curve').decode().then(() => document.getElementById('curve').naturalWidth)") > 100


def keys(page, *words: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    chain_of = ActionChains(page.browser)
    for word in words:
        chain_of.send_keys(getattr(Keys, word, word))
    chain_of.perform()


def test_everything_can_be_reached_and_read_by_keyboard(page):
    """Tab goes to the figures; arrows walk over the computations; what is chosen is said to a screen reader."""
    for _ in range(4):  # between the figures are the buttons that save one
        keys(page, "TAB")
    assert page.ask("document.activeElement.id") == "memory-1"
    keys(page, "HOME")
    assert page.ask("window.checkmate.state.p") == 0
    keys(page, "ARROW_RIGHT", "ARROW_RIGHT")
    runs = [p for p, step in enumerate(plan(AGAIN).steps) if isinstance(step, Compute)]
    assert page.ask("window.checkmate.state.p") == runs[2]
    said = page.ask("document.activeElement.getAttribute('aria-valuetext')")
    assert "computation 3 of 15" in said
    assert f"{checkmate.format_bytes(simulate(chain(), plan(AGAIN)).bytes[runs[2]])} held" in said
    keys(page, "END", "PAGE_UP", "p")
    assert page.ask("window.checkmate.state.p") == simulate(chain(), plan(AGAIN)).peak_step
    while page.ask("document.activeElement.dataset.life") is None:
        keys(page, "TAB")
    keys(page, "ENTER")
    assert "made at step" in page.text("#life")
    assert page.ask("window.checkmate.state.life") is not None


def test_pointing_and_clicking_choose_a_step(page):
    """The pointer reads a step; a click keeps it and fills the table."""
    from selenium.webdriver.common.action_chains import ActionChains

    canvas = page.browser.find_element("id", "memory-0")
    ActionChains(page.browser).move_to_element(canvas).perform()
    assert "computation" in page.text("#tooltip")
    ActionChains(page.browser).move_to_element(canvas).click().perform()
    assert page.ask("window.checkmate.state.run") == 0
    assert page.ask("Number(document.getElementById('detail').dataset.bytes)") == page.ask(
        "window.checkmate.step.runs[0].total[window.checkmate.state.p]"
    )
    ActionChains(page.browser).move_to_element(page.browser.find_element("css selector", "[data-run='2']")).click().perform()
    assert page.ask("window.checkmate.state.run") == 2
    ActionChains(page.browser).move_to_element(page.browser.find_element("id", "schedule")).click().perform()
    assert page.console == []


def test_dark_theme_has_other_colours_for_the_same(page):
    """The figures follow the reader's theme: ground and ink change, and are redrawn."""
    pixel = "[...document.getElementById('memory-0').getContext('2d').getImageData(0, 0, 70, 250).data].join()"
    light = page.ask("getComputedStyle(document.body).backgroundColor"), page.ask(pixel)
    emulate = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", emulate)
    try:
        dark = page.ask("getComputedStyle(document.body).backgroundColor"), page.ask(pixel)
        for _ in range(40):  # the figures are redrawn with the next frame
            if dark[1] != light[1]:
                break
            time.sleep(0.05)
            dark = dark[0], page.ask(pixel)
    finally:
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert light[0] == "rgb(255, 255, 255)"
    assert dark[0] == "rgb(13, 17, 23)"
    assert light[1] != dark[1]


def test_amounts_are_written_as_in_python(page):
    """The same number reads the same in the page and in the terminal."""
    from checkmate.core.units import format_bytes, format_cost

    amounts = [0, 1, 1023, 1024, 1152, 1536, 5767168, 2**30 - 1, 2**30, 123456789012, 2**41]
    assert page.ask("arguments[0].map(formatBytes)", amounts) == [format_bytes(a) for a in amounts]
    costs = [0, 999, 1500, 2_500_000, 61_400_000, 2_500_000_000]
    assert page.ask("arguments[0].map((c) => formatCost(c, 'ns'))", costs) == [format_cost(c, "ns") for c in costs]
    assert page.ask("formatCost(12, 'FLOP')") == format_cost(12, "FLOP")


BAD = [
    "</script><script>document.title='run'</script><b>&quot;",
    "<img src=x onerror=\"document.title='run'\"><b>",
    "'\"><b onmouseover=document.title='run'>{0}</title><b>",
]


@pytest.mark.parametrize("bad", BAD)
def test_text_of_a_file_is_text_and_not_markup(open_page, bad):
    """Every field that takes text may hold anything; the page shows it and runs nothing of it."""
    graph = checkmate.Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[(0, 1)], names=[bad, "b"], kept=[1], name=bad)
    ops = tuple(msgspec.structs.replace(op, source=bad, kind=bad) for op in graph.ops)
    values = tuple(msgspec.structs.replace(value, name=bad) for value in graph.values)
    graph = msgspec.structs.replace(graph, ops=ops, values=values, cost_unit=bad)
    steps = Plan.from_order(graph, [0, 0, 1])
    once = Plan.from_order(graph, [0, 1])
    result = msgspec.structs.replace(
        checkmate.evaluate(graph, steps),
        solver=bad,
        remarks=(bad,),
        termination=checkmate.Termination(checkmate.Reason.FEASIBLE, bad, bad),
    )
    curve = msgspec.structs.replace(checkmate.pareto(graph, points=2), cost_unit=bad, solver=bad)
    given = {"against": once, "result": result, "curve": curve}
    for title in ("", bad):
        text = PageText(summary=title, facts=[[bad, bad, bad]], graph_file=bad, plan_file=bad)
        page = open_page(html_report(graph, steps, title=title, text=text, **given))
        assert page.console == []
        assert page.ask("document.title").startswith(bad[:9])
        assert bad in page.text("#detail")
        assert bad in page.text("body > p.soft:last-of-type")
        assert page.ask("document.querySelectorAll('b, img:not(#curve)').length") == 0
        assert (
            page.ask("[...document.querySelectorAll('*')].flatMap((e) => e.getAttributeNames()).filter((n) => /^on/.test(n))")
            == []
        )


def test_only_the_scripts_of_the_page_run(open_page):
    """A script that got into the page in spite of the escapes would still be stopped by the policy, as would a style."""
    text = html_report(chain(), plan(AGAIN))
    assert "unsafe" not in text
    added = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script><p id=styled style='width: 7px'>"
    page = open_page(text.replace("<h1>", f"{added}<h1>"))
    assert page.ask("document.title") == "chain: a training step in 5.50 MiB"
    assert page.ask("getComputedStyle(document.getElementById('styled')).width") != "7px"
    refused = [entry for entry in page.console if "Content Security Policy" in entry]
    assert len(refused) >= 3


def test_html_is_made_by_templates_that_escape():
    """A string that is put together from tags and values by other means could forget to escape a value."""
    import checkmate.report

    for path in Path(checkmate.report.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = (
                [part.value for part in node.values if isinstance(part, ast.Constant)] if isinstance(node, ast.JoinedStr) else []
            )
            assert not any(re.search(r"<[a-z/]", str(part)) for part in parts), f"{path.name}:{getattr(node, 'lineno', 0)}"


def test_every_figure_says_how_to_read_it(page):
    """Readers who never saw the paper need a sentence for each figure and table, before they look at it."""
    for shown in ("#memory-0", "#held", "#schedule", "#computed-again", "#curve"):
        heading = page.ask(
            "[...document.querySelectorAll('h2, .reading, ' + arguments[0])]"
            ".filter((e) => e.compareDocumentPosition(document.querySelector(arguments[0])) & Node.DOCUMENT_POSITION_FOLLOWING)"
            ".at(-1).className",
            shown,
        )
        assert heading == "reading", shown
    said = page.ask("[...document.querySelectorAll('canvas.memory')].map((c) => c.previousElementSibling.innerText)")
    assert said[0] == "The peak is 7.50 MiB, while the backward computes 6."
    assert said[1].startswith("The peak is 5.50 MiB, while the ")


@pytest.mark.parametrize("name", ["", "  "])
def test_a_graph_without_a_name_has_a_title(name):
    """Graphs made by hand often have no name."""
    graph = msgspec.structs.replace(chain(), name=name)
    assert "<h1>A training step in 5.50 MiB</h1>" in html_report(graph, plan(AGAIN))


@pytest.mark.parametrize(
    ("kind", "phase", "call"),
    [
        ("aten.mm.default", "backward", "checkmate.torch.compile(model, loss, example=(x, y), plan=&#x27;p.json&#x27;)"),
        (
            "aten.mm.default",
            "optimizer",
            "checkmate.torch.compile(model, loss, optimizer, example=(x, y), plan=&#x27;p.json&#x27;)",
        ),
        ("MatMul", "backward", "checkmate.tf2.compile(model, loss, optimizer, x, y, plan=&#x27;p.json&#x27;)"),
        ("dot_general", "backward", "checkmate.jax.plan(step_fn, *arguments, plan=&#x27;p.json&#x27;)"),
        ("", "backward", ""),
    ],
)
def test_page_says_how_to_run_the_plan(kind, phase, call):
    """In the framework of which the graph was captured; a graph of neither cannot be run."""
    ops = [msgspec.structs.replace(op, kind=kind) for op in chain().ops]
    ops[-1] = msgspec.structs.replace(ops[-1], phase=phase)
    graph = msgspec.structs.replace(chain(), ops=tuple(ops))
    text = html_report(graph, Plan.from_order(graph, AGAIN), text=PageText(plan_file="p.json"))
    assert (call or "<h2>What to do next</h2>") in text
    assert ("checkmate.torch." in text or "checkmate.tf2." in text or "checkmate.jax." in text) == bool(call)
    assert text.index("What to do next") < text.index("Memory over the step")


ADVICE = ("This plan saves no memory", "in 7.50 MiB nothing is computed twice", "costs only", "A cheaper plan may exist")


@pytest.mark.parametrize(
    ("order", "first_cost", "budget", "given"),
    [
        (KEEP_ALL, 1, None, {0}),
        (AGAIN, 90_000_000, None, {1}),
        (AGAIN, 1, None, {1, 2}),
        (AGAIN, 90_000_000, "6MiB", {1, 3}),
    ],
)
def test_advice_follows_from_the_numbers(order, first_cost, budget, given):
    """A plan that saves nothing, one that costs much, and one that is far from its bound need different next steps."""
    ops = tuple(msgspec.structs.replace(op, cost=first_cost) if o < 3 else op for o, op in enumerate(chain().ops))
    graph = msgspec.structs.replace(chain(), ops=ops)
    found = Plan.from_order(graph, order)
    result = None if budget is None else checkmate.evaluate(graph, found, budget)
    text = html_report(graph, found, result=result)
    assert {i for i, advice in enumerate(ADVICE) if advice in text} == given


def test_budgets_of_the_curve_are_told_with_what_they_cost(curve):
    """The next points above and below the plan: their budgets are taken from the curve, and keep what is said of them."""
    text = html_report(chain(), plan(AGAIN), curve=curve)
    peak = simulate(chain(), plan(AGAIN)).peak_bytes
    lower = [point for point in curve.points if point.peak_bytes < peak][-1]
    assert f"in {checkmate.format_bytes(lower.peak_bytes)} the curve has a plan for {lower.overhead:.3f} times" in text


def measured_result():
    """A result with a measured step, whose peak is planned."""
    measured = Measured(
        peak_bytes=5_767_168, seconds=0.025, planned_s=0.021, curve=((0.0, 524288), (0.5, 5_767_168), (1.0, 524288))
    )
    return msgspec.structs.replace(checkmate.evaluate(chain(), plan(AGAIN)), measured=measured)


def test_a_measured_step_is_drawn_over_the_planned_one(open_page):
    """One figure has both, the table both peaks, and the gap has planned over measured time beside it."""
    page = open_page(html_report(chain(), plan(AGAIN), result=measured_result()))
    assert page.console == []
    assert page.ask("window.checkmate.step.runs.map((run) => (run.measured || []).length)") == [0, 3]
    assert "measured, over its own time" in page.text(".legend")
    rows = page.ask("[...document.querySelectorAll('#facts tr')].map((row) => [...row.cells].map((cell) => cell.innerText))")
    assert ["measured peak", "", "5.50 MiB"] in rows
    assert ["measured time", "", "op costs sum to 0.84 of the measured 25.0 ms"] in rows
    plain = open_page(html_report(chain(), plan(AGAIN)))
    assert "measured," not in plain.text(".legend")


def test_outputs_are_named_as_such(open_page):
    """A prediction that the caller holds is no activation that another plan could free."""
    values = tuple(msgspec.structs.replace(value, kept=v == 5) for v, value in enumerate(chain().values))
    graph = msgspec.structs.replace(chain(), values=values)
    page = open_page(html_report(graph, Plan.from_order(graph, AGAIN)))
    assert "outputs, held to the end" in page.text(".legend")
    row = "window.checkmate.step.runs[1].stack[window.checkmate.step.categories.indexOf('outputs')].at(-1)"
    assert page.ask(row) == 2**20


def test_figures_are_saved_for_slides(open_page, curve):
    """As SVG with its words, and as PNG of three times the pixels, each with its legend."""
    page = open_page(html_report(chain(), plan(AGAIN), result=measured_result(), curve=curve))
    for name in ("memory-0", "memory-1", "schedule"):
        made = page.browser.execute_script(
            "const [chart, legend] = window.checkmate.figures.get(arguments[0]);"
            "return [svgOf(chart, legend()), pngOf(chart, legend())]",
            name,
        )
        root = ElementTree.fromstring(made[0])
        words = "".join(root.itertext())
        assert ("activations kept" if name != "schedule" else "computed again (3)") in words
        assert "NaN" not in made[0] and "undefined" not in made[0]
        data = base64.b64decode(made[1].removeprefix("data:image/png;base64,"))
        assert int.from_bytes(data[16:20]) == int(3 * float(root.get("width")))
    assert page.ask("document.querySelectorAll('.slides button').length") == 8
    assert page.browser.execute_script("return pngOfImage(document.getElementById('curve'))").startswith("data:image/png;base64,")
    page.browser.find_element("css selector", ".slides button").click()
    assert page.console == []


def test_every_plan_of_a_page_can_run():
    """One that reads what is not there is refused, whichever of the three it is."""
    broken = Plan(plan(AGAIN).steps[1:])
    for first, second in ((broken, plan(AGAIN)), (plan(AGAIN), broken)):
        with pytest.raises(checkmate.PlanError):
            html_report(chain(), first, against=second)


@pytest.mark.parametrize("order", [[], [0]])
def test_the_smallest_plans_are_drawn(open_page, order):
    """A plan without a step, and a graph without a cost."""
    graph = checkmate.Graph.from_dag(cost=[0], size_bytes=[4], edges=[], resident_bytes=8)
    page = open_page(html_report(graph, Plan.from_order(graph, order)))
    assert page.console == []


def test_five_thousand_ops_are_small(open_page):
    """Under 3 MB, with two plans beside keeping everything."""
    graph = gpt_of(5000)
    found = again(graph)
    keep_all = Plan.from_order(graph, range(len(graph.ops)))
    text = html_report(graph, found, against=keep_all)
    assert len(text.encode()) < 3_000_000
    page = open_page(text)
    assert page.ask("window.checkmate.drawn_ms") > 0
    assert page.console == []
    assert page.ask("window.checkmate.step.runs[1].total") == simulate(graph, found).bytes.tolist()
    assert page.ask("window.checkmate.step.runs[1].peak") == simulate(graph, found).peak_bytes


def test_pages_need_no_network_by_policy():
    """The page forbids itself to load anything."""
    text = html_report(chain(), plan(AGAIN))
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)=\"(?!data:)", text)
