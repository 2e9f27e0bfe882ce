"""The schedule is really executed."""

from __future__ import annotations

import pytest
import tensorflow as tf

import checkmate
from checkmate.tf2.allocator import account
from checkmate.tf2.calibrate import measure_plan
from checkmate.tf2.capture import capture_trace
from checkmate.tf2.compat import grappler_off, trace_events
from checkmate.tf2.measure import trace_allocations
from checkmate.tf2.profile import estimated
from checkmate.tf2.rewrite import REMAT, build_function
from checkmate.tf2.specs import specs_of
from checkmate.tf2.trace import resolve_losses, trace_step
from tests.tf2.networks import build
from tests.tf2.steps import keep_all


@pytest.fixture(scope="module")
def planned():
    model, loss, optimizer, x, y = build("dropout")
    trace = trace_step(model, resolve_losses(model, loss), optimizer, (specs_of(x, "x"), specs_of(y, "y")))
    capture = capture_trace(trace, estimated)
    plan = checkmate.solve(checkmate.Problem(capture.graph, "40%"), limits=checkmate.Limits(time_s=10)).plan
    yield capture, plan, [tf.constant(x), tf.constant(y)]
    assert model.built  # the trace holds its variables weakly


def peak(capture, plan, batch, **options):
    found = measure_plan(capture, build_function(capture, plan, **options), batch, 1 << 40)
    return found - capture.graph.resident_bytes


def test_without_the_chain_nothing_is_saved(planned):
    """TensorFlow runs a recomputation as soon as it can: copies of ops alone save nothing. This was the original's fault."""
    capture, plan, batch = planned
    everything = peak(capture, keep_all(capture.graph), batch)
    chained, loose = peak(capture, plan, batch), peak(capture, plan, batch, chain=False)
    assert chained < 0.7 * everything
    assert loose > 1.3 * chained


def test_every_computation_of_the_plan_runs_and_no_other(planned):
    """Counted in the profiler's trace of the executed step, so that a schedule without effect is seen."""
    capture, plan, batch = planned
    function = build_function(capture, plan)
    with grappler_off():
        function(*batch)
        events = trace_events(lambda: function(*batch))
    ran = [e.name.split(":")[0].removeprefix("plan/") for e in events if ":" in e.name]
    wanted: list[str] = []
    for o in plan.order:
        name = capture.members[o].name
        times = sum(w == name or w.startswith(name + REMAT) for w in wanted)
        wanted.append(name if not times else f"{name}{REMAT}{times}")
    assert len(wanted) > len(capture.graph.ops)
    assert [name for name in ran if name in set(wanted)] == wanted


def test_effects_run_once(planned):
    """Seeds, statistics and weights change once a step, however often what reads them is computed."""
    capture, plan, _ = planned
    order = list(plan.order)
    assert capture.effects
    assert all(order.count(o) == 1 for o in capture.effects)
    assert all(not capture.graph.ops[o].recomputable for o in capture.effects)


def test_what_is_made_of_constants_alone_is_freed_as_planned(planned):
    """The runtime would fold it before the first step and keep it for good; the regularizer's gradients are made of such."""
    capture, plan, batch = planned
    function = build_function(capture, plan)
    with grappler_off():
        function(*batch)
        asked = trace_allocations(lambda: function(*batch)).asked_bytes
    assert asked == pytest.approx(account(capture, plan).forwarded_bytes - capture.graph.resident_bytes, rel=0.002)
