"""Training and capturing go on without the cache, and one warning names its path and the cure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from checkmate.cli import main
from checkmate.cost import store
from tests.cli.test_capture import MODEL
from tests.cost.test_store import damage

FAULTS = ("garbage", "truncated", "foreign", "other-columns", "a-file", "cannot-be-made", "no-home")


@pytest.fixture(params=FAULTS)
def place(request, inside, environ, fails):
    """The faulty path, or a word of the message where there is none."""
    store._warned.clear()
    folder = inside / "cache"
    environ["CHECKMATE_CACHE"] = "" if request.param == "no-home" else str(folder)
    if request.param == "no-home":
        environ.pop("XDG_CACHE_HOME", None)
        fails("pathlib.Path.home", RuntimeError("Could not determine home directory."))
        yield "no home folder"
    elif request.param == "a-file":
        folder.write_text("mine")
        yield str(folder)
    elif request.param == "cannot-be-made":
        environ["CHECKMATE_CACHE"] = "/proc/none/cache"
        yield "/proc/none/cache"
    else:
        damage(request.param, folder / "store.sqlite")
        yield str(folder / "store.sqlite")


def step(compiled: bool) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))
    run = torch.compile(model, backend="checkmate", options={"budget": "70%"}) if compiled else model
    loss = run(torch.randn(512, 64)).square().mean()
    loss.backward()
    return [loss, *(parameter.grad for parameter in model.parameters())]


def test_a_step_is_compiled_and_is_the_plain_step(place, caplog):
    """As without a cache that was ever written: planned, within its budget, to the bit."""
    ours, plain = step(compiled=True), step(compiled=False)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert [place in message for message in caplog.messages if "CHECKMATE_CACHE" in message] == [True]


def test_a_graph_is_captured(place, capsys, caplog):
    """Its costs are measured, and not estimated because nothing could be kept."""
    Path("model.py").write_text(MODEL)
    torch._dynamo.reset()
    assert main(["capture", "model.py:build", "--json"]) == 0
    captured = json.loads(capsys.readouterr().out)
    assert captured["cost"] > 0
    assert [place in message for message in caplog.messages if "CHECKMATE_CACHE" in message] == [True]
