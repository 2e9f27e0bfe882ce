"""The memory of a compiled step, counted in its code before any kernel is built."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from checkmate.torch.inductor.account import Heap
from tests.torch.inductor.conftest import inductor_settings
from tests.torch.networks import NETWORKS, input_of
from tests.torch.steps import compiled

ALLOCATE_INSIDE = ("cnn", "unet", "convolutions")
"""Networks with convolutions: oneDNN's kernels allocate what no line of the code says."""


@pytest.fixture(autouse=True)
def _generates_code() -> Iterator[None]:
    """Inductor counts nothing that is in its cache."""
    with inductor_settings(fx_graph_cache=False):
        yield


@pytest.mark.parametrize("name", [n if n == "dropout" else pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS])
def test_the_count_is_what_is_measured(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """For a plan that keeps everything, and for one that does not."""
    torch.manual_seed(0)
    model, x = NETWORKS[name](), input_of(name, 512)
    for budget in ("1GiB", "85%"):
        torch._dynamo.reset()
        caplog.clear()
        with caplog.at_level(logging.INFO, "checkmate.torch"):
            run, _ = compiled(lambda: model(x).square().mean(), budget=budget, compiler="inductor", time_limit_s=3)
            run().backward()
        figures = [re.search(r"forward_peak_bytes=.*", m) for m in caplog.messages if m.startswith("counted in the generated")]
        assert "counted in its code" in caplog.text
        for figure in filter(None, figures):  # only differences are logged
            counted, measured = (int(found) for found in re.findall(r"backward_peak_bytes=(\d+)", figure[0]))
            assert abs(counted - measured) <= (measured // 20 if name in ALLOCATE_INSIDE else 0)


def test_a_tied_weight_is_not_held_for_the_embedding() -> None:
    """The product of a tied weight's gradient and its sum with that of the embedding are two kernels."""
    from torch._inductor.utils import run_and_get_code

    embedding, head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
    head.weight = embedding.weight
    ids = torch.arange(64)
    run, _ = compiled(lambda: head(embedding(ids)).square().mean(), budget="1GiB", compiler="inductor", time_limit_s=3)
    _, codes = run_and_get_code(lambda: run().backward())
    assert any("extern_kernels.mm(" in code for code in codes)
    assert not any("extern_kernels.addmm(" in code for code in codes)


def test_a_storage_of_a_tuple_lives_as_long_as_the_tuple() -> None:
    """Also where nothing reads one of its tensors."""
    heap = Heap()
    parts = heap.new(100, 10)
    heap.bind("tuple", parts)
    heap.bind("first", parts[:1])
    heap.free("tuple")
    assert heap.live_bytes == 100
    heap.free("first")
    heap.free("first")
    assert (heap.live_bytes, heap.peak_bytes) == (0, 110)
    heap.bind("again", heap.new(5))
    heap.keep_only(())
    assert heap.live_bytes == 0
