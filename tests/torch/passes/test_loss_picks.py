"""The loss of picked tokens is the same storage as the loss that it replaces."""

from __future__ import annotations

import torch
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch.nn.functional import cross_entropy

from checkmate.torch.graph.storages import leaves, storage_key
from checkmate.torch.passes.loss_picks import pick_before_reducing


def test_results_and_views_of_a_replaced_loss_share_its_storage() -> None:
    """Aliases are found by storages. A model that returns its loss in an output has two views of it, and none is a value."""
    inputs = [torch.randn(6, 4, requires_grad=True), torch.randint(4, (6,))]
    joint = aot_export_joint_simple(lambda x, y: (cross_entropy(x, y),), inputs, trace_joint=True)
    pick_before_reducing(joint.graph)
    for node in joint.graph.nodes:
        if node.op == "call_function" and "getitem" in node.name:
            made = {storage_key(t) for t in leaves(node.args[0].meta["val"])}
            assert {storage_key(t) for t in leaves(node.meta["val"])} <= made
