"""Every op that PyTorch itself tests: what is computed in pieces is what is computed whole."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from checkmate.torch.chunking.rules.lookup import rules_of
from tests.torch.chunking.whole_and_pieces import mismatches, node_of

pytest.importorskip("expecttest", reason="PyTorch's own tests need it: pip install expecttest")
from torch.testing._internal.common_methods_invocations import op_db

MOST, SAMPLES = 200, 12
"""Samples that are made, and those spread over them that are run."""

_OTHER = ("sparse.", "to_sparse", "jiterator_")
"""Ops on tensors without strides, and those of CUDA alone."""

OPS = [op for op in op_db if torch.float64 in op.supported_dtypes("cpu") and not op.name.startswith(_OTHER)]


class _Calls(TorchDispatchMode):
    """Records the ATen ops that run, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS, ids=lambda op: f"{op.name}.{op.variant_test_name}")
def test_pieces_of_an_op_of_the_database_make_the_whole(op: Any) -> None:
    """A rule that does not hold for some arguments would give wrong gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(itertools.islice(op.sample_inputs("cpu", torch.float64, requires_grad=op.supports_autograd), MOST))
    wrong = []
    for sample in samples[:: max(1, len(samples) // SAMPLES)]:
        for func, args, kwargs in _calls(op, sample):
            if func._schema.is_mutable:
                continue
            with torch.no_grad():
                args, kwargs = pytree.tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, (args, kwargs))
                found = rules_of(node_of(func, args, kwargs, func(*args, **kwargs)))
                wrong += mismatches(func, args, kwargs, found)
    assert wrong == []


def _calls(op: Any, sample: Any) -> list[tuple[Any, Any, Any]]:
    calls = _Calls()
    # Some samples are there to fail, and some results have no gradient; what ran before counts.
    with contextlib.suppress(RuntimeError, ValueError, TypeError, NotImplementedError), warnings.catch_warnings(), calls:
        warnings.simplefilter("ignore")
        results = [t for t in pytree.tree_leaves(op(sample.input, *sample.args, **sample.kwargs)) if _differentiable(t)]
        if results:
            torch.autograd.backward(results, [torch.ones_like(t) for t in results])
    return calls.found


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
