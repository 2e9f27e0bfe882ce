"""The code that runs a plan calls the functions of PyTorch's dispatcher, and replays random ops."""

from __future__ import annotations

import operator
import re

import torch
from torch import fx

from checkmate.torch._compat.aot import boxed
from checkmate.torch._compat.dispatch import run_and_save_rng_state, run_with_rng_state

DROPOUT = torch.ops.aten.native_dropout.default


def test_a_random_op_is_replayed_by_code_that_looks_up_no_op() -> None:
    """The mask is the first one, and the generator goes on as after one dropout."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    both = graph.call_function(run_and_save_rng_state, (DROPOUT, x, 0.5, True))
    state, first = (graph.call_function(operator.getitem, (both, i)) for i in (0, 1))
    between = graph.call_function(DROPOUT, (x, 0.5, True))
    again = graph.call_function(run_with_rng_state, (state, DROPOUT, x, 0.5, True))
    graph.output((first, between, again))
    module = fx.GraphModule({}, graph)
    run = boxed(module)
    torch.manual_seed(1)
    (first_out, first_mask), (between_out, _), (again_out, again_mask) = run([torch.ones(64)])
    after = torch.rand(4)
    torch.manual_seed(1)
    expected = [DROPOUT(torch.ones(64), 0.5, True)[0] for _ in range(2)]
    assert torch.equal(torch.rand(4), after)
    assert all(map(torch.equal, (first_out, between_out, again_out, again_mask), (*expected, expected[0], first_mask)))
    assert not re.findall(r"torch\.ops\.[\w.]+\(", module.code)
