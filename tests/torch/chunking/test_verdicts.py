"""Verdicts on bits: reached once for a program, kept for other processes, and not reached where memory is short."""

from __future__ import annotations

import pytest
import torch

from checkmate.torch.chunking.bits import comparison
from checkmate.torch.chunking.bits.verdicts import known_verdict, verdict_key
from checkmate.torch.chunking.program import Part, parts_of
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
    """A region that cannot be compared now is left whole, and may be compared by a process that has the memory."""
    made = part()
    monkeypatch.setattr(comparison, "_KNOWN", {})
    monkeypatch.setattr(comparison, "known_verdict", lambda key: None)
    monkeypatch.setattr(comparison, "keep_verdict", lambda key, same: pytest.fail("it was kept"))
    monkeypatch.setattr(comparison, "free_bytes", lambda device: 1000)
    assert not comparison.keeps_bits(made)
