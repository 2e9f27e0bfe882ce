"""Rules of single ops: what is computed in pieces is what is computed whole."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition

from checkmate.torch._compat.dispatch import FakeTensorMode
from checkmate.torch.chunking.rules.lookup import rules_of
from checkmate.torch.chunking.rules.placements import CARRY, SUM, WHOLE, Rule, Split
from tests.torch.chunking.op_calls import CALLS, ids, r
from tests.torch.chunking.whole_and_pieces import mismatches, node_of, run_in_pieces
from tests.torch.networks import Cnn, Unet

aten = torch.ops.aten


def rules_of_call(op: Any, *args: Any, **kwargs: Any) -> tuple[Rule, ...]:
    return rules_of(node_of(op, args, kwargs, op(*args, **kwargs)))


@pytest.mark.parametrize("call", CALLS, ids=[f"{i}-{call[0]}" for i, call in enumerate(CALLS)])
def test_pieces_by_every_rule_make_the_whole(call: tuple[Any, ...]) -> None:
    """The laws of a rule: cut outputs put together, and terms added up, are what the op returns."""
    op, args, kwargs = call if len(call) == 3 else (*call, {})
    found = rules_of_call(op, *args, **kwargs)
    assert found
    assert list(mismatches(op, args, kwargs, found)) == []


ROWS, COLUMNS = Split((0,)), Split((1,))
WRONG = [
    (aten._softmax.default, (r(6, 5), 1, False), Rule((COLUMNS,), (COLUMNS,))),
    (aten.amax.default, (r(6, 5), [0]), Rule((SUM,), (ROWS,))),
    (aten.mean.dim, (r(6, 5), [0]), Rule((SUM,), (ROWS,))),
    (aten.mm.default, (r(6, 6), r(6, 6)), Rule((ROWS,), (COLUMNS, ROWS))),
    (aten.mm.default, (r(6, 6), r(6, 6)), Rule((SUM,), (ROWS, COLUMNS))),
    (aten.addmm.default, (r(6), r(6, 6), r(6, 6)), Rule((SUM,), (WHOLE, COLUMNS, ROWS))),
    (aten.t.default, (r(6, 6),), Rule((ROWS,), (ROWS,))),
    (aten.relu.default, (r(6, 5),), Rule((WHOLE,), (ROWS,))),
    (aten.view.default, (r(6, 6), [36]), Rule((ROWS,), (Split((0,)),))),
    (aten.cumsum.default, (r(6, 5), 0), Rule((ROWS,), (ROWS,))),
    (aten.scatter_reduce.two, (r(6, 5), 0, ids(6, 9, 5), r(9, 5), "mean"), Rule((CARRY,), (WHOLE, ROWS, ROWS))),
    (aten.index_put.default, (r(6, 5), [ids(6, 9)], r(9, 5)), Rule((CARRY,), (WHOLE, ROWS, COLUMNS))),
]


@pytest.mark.parametrize(("op", "args", "rule"), WRONG, ids=[f"{i}-{each[0]}" for i, each in enumerate(WRONG)])
def test_a_wrong_rule_is_found(op: Any, args: tuple[Any, ...], rule: Rule) -> None:
    """The check of these tests, on rules that are wrong on purpose: it must not pass whatever it is given."""
    assert rule not in rules_of_call(op, *args)
    try:
        found = list(mismatches(op, args, {}, [rule]))
    except ValueError:  # the pieces are not as many for every tensor
        return
    assert found


def test_rules_that_regions_need_are_known() -> None:
    """Head and loss, weight gradients, biases, attention over heads, messages to nodes: by these regions grow."""
    x, weight, ids, grad = r(6, 4), r(4, 9), torch.arange(6).view(2, 3), r(2, 3, 4)
    products = rules_of_call(aten.mm.default, x, weight)
    assert {Rule((ROWS,), (ROWS, WHOLE)), Rule((COLUMNS,), (WHOLE, COLUMNS)), Rule((SUM,), (COLUMNS, ROWS))} <= {*products}
    assert Rule((SUM,), (ROWS,)) in rules_of_call(aten.sum.dim_IntList, x, [0])
    tokens = Split((0, 1))
    embedded = rules_of_call(aten.embedding_dense_backward.default, grad, ids, 9, -1, False)
    assert {Rule((SUM,), (tokens, tokens)), Rule((COLUMNS,), (Split((2,)), WHOLE))} <= {*embedded}
    ends, message = torch.arange(9) % 6, r(9, 4)
    added = Rule((CARRY,), (WHOLE, ROWS, ROWS))
    assert added in rules_of_call(aten.index_add.default, x, 0, ends, message)
    assert added in rules_of_call(aten.scatter_add.default, x, 0, ends.unsqueeze(1).expand(9, 4), message)
    assert added in rules_of_call(aten.index_put.default, x, [ends], message, True)
    assert added not in rules_of_call(aten.index_put.default, x, [ends], message)
    assert Rule((ROWS,), (tokens,)) in rules_of_call(aten.view.default, grad, [6, 4])
    assert Rule((tokens,), (ROWS,)) in rules_of_call(aten.view.default, x, [2, 3, 4])
    assert Rule((COLUMNS,), (WHOLE, COLUMNS)) in rules_of_call(aten.mul.Tensor, r(6, 1), x)
    q = r(2, 3, 5, 4)
    attended = rules_of_call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q)
    assert {(COLUMNS, COLUMNS), (Split((2,)), Split((2,)))} <= {rule.outputs for rule in attended}


def test_what_depends_on_all_examples_is_not_cut_along_them() -> None:
    """Statistics of a batch, means, random numbers and masks that look at positions are not those of a piece."""
    images, scores, targets = r(4, 6, 8, 8), r(6, 5), torch.arange(6) % 5
    trained = rules_of_call(aten._native_batch_norm_legit_functional.default, images, r(6), r(6), r(6), r(6), True, 0.1, 1e-5)
    assert {rule.outputs[0] for rule in trained} <= {COLUMNS}
    assert rules_of_call(aten.nll_loss_forward.default, scores, targets, None, 1, -100) == ()
    assert rules_of_call(aten.mse_loss_backward.default, r(), scores, r(6, 5), 1) == ()
    assert rules_of_call(aten.bernoulli.p, scores, 0.5) == ()
    assert rules_of_call(aten.native_dropout.default, scores, 0.5, True) == ()
    q = r(2, 3, 5, 4)
    causal = rules_of_call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q, 0.0, True)
    assert {rule.outputs[0] for rule in causal} == {ROWS, COLUMNS, Split((0, 1))}


def test_attention_on_cuda_is_cut_along_examples_and_heads() -> None:
    """Shapes only, on traced tensors of a device that need not be there; numbers are compared where a rule is used."""
    with FakeTensorMode():
        q, bias = torch.empty(2, 4, 8, 16, device="cuda", dtype=torch.bfloat16), torch.empty(2, 1, 8, 8, device="cuda")
        shared = torch.empty(2, 2, 8, 16, device="cuda", dtype=torch.bfloat16)
        calls = [
            (aten._scaled_dot_product_flash_attention.default, (q, q, q, 0.0, True)),
            (aten._scaled_dot_product_efficient_attention.default, (q, q, q, bias.bfloat16(), True, 0.0, False)),
            (aten._scaled_dot_product_cudnn_attention.default, (q, q, q, None, True, 0.0, True)),
        ]
        for op, args in calls:
            outputs = op(*args)
            found = rules_of_call(op, *args)
            assert {rule.outputs[0] for rule in found} >= {ROWS, COLUMNS}
            for rule in found:
                run_in_pieces(op, args, {}, rule, outputs, 2)
        grouped = rules_of_call(aten._scaled_dot_product_flash_attention.default, q, shared, shared, 0.0, True)
        assert {rule.outputs[0] for rule in grouped} == {ROWS}
        assert rules_of_call(aten._scaled_dot_product_flash_attention.default, q, q, q, 0.1, True) == ()
        out, logsumexp, cum_q, cum_k, most_q, most_k, seed, offset, _ = aten._scaled_dot_product_flash_attention.default(q, q, q)
        efficient = aten._scaled_dot_product_efficient_attention_backward.default
        for dropout_p in (0.0, 0.1):
            flash = (q, q, q, q, out, logsumexp, cum_q, cum_k, most_q, most_k, dropout_p, False, seed, offset)
            cudnn = (q, q, q, q, out, logsumexp, seed, offset, None, None, None, most_q, most_k, dropout_p, False)
            masked = (q, q, q, q, bias, out, logsumexp, seed, offset, dropout_p, [True, True, True, False])
            for op, args in (
                (aten._scaled_dot_product_flash_attention_backward.default, flash),
                (aten._scaled_dot_product_cudnn_attention_backward.default, cudnn),
                (efficient, masked),
            ):
                found = rules_of_call(op, *args)
                cuts = {rule.outputs[:3] for rule in found}
                assert cuts >= ({(ROWS,) * 3} if dropout_p == 0.0 else set())
                # The kernel of flash attention reads its sums of exponentials as if they were contiguous.
                heads = dropout_p == 0.0 and op is not aten._scaled_dot_product_flash_attention_backward.default
                assert ((COLUMNS,) * 3 in cuts) is heads
                assert bool(found) == (dropout_p == 0.0)
                for rule in found:
                    run_in_pieces(op, args, {}, rule, op(*args), 2)
        assert rules_of_call(efficient, *masked[:9], 0.0, [True] * 4) == ()  # the mask's gradient is a sum over its copies


def test_what_cannot_run_in_pieces_has_no_rule() -> None:
    """A second run of a mutation, or a shape that is known at run time only, would give another result."""
    x = r(6, 5)
    assert rules_of_call(aten.add_.Tensor, x, 1.0) == ()
    assert rules_of_call(aten.nonzero.default, x) == ()
    assert rules_of_call(aten.roll.default, x, [2]) == ()  # as if it lay flat
    assert rules_of_call(aten.as_strided.default, x, [5, 6], [1, 5]) == ()
    graph = fx.Graph()
    assert rules_of(graph.placeholder("x")) == ()
    assert rules_of(graph.call_function(operator.add, (1, 2))) == ()


def test_slices_stay_contiguous_where_a_kernel_needs_it() -> None:
    """The backward of the layer norm reads the mean as if it were contiguous: a slice of its second dimension is not."""
    x, mean = r(6, 5, 4), r(6, 5, 1)
    found = rules_of_call(aten.native_layer_norm_backward.default, x, x, [4], mean, mean, r(4), r(4), [True, True, True])
    assert {rule.inputs[0] for rule in found} == {ROWS, Split((0, 1))}


def test_symbolic_sizes_have_no_rule_and_get_no_guard() -> None:
    """The size of the next step may be another: reading it as a number would specialise the program."""
    graphs = captured(lambda x: x.relu().sum(), torch.randn(4, 3, requires_grad=True), dynamic=True)
    relu = next(n for n in graphs[0].graph.nodes if n.target is aten.relu.default)
    assert any(isinstance(n, torch.SymInt) for n in relu.meta["val"].shape)
    guards = len(relu.meta["val"].fake_mode.shape_env.guards)
    assert rules_of(relu) == ()
    assert len(relu.meta["val"].fake_mode.shape_env.guards) == guards


def captured(function: Callable[..., torch.Tensor], *args: Any, dynamic: bool = False) -> list[fx.GraphModule]:
    """Joint graphs of a function."""
    found: list[fx.GraphModule] = []

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        found.append(joint)
        return default_partition(joint, inputs, **options)

    def keep(module: fx.GraphModule, _: Any) -> Any:
        return module

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)
    torch.compile(function, backend=backend, dynamic=dynamic)(*args)
    assert found
    return found


NO_RULE = {
    "aten.arange.default", "aten.full.default", "aten.scalar_tensor.default", "aten.zeros.default",  # made of numbers
    "aten.mean.default", "aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default",  # means: rewritten before
    "aten.slice.Tensor", "aten.new_ones.default",  # of what has one row
}  # fmt: skip
"""Ops of the networks below that may have no rule, where they return more than a number."""


class Labelled(nn.Module):
    """A classifier with its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.net(x)
        return F.cross_entropy(scores, torch.zeros(scores.shape[:1] + scores.shape[2:], dtype=torch.long))


def _language_model(kind: str) -> tuple[nn.Module, torch.Tensor]:
    import transformers

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 128}
    config, model = {
        "gpt2": (transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=128, bos_token_id=0, eos_token_id=0,
                                         resid_pdrop=0, embd_pdrop=0, attn_pdrop=0), transformers.GPT2LMHeadModel),
        "llama": (transformers.LlamaConfig(**sizes, num_key_value_heads=2), transformers.LlamaForCausalLM),
        "llama, eager": (transformers.LlamaConfig(**sizes, attn_implementation="eager"), transformers.LlamaForCausalLM),
        "bert": (transformers.BertConfig(**sizes, hidden_dropout_prob=0, attention_probs_dropout_prob=0),
                 transformers.BertForMaskedLM),
    }[kind]  # fmt: skip
    config.use_cache = False
    ids = torch.randint(1, 100, (3, 16))
    return model(config), ids


@pytest.mark.parametrize(
    "name", ["gpt2", "unet", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "llama, eager", "bert", "cnn"))]
)
def test_ops_of_networks_have_rules(name: str) -> None:
    """A region ends where an op has no rule, so that one op without a rule in a layer costs the layer."""
    if name in ("unet", "cnn"):
        model, x = Labelled(Unet() if name == "unet" else Cnn()), torch.randn(4, 192)
        (joint,) = captured(model, x)
    else:
        model, ids = _language_model(name)
        (joint,) = captured(lambda: F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), ids.flatten()))
    ops = [n for n in joint.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    large = [n for n in ops if math.prod(getattr(n.meta["val"], "shape", (2,))) > 1]
    assert {str(n.target) for n in large if not rules_of(n)} <= NO_RULE
    assert sum(bool(rules_of(n)) for n in large) > 0.95 * len(large)


lengths = st.integers(1, 4)


@given(st.lists(lengths, min_size=4, max_size=4), st.sampled_from(["mm", "bmm", "addmm", "addmm of rows"]))
def test_products_of_any_shape_are_cut_right(shape: list[int], kind: str) -> None:
    """Dimensions of one element are not cut, and a bias is added once."""
    b, m, k, n = shape
    op, args = {
        "mm": (aten.mm.default, (r(m, k), r(k, n))),
        "bmm": (aten.bmm.default, (r(b, m, k), r(b, k, n))),
        "addmm": (aten.addmm.default, (r(n), r(m, k), r(k, n))),
        "addmm of rows": (aten.addmm.default, (r(m, 1), r(m, k), r(k, n))),
    }[kind]
    assert list(mismatches(op, args, {}, rules_of_call(op, *args))) == []


@given(st.lists(lengths, min_size=1, max_size=4), st.data())
def test_views_of_any_shape_are_cut_right(shape: list[int], data: st.DataObject) -> None:
    """Which elements a slice holds follows from the order of elements alone."""
    x = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    left, result = math.prod(shape), []
    while left > 1 or data.draw(st.booleans()):
        result.append(data.draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0])))
        left //= result[-1]
        if len(result) == 5:
            break
    result.append(left)
    order = data.draw(st.permutations(range(len(shape))))
    for op, args in ((aten.view.default, (x, result)), (aten.permute.default, (x, order))):
        assert list(mismatches(op, args, {}, rules_of_call(op, *args))) == []


@given(st.lists(lengths, min_size=1, max_size=4), st.data())
def test_reductions_over_any_dimensions_are_cut_right(shape: list[int], data: st.DataObject) -> None:
    """What is summed over becomes a sum of terms; other reductions are cut along what they keep."""
    dims = data.draw(st.lists(st.integers(-len(shape), len(shape) - 1), min_size=1, unique_by=lambda d: d % len(shape)))
    keep, x = data.draw(st.booleans()), r(*shape)
    over_all = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.logsumexp.default, aten.nansum.default)
    over_one = (aten.prod.dim_int, aten.max.dim, aten.argmax.default, aten.median.dim, aten.mode.default, aten.any.dim)
    calls: list[tuple[Any, tuple[Any, ...]]] = [(op, (x, dims, keep)) for op in over_all]
    calls += [(op, (x, dims[0], keep)) for op in over_one]
    calls += [(op, (x, dims[0])) for op in (aten.cumsum.default, aten.cummax.default, aten.sort.default)]
    calls += [(op, (x, dims[0], False)) for op in (aten._softmax.default, aten._log_softmax.default)]
    calls += [(aten.linalg_vector_norm.default, (x, 2, dims, keep)), (aten.topk.default, (x, 1, dims[0]))]
    for op, args in calls:
        assert list(mismatches(op, args, {}, rules_of_call(op, *args))) == []
    for op in (aten.var.correction, aten.std.correction, aten.var_mean.correction):
        kwargs = {"correction": 0, "keepdim": keep}
        assert list(mismatches(op, (x, dims), kwargs, rules_of_call(op, x, dims, **kwargs))) == []


@given(st.lists(lengths, min_size=1, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4), st.integers(0, 3))
def test_broadcast_operands_are_read_whole(shape: list[int], single: list[bool], missing: int) -> None:
    """An operand of one element along a dimension has no slices along it."""
    other = [1 if one else n for n, one in zip(shape, single, strict=False)][missing:]
    for op in (aten.add.Tensor, aten.masked_fill.Tensor, aten.hardtanh_backward.default):
        args = {
            aten.add.Tensor: (r(*shape), r(*other)),
            aten.masked_fill.Tensor: (r(*shape), r(*other) > 0, r()),
            aten.hardtanh_backward.default: (r(*shape), r(*shape), -1.0, 1.0),
        }[op]
        assert list(mismatches(op, args, {}, rules_of_call(op, *args))) == []
