"""Regions in pieces under Inductor: what is written out computes what runs, and no bit depends on the budget."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import checkmate.torch
from checkmate.torch import Step, measure_peak
from checkmate.torch.chunking.program import CHUNKED, NotChunkable, chunk_ops_of
from checkmate.torch.chunking.replace import with_regions
from checkmate.torch.chunking.unit_tangent import unit_tangent_of
from checkmate.torch.inductor.pieces import write_out_pieces
from tests.torch.chunking.test_chunked_steps import TOKENS, VOCABULARY, Language, batch, plain

BUDGETS = (None, "100%", "80%")
BY_INDUCTOR = "compiled by Inductor"


def whole(model: nn.Module, **options: Any) -> tuple[Step, torch.optim.Optimizer]:
    torch._dynamo.reset()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    options = {"compiler": "inductor", "whole": True, "time_limit_s": 3, "chunking": "auto", **options}
    return checkmate.torch.compile(model, optimizer=optimizer, example=batch(), **options), optimizer


@pytest.mark.slow
def test_a_whole_step_has_the_same_bits_in_pieces_at_every_budget() -> None:
    """The head with its loss is one region, which computes nothing twice: it runs in pieces whatever the budget is."""
    expected = Language()
    optimizer = torch.optim.AdamW(expected.parameters(), 1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        expected(**batch()).backward()
        optimizer.step()
    found = []
    peaks = []
    for budget in BUDGETS:
        model = Language()
        step, _ = whole(model, budget=budget)
        inputs = batch()
        for _ in range(2):
            step(**inputs)
        found.append([p.detach().clone() for p in model.parameters()])
        peaks.append(measure_peak(lambda step=step, inputs=inputs: step(**inputs)[1]))
        if budget is not None:
            assert BY_INDUCTOR in step.result.remarks[-1] and step.result.budget_bytes is not None
            assert peaks[-1] <= step.result.budget_bytes - step.graph.resident_bytes
        assert any("pieces" in op.kind for op in step.graph.ops)
        assert any("in pieces: head" in remark for remark in step.result.remarks)
    for parameters in found:
        assert all(map(torch.equal, parameters, found[0]))
    for mine, theirs in zip(found[0], expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)  # an update divides by the root of a small number
    ops_whole, _ = whole(Language(), chunking="exact")
    inputs = batch()
    ops_whole(**inputs)
    assert peaks[0] < 0.7 * measure_peak(lambda: ops_whole(**inputs)[1])


@pytest.mark.parametrize("scale", [pytest.param(s, marks=pytest.mark.slow) for s in (1.0, 3.0)])
def test_gradients_are_computed_ahead_of_the_backward(scale: float) -> None:
    """Also of a loss that the caller scales."""
    model = Language()
    loss, gradients = plain(model)
    found = []
    for budget in BUDGETS:
        torch._dynamo.reset()
        options = {"compiler": "inductor", "chunking": "auto", "budget": budget, "time_limit_s": 3}
        compiled = torch.compile(model, backend="checkmate", options=options)
        model.zero_grad(set_to_none=True)
        mine = compiled(**batch())
        (scale * mine).backward()
        torch.testing.assert_close(mine.detach(), loss)
        found.append([mine.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        for parameter, expected in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, scale * expected, rtol=1e-4, atol=1e-6)
    for mine in found:
        assert all(map(torch.equal, mine, found[0]))


@pytest.mark.slow
def test_half_precision_is_summed_in_single_precision() -> None:
    model = Language()
    exact = [p.grad for p in stepped(Language(), autocast=None)]
    torch._dynamo.reset()
    options = {"compiler": "inductor", "chunking": "auto", "time_limit_s": 3, "autocast": torch.bfloat16}
    step = checkmate.torch.compile(model, example=batch(), budget="100%", **options)
    assert BY_INDUCTOR in step.result.remarks[-1]
    assert any("pieces" in op.kind for op in step.graph.ops)
    step(**batch())
    plain_gradients = [p.grad for p in stepped(Language(), autocast=torch.bfloat16)]
    for mine, theirs, right in zip(model.parameters(), plain_gradients, exact, strict=True):
        assert mine.grad is not None and theirs is not None and right is not None
        assert (mine.grad - right).norm() <= 1.5 * (theirs - right).norm() + 1e-6


def stepped(model: nn.Module, autocast: torch.dtype | None) -> list[nn.Parameter]:
    """The parameters after a plain step, with gradients."""
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        loss = model(**batch())
    loss.backward()
    return list(model.parameters())


def test_the_peak_of_a_step_in_pieces_is_predicted() -> None:
    """Fused pieces take less than ops that run as they are: one array for the logits of a piece, not two."""
    step, _ = whole(Language(), budget="80%")
    assert "(plan 1)" in step.result.remarks[-1]
    (head,) = [op for op in step.graph.ops if "pieces" in op.kind]
    logits = 4 * TOKENS * VOCABULARY // 4  # four pieces
    assert logits <= head.workspace_bytes < 1.5 * logits


@pytest.mark.slow
def test_the_gradient_of_logits_is_written_over_them() -> None:
    """Each piece has one array of the size of its logits."""
    _, codes = run_and_get_code(lambda: whole(Language()))
    assert len(re.findall(r"empty_strided_cpu\(\(64, 1024\)", "\n".join(codes))) == 4


def test_by_default_ops_run_whole() -> None:
    step, _ = whole(Language(), budget="80%", chunking="exact")
    assert not any("pieces" in op.kind for op in step.graph.ops)


@pytest.mark.slow
def test_a_budget_that_no_fused_step_keeps_is_kept_op_by_op_in_pieces() -> None:
    """Options of Inductor are not in the way of the other compiler."""
    torch._dynamo.reset()
    model = Language()
    options = {"compiler": "inductor", "chunking": "auto", "time_limit_s": 3, "inductor_options": {"epilogue_fusion": True}}
    step = checkmate.torch.compile(model, example=batch(), budget="30%", **options)
    assert any("in pieces" in remark for remark in step.result.remarks)
    assert not any(BY_INDUCTOR in remark for remark in step.result.remarks)
    inputs = batch()

    def run() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        return step(**inputs)[1]

    run()
    model.zero_grad(set_to_none=True)
    assert measure_peak(run) == step.result.peak_bytes - step.graph.resident_bytes


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 6))])
def test_what_is_written_out_computes_what_runs_in_pieces(seed: int) -> None:
    """Random regions of random networks, with uneven pieces, sums of several types and slices along two dimensions."""
    pytest.importorskip("expecttest", reason="PyTorch's own tests need it: pip install expecttest")
    from tests.torch.chunking.random_regions import Run, random_regions, step_of_seed

    _, step, rng = step_of_seed(seed)
    assert step is not None
    graph = step.joint.graph
    tried = 0
    for _ in range(8):
        regions = random_regions(random.Random(rng.random()), graph)
        try:
            tangents = [unit_tangent_of(r, graph) if i % 2 else None for i, r in enumerate(regions)]
            parts = [p for r, tangent in zip(regions, tangents, strict=True) for p in chunk_ops_of(r, graph, tangent)]
            pieces = with_regions(step.joint, parts)
        except NotChunkable:
            continue
        if not parts:
            continue
        tried += 1
        written = write_out_pieces(pieces)
        assert not any(node.target is CHUNKED for node in written.graph.nodes)
        runs = Run(written, 0), Run(pieces, 0)
        mine, theirs = (run(step.inputs) for run in runs)
        for a, b in zip(mine, theirs, strict=True):
            a, b = a.nan_to_num(7.0), b.nan_to_num(7.0)
            # Without instructions for bfloat16, PyTorch multiplies in blocks that depend on the layout.
            emulated = a.dtype is torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported()
            most = 1e-2 if emulated else 0.0
            assert torch.equal(a, b) or runs[1].other_layouts or (a - b).norm() <= most * b.norm()
    assert tried
