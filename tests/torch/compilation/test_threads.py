"""Steps in several threads, and steps that an exception ends at any line: each is accounted for, and the next one runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from checkmate.torch import measure_peak
from checkmate.torch.steps import coordinator as coordinators
from checkmate.torch.steps.coordinator import coordinator
from checkmate.torch.steps.state import StepState
from tests.torch.compilation.test_coordinator import QUICK, Classifier
from tests.torch.steps import live_bytes

# Dynamo asks a tensor between two graphs for its gradient, and torch warns of that.
pytestmark = [
    pytest.mark.usefixtures("nothing_in_flight"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def test_two_threads_train_two_models(caplog: pytest.LogCaptureFixture) -> None:
    """Each thread has its own step; that neither plan knows what the other thread holds is said once."""
    models = [Classifier(2, width=width) for width in (32, 64)]
    batches = [torch.randn(64, width) for width in (32, 64)]
    runs = [torch.compile(model, backend="checkmate", options={"budget": "80%", **QUICK}) for model in models]
    expected: list[list[torch.Tensor]] = []
    found: list[list[torch.Tensor]] = [[], []]
    begun = threading.Barrier(2)

    def gradients(i: int, run: Callable[..., Any]) -> list[torch.Tensor]:
        models[i].zero_grad()
        loss = run(batches[i]).square().mean()
        if threading.current_thread() is not threading.main_thread():
            begun.wait(60)
        loss.backward()
        return [p.grad.clone() for p in models[i].parameters() if p.grad is not None]

    def train(i: int) -> None:
        for _ in range(4):
            found[i] = gradients(i, runs[i])

    for i in (0, 1):
        gradients(i, runs[i])
        expected.append(gradients(i, runs[i]))
    caplog.clear()
    threads = [threading.Thread(target=train, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, its in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, its))
    assert caplog.text.count("two threads train at once") == 1
    assert coordinator().state is StepState.BETWEEN


def test_a_backward_belongs_to_the_step_of_its_forward_in_whatever_thread_it_runs() -> None:
    """Autograd runs the backwards of a GPU on threads of its own."""
    model, x = Classifier(2), torch.randn(64, 64)
    run = torch.compile(model, backend="checkmate", options={"budget": "80%", **QUICK})

    def gradients(threaded: bool) -> list[torch.Tensor]:
        model.zero_grad()
        loss = run(x).square().mean()
        if threaded:
            backward = threading.Thread(target=loss.backward)
            backward.start()
            backward.join()
        else:
            loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients(threaded=False)
    assert all(all(map(torch.equal, gradients(threaded=True), expected)) for _ in range(2))
    assert coordinator().step is not None and coordinator().state is StepState.BETWEEN


@pytest.fixture
def silent() -> Iterator[None]:
    """The hook of pytest keeps an interrupt in a finalizer, with all frames."""
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None
    yield
    sys.unraisablehook = before


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(
    ("error", "stride"),
    [
        (KeyboardInterrupt, 41),
        (MemoryError, 131),
        pytest.param(KeyboardInterrupt, 1, marks=pytest.mark.slow),
        pytest.param(MemoryError, 1, marks=pytest.mark.slow),
    ],
)
def test_the_step_after_an_exception_runs_whatever_line_it_came_at(error: type[BaseException], stride: int) -> None:
    """Ctrl-C comes between any two statements that keep account of a step."""
    model, x = Classifier(2), torch.randn(64, 64)
    run = torch.compile(model, backend="checkmate", options={"budget": "85%", **QUICK})

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        run(x).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    def is_interrupted_at(line: int) -> bool:
        left = [line]

        def trace(frame: Any, event: str, _: object) -> Any:
            if not frame.f_globals.get("__name__", "").startswith("checkmate.torch.steps."):
                return None
            left[0] -= event == "line"
            if not left[0]:
                sys.settrace(None)
                raise error
            return trace

        sys.settrace(trace)
        try:
            gradients()
        except error:
            return True
        finally:
            sys.settrace(None)
            # A tracing function raises where no signal is answered: before `__exit__`, so that a lock may be left to this thread.
            while coordinators._LOCK._is_owned():
                coordinators._LOCK.release()
        return left[0] <= 0

    expected = [gradients() for _ in range(3)][-1]
    line = 1
    while is_interrupted_at(line):
        assert all(map(torch.equal, gradients(), expected))
        assert coordinator().state is StepState.BETWEEN
        line += stride
    for _ in range(2):
        gradients()
    peak, plan = live_bytes() + measure_peak(gradients), coordinator().step
    assert line > 300 and plan is not None
    assert peak <= plan.result.budget_bytes  # an interrupted step was seen to hold its outputs, which has room in the plan
