"""Verdicts on bits: reached once for a program, kept for other processes, and not reached where memory is short."""

from __future__ import annotations

from functools import partial

import torch
from torch.utils import _pytree as pytree

from checkmate.frontend import progress
from checkmate.torch import measure_peak
from checkmate.torch.chunking import bits
from checkmate.torch.chunking.program import ChunkOp, chunk_ops_of
from checkmate.torch.measure.resident import within_room
from tests.torch.chunking.random_regions import region_at, step_of

aten = torch.ops.aten
CPU = torch.device("cpu")


def chunk_op(rows: int = 64) -> ChunkOp:
    """A sigmoid in four pieces."""
    step = step_of(lambda x: x.sigmoid().square().sum(), torch.randn(rows, 64, requires_grad=True))
    return chunk_ops_of(region_at(step, aten.sigmoid.default, (0,), 4, exact=True), step.joint.graph)[0]


def test_a_verdict_is_kept_for_other_processes() -> None:
    """What one process has compared, another one does not compare again."""
    op = chunk_op()
    assert bits.keeps_bits(op)
    bits._KNOWN.clear()  # as in another process
    texts: list[str] = []
    with progress.redirected(texts.append):
        assert bits.keeps_bits(op)
    assert not texts  # a comparison is shown


def test_without_memory_there_is_no_verdict() -> None:
    """A region that cannot be compared now is left whole, and is compared once a budget leaves the memory."""
    op = chunk_op(68)
    with within_room(1000):
        assert not bits.keeps_bits(op)
    assert bits.known_verdict(bits.verdict_key(op.program.key, CPU)) is None
    assert bits.keeps_bits(op)
    assert bits.known_verdict(bits.verdict_key(op.program.key, CPU)) is True


def test_a_comparison_takes_the_memory_that_it_says() -> None:
    """Whole tensors are freed when no later op reads them: arrays are as large as memory allows."""

    def loss(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logs = torch.log_softmax(torch.tanh(30 * (x @ weight)), 1)
        return logs.exp().gather(1, y.unsqueeze(1)).sum()

    given = torch.randn(256, 32, requires_grad=True), torch.randn(32, 2048, requires_grad=True), torch.randint(2048, (256,))
    step = step_of(loss, *given)
    region = region_at(step, aten._log_softmax.default, (0,), 8, exact=True)
    logits = 4 * 256 * 2048
    for each in chunk_ops_of(region, step.joint.graph):
        bits.compared(each.stage)
        peak, needed = measure_peak(partial(bits.compared, each.stage)), bits.needed_bytes(each.stage)
        assert peak <= needed + logits / 4  # pieces as they are compared, and small temporaries
        assert needed <= peak + logits


def test_pieces_across_rows_take_the_memory_that_is_said() -> None:
    """A piece of some columns is copied where ops of the same piece make it dense; its result has the strides of the whole."""

    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.relu(x @ weight)).sum()

    step = step_of(loss, torch.randn(1024, 8, requires_grad=True), torch.randn(8, 512, requires_grad=True))
    region = region_at(step, aten.relu.default, (1,), 4, exact=True)
    found = [op.stage for op in chunk_ops_of(region, step.joint.graph)]
    (stage,) = [stage for stage in found if any(op.target is aten.relu.default for op in stage.new_ops)]
    bits.compared(stage)
    assert measure_peak(partial(bits.compared, stage)) <= bits.needed_bytes(stage)


def test_the_search_for_numbers_takes_little_memory() -> None:
    """It runs beside a step whose budget may leave nothing."""
    structure = pytree.tree_flatten(((torch.float64, torch.float64), {}))[1]
    assert measure_peak(partial(bits.witness, aten.add.Tensor, (torch.float64, torch.float64), structure)) < 1 << 20
