"""What places in a model are called."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from checkmate.torch.graph.provenance import common_place, place_of

aten = torch.ops.aten


def ops(*named: tuple[object, str]) -> list[fx.Node]:
    """Nodes of ops that modules called."""
    graph = fx.Graph()
    nodes = [graph.call_function(target, ()) for target, _ in named]  # type: ignore[arg-type]
    for node, (_, path) in zip(nodes, named, strict=True):
        node.meta["nn_module_stack"] = {path: (f"L['self'].{path}" if path else "L['self']", torch.nn.Module)}
    return nodes


@pytest.mark.parametrize(
    ("named", "place"),
    [
        ([(aten.mm.default, "lm_head"), (aten._log_softmax.default, ""), (aten.nll_loss_forward.default, "")], "lm_head + loss"),
        ([(aten.mm.default, "h.0.mlp.up"), (aten.gelu.default, "h.0.mlp.act"), (aten.mm.default, "h.0.mlp.down")], "h.0.mlp"),
        ([(aten.relu.default, "stem.relu")], "stem.relu"),
        ([(aten.mm.default, name) for name in "abcde"], "a + b + c + 2 more"),
        ([(aten.relu.default, "")], "relu_default"),
    ],
)
def test_a_place_has_the_names_of_the_modules_that_multiply(named: list[tuple[object, str]], place: str) -> None:
    assert place_of(ops(*named)) == place


@pytest.mark.parametrize(
    ("places", "name"),
    [
        (["h.0.mlp", "h.1.mlp", "h.11.mlp"], "h.*.mlp"),
        (["lm_head + loss"], "lm_head + loss"),
        (["encoder.0", "decoder.0"], "encoder.0 and 1 more"),
        (["h.0", "h.0.mlp", "x"], "h.0 and 2 more"),
    ],
)
def test_layers_that_differ_in_their_number_have_one_name(places: list[str], name: str) -> None:
    assert common_place(places) == name
