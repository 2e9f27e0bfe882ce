"""The captured graph says what the step really does."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import checkmate
from checkmate import Graph
from tests.torch.networks import NETWORKS, Cnn, input_of, mlp
from tests.torch.steps import compiled


def graph_of(name: str, **options: object) -> Graph:
    """Graph of a network under a mean."""
    model, x = NETWORKS[name](), input_of(name)
    flat = nn.Sequential(model, nn.Flatten(0))
    return checkmate.torch.capture(flat, lambda p, y: p.mean() * y, example=(x, torch.ones(())), **options)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_op_of_the_graph_is_needed_and_listed_once(name: str) -> None:
    """Dead ops would have to be computed by every plan."""
    graph = graph_of(name, costs="estimated")
    plan = checkmate.Plan.from_order(graph, range(len(graph.ops)))
    assert checkmate.validate(graph, plan) == ()
    last = {o for o, op in enumerate(graph.ops) if op.kind == "boundary" or any(graph.values[v].kept for v in op.outputs)}
    needed = set(last)
    for o in reversed(range(len(graph.ops))):
        if o in needed or not graph.ops[o].recomputable or graph.ops[o].replay_bytes:
            needed.add(o)
            needed.update(graph.producer[v] for v in graph.ops[o].inputs)
    assert needed == set(range(len(graph.ops)))


def test_attention_without_dropout_is_recomputable() -> None:
    """Its kernels carry the random tag even where they draw nothing."""
    model, x = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), torch.randn(4, 16, 32)
    graph = checkmate.torch.capture(model, lambda p, y: p.mean() * y, example=(x, torch.ones(())), costs="estimated")
    attention = [op for op in graph.ops if "attention" in op.kind and op.phase == "forward"]
    assert attention
    assert all(op.recomputable and not op.replay_bytes for op in attention)


def test_dropout_replays_and_keeps_its_place() -> None:
    """Masks are drawn in the order of the program, and drawn again from the state they began with."""
    graph = graph_of("dropout", costs="estimated")
    random = [o for o, op in enumerate(graph.ops) if op.replay_bytes]
    assert len(random) == 4
    assert {graph.ops[o].replay_bytes for o in random} == {torch.get_rng_state().numel()}
    assert set(itertools.pairwise(random)) <= set(graph.order)


def test_batch_norm_backward_does_not_read_running_statistics() -> None:
    """It is handed them and ignores them: held for it, they would be memory for nothing."""
    graph = graph_of("batch_norm", costs="estimated")
    norms = [op for op in graph.ops if op.kind == "aten._native_batch_norm_legit_functional.default"]
    backwards = [op for op in graph.ops if op.kind == "aten.native_batch_norm_backward.default"]
    assert len(norms) == len(backwards) == 3
    stats = {v for op in norms for v in op.outputs[3:]}
    assert not stats & {v for op in backwards for v in op.inputs}


def test_mutations_run_once_and_their_readers_before_them() -> None:
    """An overwritten buffer cannot be read again."""
    graph = graph_of("in_place", costs="estimated")
    copies = [o for o, op in enumerate(graph.ops) if op.kind == "aten.copy_.default"]
    assert copies
    assert not any(graph.ops[o].recomputable for o in copies)
    assert any(op.clobbered_by for op in graph.ops if op.phase == "forward")
    boundary = next(o for o, op in enumerate(graph.ops) if op.kind == "boundary")
    assert all((o, boundary) in graph.order for o in copies)


def test_views_allocate_nothing() -> None:
    """A view shares its base's storage; unread outputs of an op with several are allocated all the same."""
    graph = graph_of("views", costs="estimated")
    views = [v for v in graph.values if v.base is not None]
    assert len(views) > 10
    assert all(v.size_bytes == 0 for v in views)


def test_resident_bytes_are_parameters_buffers_batch_and_reserve() -> None:
    """Each storage once."""
    model, x = Cnn(), input_of("batch_norm")
    y = torch.ones(())
    graph = checkmate.torch.capture(model, lambda p, y: p.mean() * y, example=(x, y), reserve="1KiB", costs="estimated")
    # `num_batches_tracked` and running statistics are read and written by the step.
    there = [*model.parameters(), *model.buffers(), x, y]
    assert graph.resident_bytes == 1024 + sum(t.untyped_storage().nbytes() for t in there)


def test_gradients_that_exist_are_resident() -> None:
    """They stay while the new ones are made."""
    model, x = mlp(), input_of("dropout")
    empty = checkmate.torch.capture(model, nn.functional.mse_loss, example=(x, x), costs="estimated").resident_bytes
    model(x).mean().backward()
    full = checkmate.torch.capture(model, nn.functional.mse_loss, example=(x, x), costs="estimated").resident_bytes
    assert full - empty == sum(p.nbytes for p in model.parameters())


def test_held_outputs_stay_and_released_ones_go() -> None:
    """Who says that an output is dropped before the backward gets its bytes."""
    model, x = nn.Sequential(mlp(2), nn.Linear(64, 512)), input_of("dropout")

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        out = model(x)
        return out.square().mean(), out.detach().exp()

    graphs = []
    for outputs in ("held", "released"):
        torch._dynamo.reset()
        run, planned = compiled(forward, outputs=outputs)
        run()[0].backward()
        graphs.append(planned[0][0].graph)
    held, released = (sum(v.size_bytes for v in g.values if v.kept) for g in graphs)
    assert held - released == 4 + 128 * 512 * 4


def test_no_source_is_a_line_of_the_library() -> None:
    """A whole step runs through programs of ours; a user looks for a line of their own."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.ones(4, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"optimizer": optimizer, "micro_batches": 2, "clip_norm": 1.0, "costs": "estimated"}
    graph = checkmate.torch.capture(model, nn.functional.mse_loss, example=(x, x), **options)  # type: ignore[arg-type]
    assert {op.source for op in graph.ops} == {"", "0", "1"}


def test_sources_name_modules() -> None:
    """What fills the peak is told in the user's words."""
    sources = {op.source for op in graph_of("attention", costs="estimated").ops}
    assert any("layers.1.self_attn" in s or "layers.1.linear1" in s for s in sources), sources


def test_only_the_owner_of_a_held_output_is_pinned() -> None:
    """A view of it made again would hold the same storage, and pinned views are hard on planners."""
    model, x = nn.Sequential(mlp(2), nn.Linear(64, 8)), input_of("dropout")
    graph = checkmate.torch.capture(model, lambda p, y: p.mean() * y, example=(x, torch.ones(())), costs="estimated")
    pinned = [op for op in graph.ops if not op.recomputable and op.kind != "boundary"]
    assert pinned
    assert all(graph.values[v].base is None for op in pinned for v in op.outputs)
