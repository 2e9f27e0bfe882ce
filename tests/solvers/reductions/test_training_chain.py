"""A training chain is recognized with all of its figures, and a graph that is none is told why."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate import Compute, Graph, Op, Plan, Problem, Value, simulate
from checkmate.solvers.reductions.training_chain import TrainingChain
from tests.solvers.chains import uneven_chain

SIZES = (3, 4, 5, 2, 6, 7, 8)


def training_step(changed: dict[int, dict[str, object]] | None = None, kept: tuple[int, ...] = (3, 6)) -> Graph:
    """Three layers, a loss, and a gradient for each layer, which reads the layer's value and its input.

    Args:
        changed: Fields of ops that differ from the plain step, by op.
        kept: Values that stay.
    """
    reads = ((), (0, 0), (1,), (2,), (3, 2, 1), (4, 1, 0), (5, 0))
    phases = ("forward", "forward", "forward", "loss", "backward", "backward", "backward")
    ops = tuple(Op(f"op{o}", reads[o], (o,), 10 + o, workspace_bytes=20 + o, phase=phases[o]) for o in range(len(reads)))
    ops = tuple(msgspec.structs.replace(op, **(changed or {}).get(o, {})) for o, op in enumerate(ops))
    return Graph(ops, tuple(Value(f"v{v}", size, kept=v in kept) for v, size in enumerate(SIZES)))


def layers(graph: Graph, **options: object) -> tuple[int, ...] | str:
    """The ops that are layers, or the reason why there are none."""
    found = TrainingChain.of(Problem(graph, 1000, **options))
    return found if isinstance(found, str) else found.layers


def test_a_training_step_is_a_chain_with_all_figures():
    """Each gradient reads its layer and the one below it."""
    assert TrainingChain.of(Problem(training_step(), 1000)) == TrainingChain(
        layers=(-1, 0, 1, 2),
        sizes=(0, 3, 4, 5),
        workspaces=(0, 20, 21, 22),
        costs=(0, 10, 11, 12),
        steps=(-1, 3, 4, 5, 6),
        reads=(frozenset({3}), frozenset({3}), frozenset({2, 3}), frozenset({1, 2}), frozenset({1})),
        before=(0, 0, 2, 8, 9),
        during=(0, 2 + 23, 8 + 24, 15 + 25, 17 + 26),
        top=(3, 3, 3, 2, 1, 0),
        below=(2, 2, 2, 1, 0),
    )


def test_a_layer_ends_where_nothing_above_it_is_read_any_more():
    """Layer 0, the input, is there to the end."""
    chain = TrainingChain.of(Problem(training_step(), 1000))
    assert isinstance(chain, TrainingChain)
    assert [chain.end(layer) for layer in range(4)] == [5, 4, 3, 0]


def test_layers_that_no_gradient_reads_are_left_out_of_what_is_below():
    """The gradient of layer 3 reads only layer 3, and the next that is read is layer 1."""
    graph = training_step({4: {"inputs": (3, 2)}, 5: {"inputs": (4, 0)}, 6: {"inputs": (5,)}})
    chain = TrainingChain.of(Problem(graph, 1000))
    assert isinstance(chain, TrainingChain)
    assert chain.reads == (frozenset({3}), frozenset({3}), frozenset({3}), frozenset({1}), frozenset())
    assert chain.top == (3, 3, 3, 1, 0, 0)
    assert chain.below == (1, 1, 1, 0, 0)


def test_the_input_is_below_a_layer_that_is_the_last_to_be_read():
    """Layer 1 is read by no step, so that nothing but the input is held under layer 2."""
    chain = TrainingChain.of(Problem(training_step({5: {"inputs": (4, 1)}, 6: {"inputs": (5, 1)}}), 1000))
    assert isinstance(chain, TrainingChain)
    assert chain.reads == (frozenset({3}), frozenset({3}), frozenset({2, 3}), frozenset({2}), frozenset({2}))
    assert chain.top == (3, 3, 3, 2, 2, 0)
    assert chain.below == (2, 2, 2, 0, 0)


def test_the_end_of_the_forward_pass_is_a_step_that_reads_the_last_layer():
    """So the last layer is held from the forward pass to the loss, whatever is computed between them."""
    chain = TrainingChain.of(Problem(branch((), {"recomputable": False}), 1000))
    assert isinstance(chain, TrainingChain)
    assert chain.reads == (frozenset({2}), frozenset(), frozenset(), frozenset({1, 2}))
    assert chain.top == (2, 2, 2, 2, 0)


@given(st.integers(0, 2**32 - 1))
def test_bytes_of_steps_are_those_of_the_simulation(seed):
    """With every layer computed once and freed as early as possible, the other bytes are layers that are still read."""
    rng = random.Random(seed)
    graph = uneven_chain(rng, rng.randint(1, 5))
    chain = TrainingChain.of(Problem(graph, 1000))
    assert isinstance(chain, TrainingChain)
    plan = Plan.from_order(graph, range(len(graph.ops)))
    timeline = simulate(graph, plan)
    at = {step.op: position for position, step in enumerate(plan.steps) if isinstance(step, Compute)}
    made_by_layers = {graph.ops[o].outputs[0] for o in chain.layers[1:]}
    for k, o in enumerate(chain.steps[1:], start=1):
        read_later = {v for later in chain.steps[k:] for v in graph.ops[later].inputs}
        held = sum(graph.values[v].size_bytes for v in made_by_layers & read_later)
        live = sum(storage.size_bytes for storage in timeline.live(at[o]))
        assert chain.during[k] == live - held + graph.ops[o].workspace_bytes


def test_values_of_steps_are_held_from_their_step_to_their_last_reader():
    """One without readers is freed at once; one that is kept stays; one of two outputs may go before the other."""
    ops = (
        Op("f", (), (0,), 1),
        Op("loss", (0,), (1, 2, 3, 4), 1, phase="loss"),
        Op("b1", (1, 2, 0), (5,), 1, workspace_bytes=1000, phase="backward"),
        Op("b2", (2, 5, 3), (6,), 1, phase="backward"),
        Op("b3", (6,), (7,), 1, phase="backward"),
    )
    sizes = (1, 2, 4, 8, 16, 32, 64, 128)  # value 4 is never read; values 3 and 7 are kept
    graph = Graph(ops, tuple(Value(f"v{v}", size, kept=v in (3, 7)) for v, size in enumerate(sizes)))
    chain = TrainingChain.of(Problem(graph, 1000))
    assert isinstance(chain, TrainingChain)
    assert chain.layers == (-1, 0)
    assert chain.before == (0, 0, 2 + 4 + 8, 4 + 8 + 32, 8 + 64)
    assert chain.during == (0, 2 + 4 + 8 + 16, 2 + 4 + 8 + 32 + 1000, 4 + 8 + 32 + 64, 8 + 64 + 128)


def test_a_loss_that_reads_one_value_is_not_taken_for_a_layer():
    """As layer 4 it would make the first gradient read three layers; the row without it is a chain."""
    assert layers(training_step(kept=(6,))) == (-1, 0, 1, 2)
    # If the gradient reads two of them, the loss may be a layer: the longest row is the one that counts.
    assert layers(training_step({4: {"inputs": (3, 2)}}, kept=(6,))) == (-1, 0, 1, 2, 3)


def test_rows_without_several_of_their_last_ops_are_tried():
    """A loss of two ops that each read one value, and a forward op that reads the layer before those of the loss."""
    ops = (
        Op("f", (), (0,), 1),
        Op("loss 1", (0,), (1,), 1, phase="loss"),
        Op("loss 2", (1,), (2,), 1, phase="loss"),
        Op("metric", (0,), (3,), 1, recomputable=False),
        Op("b", (2, 0), (4,), 1, phase="backward"),
    )
    assert layers(Graph(ops, tuple(Value(f"v{v}", 4, kept=v == 4) for v in range(5)))) == (-1, 0)


def test_the_reason_is_that_of_the_longest_row():
    """The shorter ones fail as well, for reasons that say less of the graph."""
    graph = training_step({4: {"inputs": (3, 0)}, 5: {"inputs": (4, 2)}})
    assert layers(graph) == "layer 1 is read before layer 3 has been read for the last time"
    graph = training_step({4: {"inputs": (3, 0)}, 5: {"inputs": (4, 1, 2)}}, kept=(6,))
    assert layers(graph) == "layer 1 is read before layer 4 has been read for the last time"


def test_a_view_has_to_be_folded_first():
    """A view that `FoldViews` leaves is tied to its place by a rule."""
    ops = (Op("f", (), (0,), 1), Op("view", (0,), (1,), 0), Op("b", (1, 0), (2,), 1, phase="backward"))
    graph = Graph(ops, (Value("f", 4), Value("view", 0, base=0), Value("b", 4, kept=True)))
    assert layers(graph) == "a view is tied to its place"


def test_without_a_row_there_is_no_chain():
    """No op, an op that is kept, and an op that is read by none."""
    reason = "no op reads back what a row of forward ops has made"
    assert layers(training_step(kept=(0, 3, 6))) == reason
    assert layers(Graph((Op("f", (), (0,), 1),), (Value("f", 4),))) == reason
    assert layers(Graph((), ())) == reason


def two_layers(changed: dict[str, object], *, kept: bool = False) -> Graph:
    """Layers f1 and f2, a loss and a gradient that reads f1; f2 may differ so that it is no layer."""
    ops = (
        Op("f1", (), (0,), 1),
        msgspec.structs.replace(Op("f2", (0,), (1,), 1), **changed),
        Op("loss", (1,), (2,), 1, phase="loss"),
        Op("b", (2, 0), (3,), 1, phase="backward"),
        Op("end", (), (4, 5), 1, phase="backward"),
    )
    made = {v for op in ops for v in op.outputs}
    return Graph(ops, tuple(Value(f"v{v}", 4, kept=(v == 1 and kept) or v in (2, 3)) for v in sorted(made)))


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({"recomputable": False}, False),
        ({"clobbered_by": (4,)}, False),
        ({"replay_bytes": 1}, False),
        ({"inputs": ()}, False),
        ({"outputs": (1, 6)}, False),
        ({}, True),
    ],
    ids=["once", "overwritten", "random", "reads nothing", "two outputs", "kept"],
)
def test_an_op_that_is_no_layer_ends_the_row(changed, kept):
    """It is a step, which runs once."""
    assert layers(two_layers({})) == (-1, 0, 1)
    assert layers(two_layers(changed, kept=kept)) == (-1, 0)


def test_only_what_may_run_again_is_a_layer():
    """With ``recompute="forward"`` that is a forward op."""
    graph = two_layers({"phase": "backward"})
    assert layers(graph, recompute="all") == (-1, 0, 1)
    assert layers(graph, recompute="forward") == (-1, 0)
    assert layers(two_layers({}), recompute="forward") == (-1, 0, 1)
    once = two_layers({"recomputable": False})
    assert layers(once, recompute="forward") == (-1, 0)


def test_a_layer_at_the_end_that_nothing_reads_is_a_step():
    """It would be a layer that is never read back."""
    ops = (Op("f1", (), (0,), 1), Op("f2", (0,), (1,), 1), Op("f3", (1,), (2,), 1))
    assert layers(Graph(ops, tuple(Value(f"v{v}", 4) for v in range(3)))) == (-1, 0, 1)


def branch(reads: tuple[int, ...], changed: dict[str, object] | None = None, **value: object) -> Graph:
    """Two layers, a forward op that makes two values, and a gradient that reads one of them and the layers."""
    side = msgspec.structs.replace(Op("side", reads, (2, 3), 1), **(changed or {}))
    ops = (
        Op("f1", (), (0,), 1),
        Op("f2", (0,), (1,), 1),
        side,
        Op("loss", (3,), (4,), 1, phase="loss"),
        Op("b", (1, 2, 0), (5,), 1, phase="backward"),
    )
    values = [Value(f"v{v}", 4, kept=v >= 4) for v in range(6)]
    values[2] = msgspec.structs.replace(values[2], **value)
    return Graph(ops, tuple(values))


def test_a_forward_op_beside_the_row_reads_only_its_end():
    """A layer that it reads would have to be held or computed again for it."""
    assert layers(branch((0, 1), {"recomputable": False})) == "forward op 2 ('side') reads layer 1 of 2"
    assert layers(branch((1,), {"recomputable": False})) == (-1, 0, 1)
    assert layers(branch((), {"recomputable": False})) == (-1, 0, 1)
    # An op of the backward pass may read it.
    assert layers(branch((0, 1), {"phase": "backward"})) == (-1, 0, 1)


def test_a_forward_op_that_could_run_again_and_is_no_layer_is_refused():
    """Steps run once; its value could be dropped and computed again for the backward pass, so that no bound would hold."""
    reason = "forward op 2 ('side') is no layer, and the backward pass reads it"
    assert layers(branch((1,))) == reason
    assert layers(branch((1,), size_bytes=1)) == reason
    assert layers(branch((1,), size_bytes=0)) == (-1, 0, 1)
    assert layers(branch((1,), kept=True)) == (-1, 0, 1)
    assert layers(branch((1,), {"phase": "loss"})) == (-1, 0, 1)
    only_the_loss = branch((1,))
    ops = (*only_the_loss.ops[:4], Op("b", (1, 0), (5,), 1, phase="backward"))
    assert layers(Graph(ops, only_the_loss.values)) == (-1, 0, 1)
