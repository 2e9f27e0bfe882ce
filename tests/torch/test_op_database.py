"""Every op that PyTorch itself tests: recomputed, it gives the same bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

from checkmate.torch.backend import compile_graph
from checkmate.torch.compilation.resident_account import Hooks
from checkmate.torch.options import Options
from tests.torch.steps import ROOMY, Forgetful, recomputes

pytest.importorskip("expecttest", reason="PyTorch's own tests need it: pip install expecttest")
from torch.testing._internal.common_methods_invocations import op_db

SAMPLES = 2
_READS = "its code reads values of tensors, which no traced program can"
_SHAPE = "the shape of what it returns depends on values"
_CSR = "AOTAutograd traces no sparse CSR tensors"
UNTRACEABLE = {
    "combinations": _SHAPE,
    "corrcoef": _READS,
    "cov": _READS,
    "index_fill": _READS,
    "index_put": _SHAPE,
    "linalg.lstsq": _SHAPE,
    "linalg.lstsq.grad_oriented": _SHAPE,
    "masked_select": _SHAPE,
    "narrow": _READS,
    "nn.functional.ctc_loss": _SHAPE,
    "nn.functional.gaussian_nll_loss": _READS,
    "sparse.mm.reduce": _CSR,
    "sparse.sampled_addmm": _CSR,
    "tensor_split": _READS,
    "to_sparse": "AOTAutograd traces no gradient of a sparse tensor",
}
"""Ops with a sample that AOTAutograd cannot trace, with the reason: they never reach a plan."""

OPS = [op for op in op_db if op.supports_autograd and torch.float32 in op.supported_dtypes("cpu")]


def name_of(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def programs(op: Any) -> Iterator[tuple[fx.GraphModule, list[torch.Tensor]]]:
    """A few samples as programs: an op before, so that something is read again, and a loss that needs every output."""
    for count, sample in enumerate(op.sample_inputs("cpu", torch.float32, requires_grad=True)):
        if count == SAMPLES:
            return
        leaves, structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[i] for i in where]

        def call(*given: Any, leaves: Any = leaves, structure: Any = structure, where: Any = where, sample: Any = sample) -> Any:
            inputs = list(leaves)
            for i, tensor in zip(where, given, strict=True):
                floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
                inputs[i] = tensor * 1.0 if floating and tensor.layout is torch.strided else tensor
            first, args, kwargs = pytree.tree_unflatten(inputs, structure)
            results = [t for t in pytree.tree_leaves(sample.output_process_fn_grad(op(first, *args, **kwargs))) if _counts(t)]
            if not results:
                return None
            return sum((t.abs() if t.dtype.is_complex else t).sin().sum().float() for t in results)

        graph = fx.Graph()
        placeholders = [graph.placeholder(f"x{i}") for i in range(len(tensors))]
        graph.output((graph.call_function(call, tuple(placeholders)),))
        if any(t.requires_grad for t in tensors):
            yield fx.GraphModule(torch.nn.Module(), graph), tensors


def _counts(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex) and value.requires_grad


def run(program: fx.GraphModule, tensors: list[torch.Tensor], **options: Any) -> tuple[list[Any], int]:
    """Loss, gradients and random state, and how much was computed again."""
    planned: list[Any] = []
    hooks = Hooks(planned=lambda capture, result: planned.append((capture, result)))
    step = compile_graph(program, tensors, Options(costs="estimated", **options), hooks)
    torch.manual_seed(0)
    (loss,) = step(*tensors)
    wanted = [t for t in tensors if t.requires_grad]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [loss.detach(), *found, torch.get_rng_state()], recomputes(planned)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS, ids=name_of)
def test_an_op_computed_again_gives_the_same_bits(op: Any) -> None:
    """Forward and backward with everything recomputable recomputed equal keeping everything."""
    name = name_of(op)
    if name in UNTRACEABLE:
        pytest.skip(UNTRACEABLE[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for program, tensors in programs(op):
            reference, _ = run(program, tensors)
            torch._dynamo.reset()
            again, _ = run(program, tensors, budget=ROOMY, solver=Forgetful(every=1))
            assert all(_equal(a, b) for a, b in zip(reference, again, strict=True))


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) and torch.equal(a.isnan(), b.isnan())
