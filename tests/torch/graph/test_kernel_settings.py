"""Costs and verdicts that are kept hold where the same kernels run."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from checkmate.cost.store import CostStore
from checkmate.torch.chunking.bits import verdict_key
from checkmate.torch.graph.kernel_settings import kernel_settings
from checkmate.torch.measure.profiler import Profiler, signature

CPU = torch.device("cpu")
ONEDNN: Any = torch.backends.mkldnn


def convolution(memory_format: torch.memory_format = torch.contiguous_format) -> fx.Node:
    """A convolution of eight channels."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    x.meta["val"] = torch.randn(2, 8, 32, 32).to(memory_format=memory_format)
    weight.meta["val"] = torch.randn(8, 8, 5, 5).to(memory_format=memory_format)
    arguments = (x, weight, None, [1, 1], [2, 2], [1, 1], False, [0, 0], 1)
    node = graph.call_function(torch.ops.aten.convolution.default, arguments)
    node.meta["val"] = torch.ops.aten.convolution.default(x.meta["val"], weight.meta["val"], *arguments[2:])
    return node


@contextmanager
def onednn_off() -> Generator[None]:
    """A context in which convolutions run without oneDNN; its own one warns where no GPU of Intel is."""
    ONEDNN.set_flags(_enabled=False, _fp32_precision=None)
    try:
        yield
    finally:
        ONEDNN.set_flags(_enabled=True, _fp32_precision=None)


@contextmanager
def variable(name: str, value: str) -> Generator[None]:
    os.environ[name] = value
    yield
    del os.environ[name]


@contextmanager
def set_by(setter: Callable[[Any], object], now: Any, then: Any) -> Generator[None]:
    setter(now)
    yield
    setter(then)


CHANGES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "without oneDNN": onednn_off,
    "an older instruction set": lambda: variable("ONEDNN_MAX_CPU_ISA", "SSE41"),
    "another library of products": lambda: variable("MKL_ENABLE_INSTRUCTIONS", "SSE4_2"),
    "another number of threads": lambda: set_by(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
    "deterministic": lambda: set_by(torch.use_deterministic_algorithms, True, False),
    "without flash attention": lambda: set_by(torch.backends.cuda.enable_flash_sdp, False, True),
    "another precision": lambda: set_by(torch.set_float32_matmul_precision, "medium", torch.get_float32_matmul_precision()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_chooses_a_kernel_is_in_every_key(change: str) -> None:
    """A cost, or a verdict on bits, of another kernel says nothing about the one that runs."""
    node = convolution()
    cost, verdict = signature(node), verdict_key("program", CPU)
    with CHANGES[change]():
        assert signature(node) != cost
        assert verdict_key("program", CPU) != verdict
    assert (signature(node), verdict_key("program", CPU)) == (cost, verdict)


def test_the_memory_format_is_in_the_key() -> None:
    """Channels last, a convolution runs by another kernel."""
    assert signature(convolution(torch.channels_last)) != signature(convolution())


def test_a_store_of_other_settings_gives_no_workspace_of_theirs(tmp_path: Path) -> None:
    """Machines share a home folder, and programs with other settings a cache: without oneDNN it is a hundredfold."""
    node, store = convolution(), CostStore(tmp_path / "costs.sqlite")
    (fast,) = Profiler(store)([node])
    with onednn_off():
        (plain,) = Profiler(store)([node])
        (alone,) = Profiler(CostStore(tmp_path / "others.sqlite"))([node])
    assert plain.workspace_bytes == alone.workspace_bytes > 10 * fast.workspace_bytes


def test_a_profiler_sees_settings_that_change_after_it_was_made(tmp_path: Path) -> None:
    """The second step is planned by the profiler of the first, perhaps within a context of other settings."""
    node, costs = convolution(), Profiler(CostStore(tmp_path / "costs.sqlite"))
    (fast,) = costs([node])
    with onednn_off():
        (plain,) = costs([node])
    assert plain.workspace_bytes > 10 * fast.workspace_bytes


@pytest.mark.parametrize("name", ["ONEDNN_VERBOSE", "DNNL_VERBOSE", "CUDNN_LOGINFO_DBG"])
def test_what_libraries_print_is_in_no_key(name: str) -> None:
    """Asking a library to tell what it does is no reason to measure again."""
    before = kernel_settings(CPU)
    with variable(name, "1"):
        assert kernel_settings(CPU) == before


def test_a_precision_that_was_set_by_name_can_be_read() -> None:
    """PyTorch raises an error where the older switches are read after the newer ones were set: in some orders."""
    before = kernel_settings(CPU)
    with torch.backends.flags(fp32_precision="tf32"):
        assert kernel_settings(CPU) != before
        assert "tf32" in verdict_key("program", CPU)
    assert kernel_settings(CPU) == before
