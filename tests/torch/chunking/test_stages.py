"""What the stages of a region are given, compute and return: as little memory as the ops need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("expecttest", reason="PyTorch's own tests need it: pip install expecttest")
from checkmate.core.errors import InfeasibleBudgetError
from checkmate.torch.chunking.buffers import out_variant
from checkmate.torch.chunking.choose import _refusal
from checkmate.torch.chunking.regions import Region, closed
from checkmate.torch.chunking.stages import stages_of, with_private_operands
from checkmate.torch.graph.traced import own_bytes
from tests.torch.chunking.random_regions import Step, outcome_of
from tests.torch.chunking.test_random_regions import parameter, region_at, step_of

aten = torch.ops.aten


def merged(low: torch.Tensor, skip: torch.Tensor, up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A level of a U-Net: what comes from below beside what skips it, both of which the levels around compute with."""
    both = torch.cat([F.conv_transpose2d(low.sin(), up, stride=2), skip.sin()], 1)
    return F.conv2d(both, weight, padding=1).square().sum()


MERGED = (parameter(4, 16, 8, 8), parameter(4, 8, 16, 16), parameter(16, 8, 2, 2), parameter(8, 16, 3, 3))


def region_of(step: Step, **options: Any) -> Region:
    """The region around what is concatenated, without the derivatives of the sines before it."""
    return region_at(
        step, aten.cat.default, (0,), 4, least_share=0.4, allows=lambda op: op.target is not aten.mul.Tensor, **options
    )


def test_gradients_of_input_and_weight_are_apart() -> None:
    """Together they would hold what the one reads while the other makes its result: U-Net's floor is 6 MiB lower."""
    step = step_of(merged, *MERGED)
    stages = stages_of(region_of(step), step.joint.graph)
    backward = [stage for stage in stages if stage.wave == stages[-1].wave]
    assert len({stage.wave for stage in stages}) == 2
    (of_weight,) = [stage for stage in backward if any(own_bytes(value) == 8 * 16 * 9 * 4 for value in stage.results)]
    (of_input,) = [stage for stage in backward if stage.copies]
    assert of_weight is not of_input
    # The gradient of the input needs the shape of the concatenated tensor alone, and so nothing of which that is made.
    assert aten.cat.default in {op.target for op in of_weight.all_ops}
    assert aten.cat.default not in {op.target for op in of_input.all_ops}


def test_slices_are_returned_without_what_they_are_slices_of() -> None:
    """The gradient of a concatenated tensor never exists whole: what its ends are read for outside are copies of them."""
    step = step_of(merged, *MERGED)
    region = region_of(step)
    whole = max(own_bytes(op) for op in region.rules if op.target is aten.cat.default)
    stages = stages_of(region, step.joint.graph)
    assert all(own_bytes(value) < whole for stage in stages for value in stage.results)
    assert [value.target for stage in stages for value in stage.copies] == [aten.slice.Tensor]
    assert outcome_of(step, [region], 0).wrong == ()
    # A copy has other strides than the slice, by which a kernel may sum in another order.
    exact = region_of(step, exact=True)
    assert not any(stage.copies for stage in stages_of(exact, step.joint.graph))


def projected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Attention with one product for queries, keys and values, as GPT-2 has it."""
    q, k, v = (x @ weight).split(32, 2)
    heads = [t.view(8, 16, 4, 8).transpose(1, 2) for t in (q, k, v)]
    return F.scaled_dot_product_attention(*heads).square().sum()


def test_what_is_concatenated_belongs_together() -> None:
    """The gradients of queries, keys and values are each a third of what the product before attention reads."""
    step = step_of(projected, parameter(8, 16, 32), parameter(32, 96))
    seed = next(n for n in step.joint.graph.nodes if n.target is aten.mm.default)
    region = region_at(step, aten.mm.default, (0,), 4)
    joined = [op for op in region.rules if op.target is aten.cat.default]
    assert own_bytes(seed) == own_bytes(*joined)
    products = [op for op in region.rules if op.target is aten.mm.default]
    assert len(products) == 3, "forward, and the gradients of input and weight"
    assert outcome_of(step, [region], 0).wrong == ()


def decomposed(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss of a language model as Inductor decomposes it, with the mask of what is picked."""
    logits = x @ weight
    logits = logits - logits.detach().amax(1, keepdim=True)
    log_p = logits - logits.exp().sum(1, keepdim=True).log()
    return (log_p * (torch.arange(256).expand(64, 256) == target)).sum()


def test_small_ops_between_large_ones_belong_to_a_region() -> None:
    """Without the logarithm the logits would be made once for the sum before it, and again for the difference after it."""
    step = step_of(decomposed, parameter(64, 8), parameter(8, 256), torch.arange(64).view(64, 1))
    graph = step.joint.graph
    (log,) = (n for n in graph.nodes if n.target is aten.log.default)
    small = region_at(step, aten.mm.default, (0,), 4)
    region = closed(small, lambda op: True)
    assert log not in small.rules and log in region.rules
    waves = [len({stage.wave for stage in stages_of(each, graph)}) for each in (small, region)]
    assert waves[1] < waves[0]
    assert log not in closed(small, lambda op: op is not log).rules
    assert outcome_of(step, [region], 0).wrong == ()


def test_a_mask_of_an_expanded_tensor_is_made_in_pieces() -> None:
    """The numbers of the words are as many as the logits, and take the memory of one row."""
    step = step_of(decomposed, parameter(64, 8), parameter(8, 256), torch.arange(64).view(64, 1))
    graph = step.joint.graph
    (mask,) = (n for n in graph.nodes if n.target is aten.eq.Tensor)
    region = closed(region_at(step, aten.mm.default, (0,), 4, allows=lambda op: op is not mask), lambda op: op is not mask)
    wider = with_private_operands(region, stages_of(region, graph), graph, lambda op: True)
    assert mask not in region.rules and mask in wider.rules
    assert outcome_of(step, [wider], 0).wrong == ()


def test_a_mask_is_made_in_pieces() -> None:
    """What is made of it elementwise is larger, and each stage makes its pieces instead of keeping it whole."""

    def function(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (torch.where(mask, 1.0, 0.5) * torch.tanh(x @ y)).square().sum()

    mask = torch.arange(64).view(64, 1) % 2 == torch.zeros(1, 128)
    step = step_of(function, parameter(64, 32), parameter(32, 256), mask.repeat(1, 2).contiguous())
    graph = step.joint.graph
    (where,) = (n for n in graph.nodes if n.target is aten.where.self)
    region = region_at(step, aten.mm.default, (0,), 4, allows=lambda op: op is not where)
    wider = with_private_operands(region, stages_of(region, graph), graph, lambda op: True)
    assert where in wider.rules
    assert all(where is not value for stage in stages_of(wider, graph) for value, _ in stage.operands)
    assert outcome_of(step, [wider], 0).wrong == ()


def test_products_with_numbers_are_written_into_buffers() -> None:
    """A backward with ``pow`` has them; torch generates their ``out`` variants, which compute a new tensor and copy it."""
    x, into = torch.randn(1003, generator=torch.Generator().manual_seed(0)), torch.empty(1003)
    for op in (aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar):
        found = out_variant(op)
        assert found is not None
        overload, name = found
        overload(x, 0.7, **{name: into})
        assert torch.equal(into, op(x, 0.7))


def test_a_refusal_holds_for_all_sets_of_regions() -> None:
    error = InfeasibleBudgetError("too small", hint="raise it", budget_bytes=10, floor_bytes=30, smallest_bytes=40)
    assert _refusal(error, [50, 30]) is error
    other = _refusal(error, [50, 20])
    assert (other.floor_bytes, other.smallest_bytes, other.budget_bytes) == (20, 40, 10)
    assert "20 B" in str(other)
