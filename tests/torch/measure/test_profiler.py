"""Costs are measured once, kept, and shared by processes."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import fx, nn

import checkmate
import checkmate.torch.measure.profiler as profiler
from checkmate.cost.store import OpCost
from checkmate.torch._compat.profiler import memory_trace
from checkmate.torch.measure.estimates import estimated_workspace_bytes
from checkmate.torch.measure.resident import within_room
from checkmate.torch.measure.single_op import measure_on_cpu, needed_bytes, ready_to_run
from tests.torch.networks import input_of, mlp
from tests.torch.steps import compiled


@pytest.mark.usefixtures("own_cache")
def test_a_second_capture_measures_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Costs come from the store, so that plans are the same from run to run."""
    model, x = mlp(), input_of("dropout")
    with caplog.at_level(logging.INFO, "checkmate.torch"):
        first = checkmate.torch.capture(model, nn.functional.mse_loss, example=(x, x))
        second = checkmate.torch.capture(model, nn.functional.mse_loss, example=(x, x))
    assert sum("measured" in m for m in caplog.messages) == 1
    assert first == second
    assert all(op.cost > 0 for op in first.ops if op.kind != "boundary")


def test_workspace_is_measured() -> None:
    """A convolution's backward needs memory that is neither input nor output."""
    model, x = nn.Conv2d(8, 8, 3, padding=1), torch.randn(4, 8, 16, 16)
    graph = checkmate.torch.capture(model, nn.functional.mse_loss, example=(x, x))
    assert max(op.workspace_bytes for op in graph.ops) > 1000


@pytest.mark.usefixtures("own_cache")
def test_an_op_that_cannot_be_measured_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Its cost is estimated, and not in silence."""

    @torch.library.custom_op("checkmate_test::moody", mutates_args=())
    def moody(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not today")

    moody.register_fake(torch.empty_like)
    moody.register_autograd(lambda ctx, gradient: gradient * 2)
    model = nn.Linear(8, 8)
    graph = checkmate.torch.capture(model, lambda p, y: moody(p).mean() * y, example=(torch.ones(4, 8), torch.ones(())))
    assert "not today" in caplog.text
    assert next(op for op in graph.ops if "moody" in op.kind).cost > 0


@pytest.mark.usefixtures("own_cache")
def test_ops_are_measured_as_they_run_in_a_step() -> None:
    """Costs are measured while PyTorch traces: its dispatcher goes through Python then, which takes longer than a small op."""
    through_python: list[bool] = []

    @torch.library.custom_op("checkmate_test::attentive", mutates_args=())
    def attentive(x: torch.Tensor) -> torch.Tensor:
        through_python.append(torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher))
        return x.clone()

    attentive.register_fake(torch.empty_like)
    attentive.register_autograd(lambda ctx, gradient: gradient * 2)
    x = torch.ones(4, requires_grad=True)
    run, _ = compiled(lambda: attentive(x).sum())
    run().backward()
    assert len(through_python) > 1  # more than the step alone
    assert not any(through_python)


class Bench:
    """Ops whose runs take as long as they are told to, by a clock that only they move; and how often each ran."""

    def __init__(self) -> None:
        self.graph, self.now_ms = fx.Graph(), 0.0
        self.runs: dict[str, int] = {}

    def clock(self) -> int:
        """Nanoseconds."""
        return round(1e6 * self.now_ms)

    def op(self, name: str, readings_ms: list[float], size: int = 4) -> fx.Node:
        """An op whose runs take so long, the last of them from then on."""
        self.runs[name] = 0

        def run(x: torch.Tensor) -> torch.Tensor:
            self.now_ms += readings_ms[min(self.runs[name], len(readings_ms) - 1)]
            self.runs[name] += 1
            return x.clone()

        x = self.graph.placeholder("x")
        node = self.graph.call_function(run, (x,))
        x.meta["val"], node.meta["val"] = torch.ones(size), torch.ones(size)
        return node


@pytest.mark.parametrize(
    ("readings_ms", "runs", "time_ms"),
    [
        ([2.0, 1.0], 6, 1.0),  # the first run warms up, and one of five more is the fastest
        ([80.0, 60.0], 2, 60.0),  # of a long op there are few
        ([300.0], 1, 300.0),  # of a very long one there is no second
    ],
)
def test_an_op_runs_as_often_as_its_readings_ask_for(readings_ms: list[float], runs: int, time_ms: float) -> None:
    """What is measured once stays in the store; but users wait for it."""
    bench = Bench()
    node = bench.op("op", readings_ms)
    time_ns, workspace = measure_on_cpu(node, np.zeros(1, np.uint8), bench.clock)
    assert (bench.runs["op"], time_ns / 1e6, workspace) == (runs, time_ms, 0)


def test_ops_are_measured_in_three_passes() -> None:
    """A machine can be a third slower for a second, and all readings of an op that was measured then."""
    bench = Bench()
    node = bench.op("op", [90.0, 80.0, 60.0, 70.0])
    assert profiler.measure_nodes({"op": node}, {}, bench.clock) == {"op": OpCost(60_000_000, 0)}
    assert bench.runs["op"] == 4


def test_new_ops_are_measured_with_known_ones() -> None:
    """A machine that is slower than it was would make them look slower than the ops that they are compared with."""
    bench = Bench()
    nodes = {n: bench.op(n, [ms], 1 << 20) for n, ms in {"long": 110.0, "known": 22.0, "other": 11.0}.items()}
    new = {"new": bench.op("new", [66.0])}
    costs = {"long": 50e6, "known": 20e6, "other": 10e6}  # one that takes so long is not measured in every pass
    known = {name: (nodes[name], OpCost(int(cost), 0)) for name, cost in costs.items()}
    assert profiler.measure_nodes(new, known, bench.clock) == {"new": OpCost(60_000_000, 0)}
    assert not bench.runs["long"]
    with within_room(1 << 20):  # there was more when they were measured
        assert profiler.measure_nodes(new, known, bench.clock) == {"new": OpCost(66_000_000, 0)}


def test_what_a_slice_tells_of_an_op_holds_for_that_op() -> None:
    """Regions that run in pieces have copies of the metadata of the ops whose place they take."""
    x, weight = torch.rand(8, 1, 64, 160), torch.rand(16, 1, 11, 11)
    gradient = torch.rand_like(nn.functional.conv2d(x, weight, None, 2, 5))

    def backward_of(rows: int, **meta: object) -> fx.Node:
        graph, values = fx.Graph(), (gradient[:rows], x[:rows], weight)
        nodes = [graph.placeholder(name) for name in ("gradient", "x", "weight")]
        settings = (None, [2, 2], [5, 5], [1, 1], False, [0, 0], 1, [True, True, False])
        node = graph.call_function(torch.ops.aten.convolution_backward.default, (*nodes, *settings))
        for placeholder, value in zip(nodes, values, strict=True):
            placeholder.meta["val"] = value
        node.meta = {**meta, "val": node.target(*values, *settings)}  # type: ignore[operator]
        return node

    whole, piece = backward_of(8), backward_of(4)
    estimates = [profiler._estimated(node).workspace_bytes for node in (whole, piece)]
    with within_room(gradient.nbytes + x.nbytes + estimates[0] // 2):
        profiler.measure_nodes({"op": whole}, {})
    in_its_place = backward_of(4, **whole.meta)
    assert profiler._estimated(whole).workspace_bytes < estimates[0]
    assert profiler._estimated(in_its_place).workspace_bytes == estimates[1]


@pytest.mark.parametrize("rows", [(0, 1), (1, 1)], ids=["two views of a storage", "one view twice"])
def test_an_op_runs_in_no_more_than_the_room_it_is_said_to_need(rows: tuple[int, int]) -> None:
    """Each argument is made anew, whether or not another one has the same storage."""
    graph, base = fx.Graph(), torch.rand(4096, 2)
    views = []
    for row in rows:
        views.append(graph.call_function(torch.ops.aten.select.int, (graph.placeholder("base"), 1, row)))
        views[-1].meta["val"] = base.select(1, row)
    node = graph.call_function(torch.ops.aten.maximum.default, tuple(views))
    node.meta["val"] = torch.empty(4096)
    with memory_trace() as trace:
        results = ready_to_run(node)()
    assert results is not None and trace.peak() <= needed_bytes(node) + estimated_workspace_bytes(node)


def test_layer_normalisation_under_autocast_is_estimated_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Its backward is traced with other types than its forward returns on a CPU, which no user can mend."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1)), torch.randn(16, 8)
    run, _ = compiled(lambda: model(x).mean())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = run()
    loss.backward()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_profiler_of_the_user_changes_no_cost(own_cache: Path, environ: dict[str, str]) -> None:
    """Profilers of one thread do not nest: ops are then measured in another one, their workspace too."""
    model, x = mlp(2), input_of("dropout")
    run, planned = compiled(lambda: model(x).mean())
    with torch.profiler.profile(profile_memory=True) as seen:
        run().backward()
    profiled = [op.workspace_bytes for op in planned[0][0].graph.ops]
    assert seen.key_averages()
    environ["CHECKMATE_CACHE"] = str(own_cache / "again")
    torch._dynamo.reset()
    run, planned = compiled(lambda: model(x).mean())
    run().backward()
    assert [op.workspace_bytes for op in planned[0][0].graph.ops] == profiled
