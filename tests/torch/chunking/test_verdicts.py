"""Verdicts on bits: reached once for a program, kept for other processes, and not reached where memory is short."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils import _pytree as pytree

from checkmate.torch import measure_peak
from checkmate.torch.chunking.bits import comparison, kernel_paths
from checkmate.torch.chunking.bits.verdicts import known_verdict, verdict_key
from checkmate.torch.chunking.program import Part, parts_of
from checkmate.torch.measure.resident import within_room
from tests.torch.chunking.random_regions import region_at, step_of

aten = torch.ops.aten
CPU = torch.device("cpu")


def part() -> Part:
    """A sigmoid in four pieces."""
    step = step_of(lambda x: x.sigmoid().square().sum(), torch.randn(64, 64, requires_grad=True))
    return parts_of(region_at(step, aten.sigmoid.default, (0,), 4, exact=True), step.joint.graph)[0]


def test_a_verdict_is_kept_for_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one process has compared, another one does not compare again."""
    made = part()
    monkeypatch.setattr(comparison, "_KNOWN", {})
    assert comparison.keeps_bits(made)
    assert known_verdict(verdict_key(made.program.key, CPU)) is True

    monkeypatch.setattr(comparison, "_KNOWN", {})  # as in another process
    monkeypatch.setattr(comparison, "_compared", lambda stage: pytest.fail("it was compared again"))
    assert comparison.keeps_bits(made)


def test_other_settings_are_compared_for_themselves() -> None:
    """Kernels depend on the number of threads and on the precision of products."""
    before = verdict_key("program", CPU)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert verdict_key("program", CPU) != before
    finally:
        torch.set_num_threads(threads)
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert verdict_key("program", CPU) != before
    finally:
        torch.set_float32_matmul_precision(precision)
    assert verdict_key("program", CPU) == before


def test_without_memory_there_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region that cannot be compared now is left whole, and is compared once a budget leaves the memory."""
    made = part()
    monkeypatch.setattr(comparison, "_KNOWN", {})
    monkeypatch.setattr(comparison, "known_verdict", lambda key: None)
    kept = dict[str, bool]()
    monkeypatch.setattr(comparison, "keep_verdict", kept.__setitem__)
    with within_room(1000):
        assert not comparison.keeps_bits(made)
    assert not kept
    assert comparison.keeps_bits(made)
    assert [*kept.values()] == [True]


def test_a_comparison_takes_the_memory_that_it_says() -> None:
    """Whole tensors are freed when no later op reads them: arrays are as large as memory allows."""

    def loss(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logs = torch.log_softmax(torch.tanh(30 * (x @ weight)), 1)
        return logs.exp().gather(1, y.unsqueeze(1)).sum()

    given = torch.randn(256, 32, requires_grad=True), torch.randn(32, 2048, requires_grad=True), torch.randint(2048, (256,))
    step = step_of(loss, *given)
    region = region_at(step, aten._log_softmax.default, (0,), 8, exact=True)
    logits = 4 * 256 * 2048
    for each in parts_of(region, step.joint.graph):
        alone = comparison._alone(each.stage)
        data = comparison._data_sets(each.stage)[1]
        peak = measure_peak(partial(comparison._equal, each.stage, alone, *data))
        needed = comparison._needed_bytes(each.stage)
        assert len(alone) >= 4
        assert peak <= needed + logits / 4  # pieces as they are compared, and small temporaries
        assert needed <= peak + logits


def test_pieces_across_rows_take_the_memory_that_is_said() -> None:
    """A piece of some columns is copied where ops of the same piece make it dense; its result has the strides of the whole."""

    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.relu(x @ weight)).sum()

    step = step_of(loss, torch.randn(1024, 8, requires_grad=True), torch.randn(8, 512, requires_grad=True))
    region = region_at(step, aten.relu.default, (1,), 4, exact=True)
    stages = [
        each.stage for each in parts_of(region, step.joint.graph) if any(op.target is aten.relu.default for op in each.stage.own)
    ]
    assert len(stages) == 1
    alone, data = comparison._alone(stages[0]), comparison._data_sets(stages[0])[0]
    assert measure_peak(partial(comparison._equal, stages[0], alone, *data)) <= comparison._needed_bytes(stages[0])


def test_the_search_for_numbers_takes_little_memory() -> None:
    """It runs beside a step whose budget may leave nothing."""
    structure = pytree.tree_flatten(((torch.float64, torch.float64), {}))[1]
    search = partial(kernel_paths._witness.__wrapped__, aten.add.Tensor, (torch.float64, torch.float64), structure)
    assert measure_peak(search) < 1 << 20
