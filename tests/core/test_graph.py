"""Graphs: what is no graph is refused where it enters, in words; what is derived follows from ops and values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from checkmate import Graph, GraphError, Op, Value
from checkmate.core.graph import BOUNDARY
from tests.strategies import graphs

TOPOLOGICAL = "\n\nhint: list the ops in a topological order; a cycle has none"
ROUND = "\n\nhint: sizes are exact bytes and costs whole units: round them first"


@pytest.mark.parametrize(
    ("ops", "values", "options", "says"),
    [
        (
            [("a", (0,), (1,)), ("b", (), (0,))],
            [("v", 1), ("w", 1)],
            {},
            "op 0 ('a') reads value 0, which no earlier op makes" + TOPOLOGICAL,
        ),
        ([("a", (0,), (0,))], [("v", 1)], {}, "op 0 ('a') reads value 0, which no earlier op makes" + TOPOLOGICAL),
        ([("a", (1,), (0,))], [("v", 1)], {}, "op 0 ('a') reads value 1, which does not exist" + TOPOLOGICAL),
        ([("a", (-1,), (0,))], [("v", 1)], {}, "op 0 ('a') reads value -1, which does not exist" + TOPOLOGICAL),
        ([("a", (), (0, 0))], [("v", 1)], {}, "value 0 ('v') is written by op 0 and op 0"),
        ([("a", (), (0,)), ("b", (), (0,))], [("v", 1)], {}, "value 0 ('v') is written by op 0 and op 1"),
        ([("a", (), (1,))], [("v", 1)], {}, "op 0 ('a') writes value 1 of 1"),
        ([("a", (), (-1,))], [("v", 1)], {}, "op 0 ('a') writes value -1 of 1"),
        (
            [("a", (), (0,))],
            [("v", 1), ("w", 1)],
            {},
            "value 1 ('w') is written by no op"
            "\n\nhint: count memory that exists before the step in resident_bytes, and list no value for it",
        ),
        (
            [("a", (), (0,)), ("b", (), (1,))],
            [("v", 1), ("w", 0, 0)],
            {},
            "value 1 ('w') is a view of value 0, whose storage its op 'b' does not read"
            "\n\nhint: let the op of a view read its base or another view of it",
        ),
        ([("a", (), (0,))], [("v", 0, 0)], {}, "value 0 ('v') is a view of value 0, which is no other value"),
        ([("a", (), (0,))], [("v", 0, 1)], {}, "value 0 ('v') is a view of value 1, which is no other value"),
        ([("a", (), (0,))], [("v", 0, -1)], {}, "value 0 ('v') is a view of value -1, which is no other value"),
        (
            [("a", (), (0,)), ("b", (0,), (1,))],
            [("v", 1), ("w", 0, 7)],
            {},
            "value 1 ('w') is a view of value 7, which is no other value",
        ),
        (
            [("a", (), (0,)), ("b", (0,), (1,))],
            [("v", 0, 1), ("w", 0, 0)],
            {},
            "value 0 ('v') is a view of value 0, which is no other value",
        ),
        (
            [("a", (), (0, 1, 2))],
            [("v", 0, 1), ("w", 0, 2), ("u", 0, 1)],
            {},
            "value 0 ('v') is a view of value 1, which is no other value",
        ),
        (
            [("a", (), (0,)), ("b", (), (1,))],
            [("v", 1), ("w", 1)],
            {"order": [(1, 0)]},
            "op 1 must come before op 0, and the ops are not listed so"
            "\n\nhint: list the ops in an order that keeps `order` and `clobbered_by`",
        ),
        ([("a", (), (0,))], [("v", 1)], {"resident_bytes": -1}, "Graph '': resident_bytes=-1 must be zero or more"),
        ([("a", (), (0,))], [("v", 1)], {"resident_bytes": 0.5}, "Graph '': resident_bytes=0.5 is not an integer" + ROUND),
        (
            [("a", (), (0,))],
            [("v", 2**60)],
            {"resident_bytes": 1, "name": "big"},
            f"the sizes of graph 'big' sum to {2**60 + 1} bytes, more than the {2**60} that are counted exactly"
            "\n\nhint: sizes are in bytes: check their unit",
        ),
    ],
)
def test_what_is_no_graph_is_refused(ops, values, options, says):
    """A cyclic, dangling or contradictory graph never gets to a solver."""
    with pytest.raises(GraphError) as caught:
        Graph(tuple(Op(*op, 1) for op in ops), tuple(Value(*value) for value in values), **options)
    assert str(caught.value) == says


@pytest.mark.parametrize(
    ("pair", "where"),
    [
        *((pair, "order") for pair in ((0, 0), (1, 0), (0, 2), (-1, 0))),
        *((pair, "clobbered_by") for pair in ((0, 0), (1, 0), (0, 2))),
    ],
)
def test_pairs_of_ops_follow_the_listing(pair, where):
    """Both are rules about first computations, which the listing itself must keep."""
    before, after = pair
    clobbers = [(after,) if where == "clobbered_by" and o == before else () for o in range(2)]
    ops = (Op("a", (), (0,), 1, clobbered_by=clobbers[0]), Op("b", (), (1,), 1, clobbered_by=clobbers[1]))
    with pytest.raises(GraphError, match=f"op {before} must come before op {after}, and"):
        Graph(ops, (Value("v", 1), Value("w", 1)), order=[pair] if where == "order" else ())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Value("v", -1), "Value 'v': size_bytes=-1 must be zero or more"),
        (lambda: Value("v", True), "Value 'v': size_bytes=True must be zero or more"),
        (lambda: Value("v", 1.5), "Value 'v': size_bytes=1.5 is not an integer" + ROUND),
        (
            lambda: Value("v", 8, base=0),
            "value 'v' is a view of value 0 and claims 8 bytes itself"
            "\n\nhint: a view allocates nothing: give it size_bytes=0, or no base",
        ),
        (lambda: Op("a", (), (), -2), "Op 'a': cost=-2 must be zero or more"),
        (lambda: Op("a", (), (), 1, workspace_bytes=0.5), "Op 'a': workspace_bytes=0.5 is not an integer" + ROUND),
        (lambda: Op("a", (), (), 1, replay_bytes=-1), "Op 'a': replay_bytes=-1 must be zero or more"),
        (lambda: Op("a", "xy", (), 1), "op 'a': inputs='xy' are not indices"),
        (lambda: Op("a", (), (0.5,), 1), "op 'a': outputs=(0.5,) are not indices"),
        (lambda: Op("a", (), (), 1, clobbered_by=3), "op 'a': clobbered_by=3 are not indices"),
        (
            lambda: Op("a", (), (), 1, phase="sideways"),
            "op 'a': phase 'sideways' is not one of forward, loss, backward, optimizer",
        ),
        (
            lambda: Graph.from_dag(cost=[1], size_bytes=[1, 2], edges=[]),
            "cost, size_bytes, names, backward describe 1, 2, 1, 1 nodes\n\nhint: give each of them one entry a node",
        ),
        (
            lambda: Graph.from_dag(cost=[1], size_bytes=[1], edges=[], names=["a", "b"], backward=[]),
            "cost, size_bytes, names, backward describe 1, 1, 2, 0 nodes\n\nhint: give each of them one entry a node",
        ),
    ],
    ids=range(13),
)
def test_wrong_amounts_and_indices_are_refused(make, says):
    """Sizes are exact bytes; a rounding belongs to the caller."""
    with pytest.raises(GraphError) as caught:
        make()
    assert str(caught.value) == says


@pytest.mark.parametrize("edge", [(1, 0), (1, 1), (0, 2), (-1, 0)])
def test_an_edge_goes_from_a_lower_to_a_higher_node(edge):
    """Nodes are numbered as they run, so there is no cycle to look for."""
    with pytest.raises(GraphError) as caught:
        Graph.from_dag(cost=[1, 1], size_bytes=[1, 1], edges=[edge])
    assert str(caught.value) == (
        f"edge {edge} does not go from a lower to a higher node of 0..1"
        "\n\nhint: number the nodes in a topological order; a cycle has none"
    )


def test_two_to_the_sixty_bytes_are_a_graph():
    """Every sum of sizes, workspaces and replay states has to stay inside 64 bits; this is the last that is allowed."""
    half = 2**59

    def graph(workspace: int, replay: int) -> Graph:
        return Graph((Op("a", (), (0,), 1, workspace, replay),), (Value("v", half),), resident_bytes=1)

    assert graph(half - 2, 1).ops
    for workspace, replay in ((half - 1, 1), (half - 2, 2)):
        with pytest.raises(GraphError, match="more than the"):
            graph(workspace, replay)


def test_two_to_the_sixty_of_cost_are_a_graph():
    """The search over states adds costs in 64 bits; a file with a larger one ended in an OverflowError."""

    def graph(*costs: int) -> Graph:
        return Graph(tuple(Op("a", (), (o,), cost) for o, cost in enumerate(costs)), (Value("v", 1),) * len(costs))

    assert graph(2**59, 2**59).cost == 2**60
    with pytest.raises(GraphError, match="the costs of graph '' sum to") as caught:
        graph(2**59, 2**59, 1)
    assert caught.value.hint == "use a larger unit for costs, and name it in cost_unit"


def test_defaults_are_the_plainest_op_and_value():
    """What a file leaves out means this."""
    op, value, graph = Op("a", (), (), 1), Value("v", 1), Graph((), ())
    assert (op.workspace_bytes, op.replay_bytes, op.recomputable, op.clobbered_by) == (0, 0, True, ())
    assert (op.phase, op.kind, op.source) == ("forward", "", "")
    assert (value.base, value.kept) == (None, False)
    assert (graph.order, graph.resident_bytes, graph.cost_unit, graph.name) == ((), 0, "ns", "")


def test_a_graph_of_nodes_says_what_it_was_told():
    """Every argument of `from_dag` has its place in the ops and values."""
    graph = Graph.from_dag(
        cost=[1, 2, 3],
        size_bytes=[4, 5, 6],
        edges=iter([(1, 2), (0, 2), (0, 1), (0, 1)]),
        backward=[False, False, True],
        resident_bytes=7,
        names=["x", "y", "z"],
        kept=iter([2]),
        name="three",
    )
    assert graph == Graph(
        (Op("x", (), (0,), 1), Op("y", (0,), (1,), 2), Op("z", (0, 1), (2,), 3, phase="backward")),
        (Value("x", 4), Value("y", 5), Value("z", 6, kept=True)),
        resident_bytes=7,
        name="three",
    )
    plain = Graph.from_dag(cost=[1, 1], size_bytes=[1, 1], edges=[])
    assert plain == Graph((Op("0", (), (0,), 1), Op("1", (), (1,), 1)), (Value("0", 1), Value("1", 1)))


def test_numbers_of_numpy_are_numbers():
    """Arrays of costs and sizes come from profilers; inside they are plain integers, which JSON can write."""
    one, two = np.int64(1), np.int64(2)
    graph = Graph.from_dag(cost=np.array([1, 2]), size_bytes=np.array([3, 4]), edges=np.array([[0, 1]]))
    assert graph == Graph.from_dag(cost=[1, 2], size_bytes=[3, 4], edges=[(0, 1)])
    assert type(graph.ops[0].cost) is type(graph.values[0].size_bytes) is type(graph.ops[1].inputs[0]) is int
    op = Op("a", np.array([0]), [one], two, two, two, clobbered_by=[two])
    assert op == Op("a", (0,), (1,), 2, 2, 2, clobbered_by=(2,))
    assert all(type(i) is int for i in (*op.inputs, *op.outputs, *op.clobbered_by, op.workspace_bytes, op.replay_bytes))
    assert type(Value("v", np.int64(0), base=one).base) is int
    ordered = Graph([Op("a", (), (0,), 1), Op("b", (), (1,), 1)], [Value("v", 1), Value("w", 1)], order=np.array([[0, 1]]))
    assert ordered.order == ((0, 1),)
    assert type(ordered.order[0][0]) is type(ordered.order[0][1]) is int
    assert hash(ordered.ops) == hash(tuple(ordered.ops))
    assert type(Graph((), (), resident_bytes=np.int32(3)).resident_bytes) is int


@given(graphs())
def test_a_value_is_made_by_its_producer_and_read_by_its_readers(graph):
    """Both are the ops' own lists, read the other way round."""
    for v in range(len(graph.values)):
        assert v in graph.ops[graph.producer[v]].outputs
        assert list(graph.readers[v]) == [o for o, op in enumerate(graph.ops) if v in op.inputs]


def test_an_op_that_reads_a_value_twice_is_one_reader():
    """A reader is an op, not a read."""
    graph = Graph((Op("a", (), (0,), 1), Op("square", (0, 0), (1,), 1)), (Value("x", 1), Value("y", 1)))
    assert graph.readers == ((1,), ())


@given(graphs())
def test_a_root_owns_the_storage(graph):
    """Going from base to base ends at the one value that is no view."""
    for v, value in enumerate(graph.values):
        root = graph.root[v]
        assert graph.values[root].base is None
        assert root == (v if value.base is None else graph.root[value.base])


@given(graphs())
def test_a_view_shares_the_storage_of_its_source(graph):
    """The source has the same root, and its op reads it, or makes it with a storage; it is the base or as the base's."""
    for v, value in enumerate(graph.values):
        source = graph.storage_from[v]
        op = graph.ops[graph.producer[v]]
        assert graph.root[source] == graph.root[v]
        if value.base is None:
            assert source == v
        elif value.base in op.outputs:
            assert source == graph.storage_from[value.base]
        elif value.base in op.inputs:
            assert source == value.base
        else:
            assert source == next(u for u in op.inputs if graph.root[u] == graph.root[v])
        assert value.base is None or source in op.inputs or (source in op.outputs and graph.values[source].base is None)


@pytest.mark.parametrize("inputs", [(0, 1), (1, 0)])
def test_a_view_shares_the_storage_of_its_base_whichever_input_comes_first(inputs):
    """Another view of the base may be of an instance that was computed before."""
    ops = (Op("a", (), (0,), 1), Op("view", (0,), (1,), 0), Op("both", inputs, (2,), 0))
    assert Graph(ops, (Value("x", 4), Value("y", 0, base=0), Value("z", 0, base=0))).storage_from == (0, 0, 0)


def views(*more: Op, order: tuple[tuple[int, int], ...] = (), **changes: object) -> Graph:
    """A value, a view of it, and a view of that view that `changes` alters."""
    again = {"name": "again", "inputs": (1,), "outputs": (2,), "cost": 1, **changes}
    made = [v for op in more for v in op.outputs]
    return Graph(
        (Op("a", (), (0,), 1), Op("view", (0,), (1,), 1), Op(**again), *more),
        (Value("x", 8), Value("y", 0, 0), Value("z", 0, 0), *(Value(str(v), 1) for v in made)),
        order=order,
    )


def test_a_view_of_a_view_belongs_to_the_owner():
    """The base names the storage's owner, and the op may read another view of it."""
    graph = views()
    assert graph.root == (0, 0, 0)
    assert graph.storage_from == (0, 0, 1)
    chained = Graph(graph.ops, (Value("x", 8), Value("y", 0, 0), Value("z", 0, 1)))
    assert chained.root == (0, 0, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"recomputable": False},
        {"workspace_bytes": 1},
        {"replay_bytes": 1},
        {"clobbered_by": (3,)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_an_op_that_does_more_than_view_is_no_view_op(changes):
    """What takes memory, draws random numbers, or is tied to its place cannot be moved and repeated at will."""
    late = Op("late", (), (3,), 1)
    assert views(late).view_ops == {1, 2}
    assert views(late, **changes).view_ops == {1}


def test_view_ops_are_tied_by_rules():
    """An op that a rule names has a place; so has a view that is made through it."""
    late = Op("late", (), (3,), 1)
    assert views(late, order=((1, 3),)).view_ops == set()
    assert views(late, order=((2, 3),)).view_ops == {1}
    assert views(late, order=((0, 3),)).view_ops == {1, 2}
    clobbered = Graph(
        (Op("a", (), (0,), 1, clobbered_by=(1,)), Op("view", (0,), (1,), 1)),
        (Value("x", 8), Value("y", 0, 0)),
    )
    assert clobbered.view_ops == set()


def test_view_ops_make_views_of_one_storage_and_nothing_else():
    """An op that also makes a value of its own, reads another storage, makes nothing or reads nothing, computes something."""
    x, y, view, own = Value("x", 8), Value("y", 8), Value("view", 0, 0), Value("own", 1)
    a, b = Op("a", (), (0,), 1), Op("b", (), (1,), 1)
    assert Graph((a, b, Op("f", (0,), (2,), 1)), (x, y, view)).view_ops == {2}
    assert Graph((a, b, Op("f", (0, 0), (2, 3), 1)), (x, y, view, view)).view_ops == {2}
    assert Graph((a, b, Op("f", (0, 1), (2,), 1)), (x, y, view)).view_ops == set()
    assert Graph((a, b, Op("f", (0,), (2, 3), 1)), (x, y, view, own)).view_ops == set()
    assert Graph((a, b, Op("f", (0,), (2, 3), 1)), (x, y, view, Value("inner", 0, 2))).view_ops == {2}
    assert Graph((a, b, Op("sink", (0,), (), 1)), (x, y)).view_ops == set()
    assert Graph((Op("both", (), (0, 1), 1),), (x, Value("inner", 0, 0))).view_ops == set()


@given(graphs())
def test_a_graph_costs_each_op_once(graph):
    """What a plan costs more than this is its overhead."""
    assert graph.cost == sum(op.cost for op in graph.ops)


@given(graphs(), st.randoms())
def test_costs_and_names_do_not_change_the_digest(graph, rng):
    """A graph measured again is the same graph to a plan."""
    ops = tuple(
        Op(
            f"other {op.name}", op.inputs, op.outputs, rng.randint(0, 99), op.workspace_bytes, op.replay_bytes, op.recomputable,
            op.clobbered_by, op.phase, op.kind, "model.py:3",
        )
        for op in graph.ops
    )  # fmt: skip
    values = tuple(Value(f"other {value.name}", value.size_bytes, value.base, value.kept) for value in graph.values)
    other = Graph(ops, values, graph.order, graph.resident_bytes, cost_unit="FLOP", name="other")
    assert other.digest == graph.digest
    assert graph.digest.startswith("sha256:")
    assert len(graph.digest) == len("sha256:") + 64


def base(**changes: object) -> Graph:
    """A graph in which any fact can be changed alone."""
    facts = {"workspace_bytes": 1, "replay_bytes": 2, "recomputable": True, "clobbered_by": (), "kind": "mm"}
    facts |= {key: value for key, value in changes.items() if key in facts}
    return Graph(
        (Op("a", (), (0,), 1), Op("b", changes.get("inputs", (0,)), (1,), 1, **facts), Op("c", (), (2,), 1)),
        (Value("x", changes.get("size_bytes", 4)), Value("y", 0, changes.get("base", 0)) if "base" in changes else Value("y", 0),
         Value("z", 1, kept=bool(changes.get("kept")))),
        order=changes.get("order", ()),
        resident_bytes=changes.get("resident_bytes", 3),
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"order": ((0, 2),)},
        {"inputs": ()},
        {"workspace_bytes": 0},
        {"replay_bytes": 0},
        {"recomputable": False},
        {"clobbered_by": (2,)},
        {"kind": "add"},
        {"size_bytes": 5},
        {"base": 0},
        {"kept": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_whatever_decides_if_a_plan_is_valid_changes_the_digest(changes):
    """A plan made for a graph must not pass for one on which it may not hold."""
    assert base(**changes).digest != base().digest


def test_which_value_an_op_makes_changes_the_digest():
    """Two graphs that differ in their outputs alone free other storages."""
    values = (Value("x", 4), Value("y", 2))
    one = Graph((Op("a", (), (0,), 1), Op("b", (), (1,), 1)), values)
    other = Graph((Op("a", (), (1,), 1), Op("b", (), (0,), 1)), values)
    assert one.digest != other.digest


def test_the_digest_is_the_same_in_every_release():
    """Plans in files name their graph by it."""
    assert Graph((), ()).digest == "sha256:644a13899cf551e805278787ea912dc44d80114de504612d47dd792df59aa408"
    assert base().digest == "sha256:fb23d73e28039397b064e9ab8fe2b8f8ce17f23b742a6b6d95f8c7ed4e044864"


def test_resident_bytes_do_not_change_the_digest():
    """What else is on the device differs from process to process. Files of before have digests with it."""
    assert base(resident_bytes=4).digest == base().digest
    assert base().has_digest("sha256:009fb43a4f8bff1d07ff3f1779d9d690f12bf69450bdfabc69da052cce91b855")
    assert not base(resident_bytes=4).has_digest("sha256:009fb43a4f8bff1d07ff3f1779d9d690f12bf69450bdfabc69da052cce91b855")


@given(graphs())
def test_derived_facts_of_equal_graphs_are_equal(graph):
    """They follow from what a graph says and nothing else."""
    assume(graph.ops)
    again = Graph(graph.ops, graph.values, graph.order, graph.resident_bytes, graph.cost_unit, graph.name)
    assert (again.producer, again.root, again.readers, again.view_ops) == (
        graph.producer, graph.root, graph.readers, graph.view_ops,
    )  # fmt: skip
    assert again.digest == graph.digest


@pytest.mark.parametrize(("kinds", "boundary"), [(0, None), (1, 2), (2, None)], ids=["none", "one", "two"])
def test_the_boundary_is_the_only_op_of_its_kind(kinds, boundary):
    """A whole step has none; with more than one it is unclear where forward ends."""
    ops = [Op(f"op{o}", (o - 1,) if o else (), (o,), 1, kind=BOUNDARY if o in (2, 4)[:kinds] else "mm") for o in range(6)]
    assert Graph(tuple(ops), tuple(Value(f"v{v}", 1) for v in range(6))).boundary == boundary
