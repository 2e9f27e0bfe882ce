"""A figure shows the numbers that it was given: they are read back from its artists."""

from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from checkmate import Plan, pareto, simulate
from checkmate.plot import memory_timeline, pareto_curve, schedule, themed_svg
from tests.plot.graphs import AGAIN, KEEP_ALL, LAYERS, chain, plan


@pytest.fixture
def ax():
    return Figure(layout="constrained").subplots()


def line(ax, start):
    return next(artist for artist in ax.get_lines() if str(artist.get_label()).startswith(start))


def test_memory_is_drawn_as_simulated(ax):
    """Each computation is one span, as high as what it holds and as wide as its cost."""
    timeline = simulate(chain(), plan(AGAIN))
    memory_timeline(ax, timeline)
    drawn = line(ax, "plan")
    held = [timeline.bytes[p] for p, step in enumerate(timeline.plan.steps) if hasattr(step, "op")]
    assert drawn.get_ydata()[:-1].tolist() == held
    assert np.diff(drawn.get_xdata()).tolist() == pytest.approx([chain().ops[o].cost / 1e6 for o in AGAIN])


def test_peak_budget_and_boundary_are_marked(ax):
    """What one looks for first is there: how high it goes, how high it may, and where the backward begins."""
    timeline = simulate(chain(), plan(AGAIN))
    memory_timeline(ax, timeline, budget_bytes=7 * 2**20)
    assert ax.collections[0].get_offsets()[0][1] == timeline.peak_bytes
    assert set(line(ax, "budget").get_ydata()) == {7 * 2**20}
    boundary = next(artist for artist in ax.get_lines() if artist.get_gid() == "boundary")
    assert set(boundary.get_xdata()) == {float(LAYERS)}


def test_keep_all_is_drawn_beside_the_plan(ax):
    """The legend says both peaks, in binary units."""
    memory_timeline(ax, simulate(chain(), plan(AGAIN)), keep_all=simulate(chain(), plan(KEEP_ALL)), title="chain")
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["keeping everything, peak 7.50 MiB", "plan, peak 5.50 MiB"]
    assert ax.get_ylabel() == "memory held (MiB)"
    assert ax.get_title(loc="left") == "chain"


def test_nothing_drawn_is_above_the_axis(ax):
    """The budget may be far above the plan and is still seen."""
    memory_timeline(ax, simulate(chain(), plan(KEEP_ALL)), budget_bytes=2**30)
    assert ax.get_ylim()[1] > 2**30


def test_a_plan_without_cost_or_steps_is_drawn(ax):
    """Graphs by hand often have no costs; an empty plan holds what is resident."""
    timeline = memory_timeline(ax, simulate(chain(), Plan(()))).get_lines()[0]
    assert set(timeline.get_ydata()) == {2**19}


def test_schedule_is_the_matrix_of_the_plan(ax):
    """First computations are the diagonal of the paper's R, recomputations lie below it."""
    schedule(ax, chain(), plan(AGAIN), title="chain")
    cells = np.asarray(ax.images[0].get_array())
    R = plan(AGAIN).stages(chain()).R
    assert ((cells >= 2) == R).all()
    assert (cells == 2).sum() == 2 * LAYERS
    assert (cells == 3).sum() == len(AGAIN) - 2 * LAYERS


def test_svg_follows_the_theme_and_is_the_same_each_time():
    """It is read on white and on black, and a committed picture changes only with what it shows."""

    def draw():
        figure = Figure(layout="constrained")
        memory_timeline(figure.subplots(), simulate(chain(), plan(AGAIN)), title="chain")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), frameon=False)  # text of the figure, not of its axes
        return themed_svg(figure)

    text = draw()
    ET.fromstring(text)
    assert "currentColor" in text
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"fill: ?#(000000|ffffff)", text)
    assert all("currentColor" in line for line in text.splitlines() if "<text" in line)
    assert text == draw()


def test_curve_is_drawn_at_its_points(ax):
    """Budgets and overheads are those of the curve; the plan lies at its own peak and cost."""
    curve = pareto(chain(), points=4)
    timeline = simulate(chain(), plan(AGAIN))
    pareto_curve(ax, chain(), curve, chosen=timeline)
    points = [[p.budget_bytes, p.cost / chain().cost] for p in curve.points]
    assert ax.get_lines()[0].get_xydata().tolist() == points
    assert ax.collections[-1].get_offsets().tolist() == [[timeline.peak_bytes, timeline.cost / chain().cost]]


FIGURES = {
    "memory_timeline": lambda ax: memory_timeline(ax, simulate(chain(), plan(AGAIN)), budget_bytes=6 * 2**20),
    "schedule": lambda ax: schedule(ax, chain(), plan(AGAIN)),
    "pareto_curve": lambda ax: pareto_curve(ax, chain(), pareto(chain(), points=4), chosen=simulate(chain(), plan(AGAIN))),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figure_looks_as_before(name, request, tmp_path):
    """Pictures that were looked at; `--regen` draws them anew. Fonts differ a little from release to release."""
    from matplotlib.testing.compare import compare_images

    figure = Figure(figsize=(6, 3.6), dpi=70, layout="constrained")
    FIGURES[name](figure.subplots())
    expected, actual = Path(__file__).parent / "pictures" / f"{name}.png", tmp_path / f"{name}.png"
    figure.savefig(actual, metadata={"Software": None})
    if request.config.getoption("--regen"):
        expected.parent.mkdir(exist_ok=True)
        expected.write_bytes(actual.read_bytes())
    shutil.copy(expected, tmp_path / "expected.png")
    assert compare_images(str(tmp_path / "expected.png"), str(actual), tol=5) is None
