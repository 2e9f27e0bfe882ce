"""Random regions of random networks: what runs in pieces gives what runs whole, to the bit where that is promised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("expecttest", reason="PyTorch's own tests need it: pip install expecttest")
from checkmate.torch.chunking.bits import compared, keeps_bits
from checkmate.torch.chunking.program import NotChunkable, chunk_ops_of
from checkmate.torch.chunking.regions import Region, grow
from checkmate.torch.chunking.replace import with_regions
from checkmate.torch.chunking.rules import lookup
from checkmate.torch.chunking.rules.placements import SUM, WHOLE, Rule, Split
from checkmate.torch.chunking.unit_tangent import unit_tangent_of
from tests.torch.chunking.random_regions import (
    DATABASE,
    Run,
    main,
    outcome_of,
    region_at,
    step_of,
    step_of_database,
    step_of_seed,
)

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore:(std|var).*degrees of freedom")  # of one number, in the network itself


@pytest.mark.parametrize("seed", [pytest.param(s, marks=pytest.mark.slow) if s > 2 else s for s in range(12)])
def test_regions_of_random_networks_compute_the_step(seed: int) -> None:
    """Rules are right one by one; here they meet each other, random layouts, uneven pieces and several regions at once.

    Seeds, since the examples of Hypothesis depend on what else is imported in the process.
    """
    lines: list[str] = []
    main([step_of_seed(seed)], lines.append)
    assert len(lines) == 1, "".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1440, 40))
def test_two_thousand_regions_compute_the_step(first: int) -> None:
    """The same for networks by number, so that each can be run again."""
    lines: list[str] = []
    main(map(step_of_seed, range(first, first + 40)), lines.append)
    assert len(lines) == 1, "".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(DATABASE), 50))
def test_regions_with_ops_of_the_database_compute_the_step(first: int) -> None:
    """Ops that no network above has."""
    lines: list[str] = []
    main(map(step_of_database, range(first, min(first + 50, len(DATABASE)))), lines.append)
    assert len(lines) == 1, "".join(lines)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype).requires_grad_()


def test_a_tail_that_is_computed_one_by_one_is_not_exact() -> None:
    """The vector and the scalar function of a sigmoid differ for one number in thousands: random data seldom shows it."""
    step = step_of(lambda x: x.sigmoid().square().sum(), parameter(64, 64))
    graph = step.joint.graph
    by_rows = chunk_ops_of(region_at(step, aten.sigmoid.default, (0,), 4, exact=True), graph)
    assert all(map(keeps_bits, by_rows))
    by_columns = chunk_ops_of(region_at(step, aten.sigmoid.default, (1,), 32, exact=True), graph)
    assert not all(map(keeps_bits, by_columns))


def test_a_clamp_hides_no_difference() -> None:
    """On random data all products may be outside the range that a clamp leaves, and real ones inside."""
    x, y = parameter(3, 512), parameter(512, 64)
    step = step_of(lambda x, y: F.relu6(1e6 * (x @ y)).sum(), x, y)
    stage = chunk_ops_of(region_at(step, aten.mm.default, (0,), 3, exact=True), step.joint.graph)[0]
    # Whether this device has another kernel for a product of one row.
    assert keeps_bits(stage) == torch.equal(x[:1] @ y, (x @ y)[:1])


def test_expanded_operands_can_be_tested() -> None:
    """Elements of an expanded tensor share memory, and PyTorch refuses to write to them."""
    step = step_of(lambda x, y: (x.expand(4, 3, 64) * y).sum(), parameter(1, 3, 64), parameter(4, 3, 64))
    region = region_at(step, aten.mul.Tensor, (0,), 2, exact=True, allows=lambda op: op.target is aten.mul.Tensor)
    assert all(map(keeps_bits, chunk_ops_of(region, step.joint.graph)))


def test_indices_that_are_computed_from_random_numbers_are_no_error() -> None:
    """They are out of range, so that such a region cannot be tested, and is not exact."""
    x = torch.rand(64)
    step = step_of(lambda x, table: (table[(x * 3).long()] * 2).sum(), x, parameter(3, 16))
    region = region_at(step, aten.index.Tensor, (0,), 2, least_share=0.01, exact=True)
    assert any(n.target is aten._to_copy.default for n in region.rules)
    assert not all(map(keeps_bits, chunk_ops_of(region, step.joint.graph)))


def test_zeros_have_a_sign() -> None:
    """Zero and minus zero are other bits: kernels for one row and for several differ in them, where this device has both."""
    x, y = torch.tensor([[0.0], [-0.0]] * 5), torch.tensor([[1.0, -1.0, 2.0, -2.0, 0.5]])
    step = step_of(lambda x, y: (x @ y * 2).sum(), x.requires_grad_(), y.requires_grad_())
    region = region_at(step, aten.mm.default, (0,), 10, exact=True, allows=lambda op: op.target is aten.mm.default)
    assert outcome_of(step, [region], 0).wrong == ()


def test_equal_rows_are_no_test_of_a_sum() -> None:
    """With one index for all, a sum over rows has the same bits in any order."""
    ids = torch.tensor([[3, 1, 2, 0, 2, 1]])
    step = step_of(lambda ids, table: F.embedding(ids, table).logsumexp(1).square().sum(), ids, parameter(4, 4))
    region = region_at(step, aten.embedding.default, (2,), 4, least_share=0.01)
    assert outcome_of(step, [region], 0).wrong == ()


def test_views_that_an_op_reads_whole_are_refused() -> None:
    """A tensor of its own in place of a view would be counted as the one that it is a view of."""
    step = step_of(lambda x: (x.exp().t().contiguous() @ x.exp()).sum(), parameter(64, 64))
    graph = step.joint.graph
    exp = next(n for n in graph.nodes if n.target is aten.exp.default)
    transposed = next(n for n in exp.users if n.target is aten.t.default)
    reader = next(iter(transposed.users))
    rows, columns = Split((0,)), Split((1,))
    rules = {exp: Rule((rows,), (rows,)), transposed: Rule((columns,), (rows,)), reader: Rule((WHOLE,), (WHOLE,))}
    region = Region(exp, 2, rules, {exp: rows, transposed: columns, exp.all_input_nodes[0]: rows}, 1)
    with pytest.raises(NotChunkable, match="is a view"):
        chunk_ops_of(region, graph)


def test_a_gradient_ahead_is_scaled_once() -> None:
    """A second stage ahead of the backward would read what the first returned, which is scaled by then."""
    step = step_of(lambda x: (x * 2 - (x * 2).logsumexp(1, keepdim=True)).tanh().sum(), parameter(8, 64))
    graph = step.joint.graph
    region = region_at(step, aten.mul.Tensor, (1,), 2)
    ahead = unit_tangent_of(region, graph)
    assert ahead is not None
    with pytest.raises(NotChunkable, match="scale again"):
        chunk_ops_of(region, graph, ahead)


def test_sums_of_half_precision_are_as_good_as_whole_ones() -> None:
    """Adding up terms in bfloat16 would lose what one kernel, which sums in single precision, keeps."""
    x, weight = parameter(512, 16, dtype=torch.bfloat16), parameter(8, 16, dtype=torch.bfloat16)
    step = step_of(lambda x, w: F.linear(x, w).float().square().mean(), x, weight)
    seed = next(n for n in step.joint.graph.nodes if n.target is aten.mm.default)
    region = grow(seed, Split((0,)), 256)
    assert region is not None and region.sums
    assert outcome_of(step, [region], 0).wrong == ()


def test_gradients_between_a_region_and_its_tangent_are_not_ahead() -> None:
    """What is between would wait for the region and the region for it."""
    step = step_of(lambda x: (x * 2).logsumexp(0).tanh().sum(), parameter(64, 4))
    backward = aten.tanh_backward.default
    region = region_at(step, aten.mul.Tensor, (1,), 2, least_share=0.01, allows=lambda op: op.target is not backward)
    assert any(n.target is aten.tanh.default for n in region.rules)
    assert unit_tangent_of(region, step.joint.graph) is None


def test_a_mask_of_one_element_does_not_hide_a_difference() -> None:
    """Where it is set, everything after it is constant: in one of four random comparisons both data sets had it so."""
    _, step, _ = step_of_seed(1437)
    assert step is not None
    seed = next(
        n for n in step.joint.graph.nodes if n.target is aten.sum.dim_IntList and n.meta["val"].shape == (3, 6, 1, 16, 16)
    )
    region = grow(seed, Split((1,)), 2)
    assert region is not None and any(n.target is aten.masked_fill.Scalar for n in region.rules)
    (part,) = chunk_ops_of(region, step.joint.graph)
    for number in range(12):
        torch.manual_seed(number)
        assert compared(part.stage) is False


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name", "count", "exact"), [(5119, "convolution_1", 4, True), (1068, "_to_copy_1", 3, False)])
def test_half_precision_does_not_hide_another_order(number: int, name: str, count: int, exact: bool) -> None:
    """A product whose sums are made in another order gives the same bfloat16 for nearly all numbers."""
    _, step, _ = step_of_seed(number)
    assert step is not None
    seed = next(n for n in step.joint.graph.nodes if n.name == name)
    region = grow(seed, Split((1,)), count, exact=exact)
    assert region is not None
    parts = chunk_ops_of(region, step.joint.graph)

    def verdict(seed: int) -> bool:
        torch.manual_seed(seed)
        return all(not any(op.program.sums) and bool(compared(op.stage)) for op in parts)

    same = all(map(verdict, range(92, 100)))  # there are processors whose kernels add in the same order
    assert [verdict(seed) for seed in range(4)] == [same] * 4


def test_regions_that_wait_for_each_other_are_refused() -> None:
    """Each of two regions computes with what the other makes: neither can run first."""

    def crossing(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = x.exp(), y.cos()
        return (torch.hypot(a, b) * 2).sum() + (torch.maximum(a, b) * 2).sum()

    step = step_of(crossing, parameter(8, 4), parameter(8, 4))
    graph = step.joint.graph
    one, other = ({aten.exp.default, aten.hypot.default}, {aten.cos.default, aten.maximum.default})
    regions = []
    for ops in (one, other):
        seed = next(n for n in graph.nodes if n.target in ops)
        chosen = {n for n in graph.nodes if n.target in ops}
        region = grow(seed, Split((0,)), 2, allows=chosen.__contains__)
        assert region is not None
        rules = {n: next(r for r in lookup.rules_of(n) if r.outputs == (Split((0,)),)) for n in chosen}
        splits = {v: Split((0,)) for n in chosen for v in (n, *n.all_input_nodes)}
        regions.append(Region(seed, 2, rules, splits, 1))
    parts = [part for region in regions for part in chunk_ops_of(region, graph)]
    with pytest.raises(NotChunkable, match="wait for each other"):
        with_regions(step.joint, parts)


RANDOM = {
    "dropout": lambda x, y: F.dropout(x, 0.3),
    "normal": lambda x, y: torch.normal(x, y.exp()) * x,
    "normal of one deviation": lambda x, y: torch.normal(x, 2.0) * x,
    "rrelu": lambda x, y: F.rrelu(x, training=True),
}


@pytest.mark.parametrize("name", RANDOM)
def test_a_run_with_the_draws_of_another_is_one_of_the_same_seed(name: str) -> None:
    """Results of random ops depend on their inputs: kept with the draws, they had the roundings before them in the exact step."""
    step = step_of(lambda x, y: RANDOM[name](x * 3, y).tanh().sum(), parameter(16, 16), parameter(16, 16))
    first = Run(step.joint, 7)
    first(step.inputs)
    others = [2 * value for value in step.inputs]  # of the same signs, on which the number of draws depends
    for dtype in (None, torch.float64):
        typed = [value.to(dtype or value.dtype) for value in others]
        for value, expected in zip(Run(step.joint, 0, first.drawn, dtype)(typed), Run(step.joint, 7)(others), strict=True):
            torch.testing.assert_close(value.float(), expected)


def test_a_sum_before_a_dropout_is_as_good_as_the_whole_one() -> None:
    """It was said to be wrong for some masks, as long as the exact step read what the whole one had returned of the dropout."""
    _, step, _ = step_of_seed(7134)
    assert step is not None
    seed = next(n for n in step.joint.graph.nodes if n.name == "div_1")
    region = grow(seed, Split((0,)), 3)
    assert region is not None and region.sums
    for state in range(60, 70):
        assert outcome_of(step, [region], state).wrong == ()


BROKEN = [
    (aten._softmax.default, lambda: Rule((Split((1,)),), (Split((1,)),)), lambda x: (x.softmax(-1) * 3).exp().sum()),
    (
        aten.amax.default,
        lambda: Rule((SUM,), (Split((1,)),)),
        lambda x: (x.exp() * 2 - (x.exp() * 2).amax(1, keepdim=True)).exp().sum(),
    ),
    (aten.cumsum.default, lambda: Rule((Split((1,)),), (Split((1,)),)), lambda x: (x.cumsum(1) * 0.1).exp().sum()),
]


@pytest.mark.parametrize(("op", "rule", "function"), BROKEN, ids=[str(op) for op, _, _ in BROKEN])
def test_a_rule_that_is_broken_on_purpose_is_found(
    op: Any, rule: Callable[[], Rule], function: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison of these tests, with a rule that does not hold: it must not pass whatever it is given."""
    step = step_of(function, parameter(6, 8))
    real = lookup.rules_of
    import checkmate.torch.chunking.regions as regions

    monkeypatch.setattr(regions, "rules_of", lambda node: (rule(),) if node.target is op else real(node))
    node = next(n for n in step.joint.graph.nodes if n.target is op)
    seed = node.args[0] if rule().outputs == (SUM,) else node
    region = grow(seed, Split((1,)), 4)
    assert region is not None and node in region.rules
    assert outcome_of(step, [region], 0).wrong
