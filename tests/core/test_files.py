"""Files: what is written is read back, what cannot be read is refused in words, nothing is half written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

import checkmate
from checkmate import FileFormatError, Graph, Plan, Problem, WrongGraphError, simulate, solve
from checkmate.core.files import formats, read_as, schema
from tests.strategies import graphs_and_orders

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=graphs_and_orders())
def test_a_round_trip_is_the_identity(tmp_path, drawn):
    """Graph and plan come back equal, digest included."""
    graph, order = drawn
    plan = Plan.from_order(graph, order)
    checkmate.write(graph, tmp_path / "g.json")
    checkmate.write(plan, tmp_path / "p.json")
    assert checkmate.read(tmp_path / "g.json") == graph
    assert checkmate.read(tmp_path / "p.json") == plan
    assert checkmate.read(tmp_path / "g.json").digest == graph.digest


def chain(count: int = 4) -> Graph:
    """A chain whose last value is kept."""
    return Graph.from_dag(
        cost=[1] * count, size_bytes=[4] * count, edges=[(i, i + 1) for i in range(count - 1)], kept=[count - 1]
    )


def test_a_result_round_trips(tmp_path):
    """A result is a file too, with its plan and its history."""
    result = solve(Problem(chain(), "100%"))
    checkmate.write(result, tmp_path / "r.json")
    assert checkmate.read(tmp_path / "r.json") == result


def test_a_plan_is_refused_for_another_graph(tmp_path):
    """The digest of the graph is in the plan's file."""
    plan = solve(Problem(chain(4), "100%")).plan
    checkmate.write(plan, tmp_path / "p.json")
    with pytest.raises(WrongGraphError, match="made for another graph"):
        simulate(chain(5), read_as(tmp_path / "p.json", Plan))


def test_costs_and_names_do_not_change_the_digest():
    """A graph measured again is the same graph to a plan."""
    one = chain()
    two = Graph.from_dag(cost=[9] * 4, size_bytes=[4] * 4, edges=[(0, 1), (1, 2), (2, 3)], names=list("abcd"), kept=[3], name="x")
    assert one.digest == two.digest
    assert chain(5).digest != one.digest


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a Checkmate file, or cut short"),
        ('{"format": "checkmate.graph/1", "ops": [', "cut short"),
        ("[]", "not a Checkmate file"),
        ('{"ops": []}', "not a Checkmate file"),
        ('{"format": "checkmate.graph/9"}', "reads checkmate.graph/1, checkmate.plan/1, checkmate.result/1"),
        ('{"format": "checkmate.graph/1", "ops": []}', "missing required field `values`"),
        ('{"format": "checkmate.graph/1", "ops": [], "values": [], "extra": 1}', "unknown field `extra`"),
        (
            '{"format": "checkmate.graph/1", "ops": [{"name": "a", "inputs": [5], "outputs": [], "cost": 1}], "values": []}',
            "reads value 5",
        ),
        ('{"format": "checkmate.graph/1", "ops": [], "values": [{"name": "v", "size_bytes": -1}]}', "must be zero or more"),
        ('{"format": "checkmate.graph/1", "ops": [], "values": [{"name": "v", "size_bytes": 1.5}]}', "Expected `int`"),
        ('{"format": "checkmate.plan/1", "steps": [{"step": "jump", "op": 1}]}', "Invalid value 'jump'"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(tmp_path, text, says):
    """Truncated, foreign, too new, or wrong inside: one error, with the file's name."""
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(FileFormatError) as caught:
        checkmate.read(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    """A file is there whole or not at all."""
    path = tmp_path / "g.json"
    checkmate.write(chain(), path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        checkmate.write(chain(6), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["g.json"]


def test_only_graphs_plans_and_results_are_written(tmp_path):
    """Anything else is a mistake of the caller."""
    with pytest.raises(TypeError):
        checkmate.write({"a": 1}, tmp_path / "x.json")
    checkmate.write(chain(), tmp_path / "g.json")
    with pytest.raises(FileFormatError, match="holds a graph, not a plan"):
        read_as(tmp_path / "g.json", Plan)


@pytest.mark.parametrize("name", formats())
def test_the_published_schema_is_the_code(name):
    """The JSON Schema in the docs changes only with the version of the format."""
    path = SCHEMAS / f"{name.replace('/', '.').removeprefix('checkmate.')}.json"
    assert json.loads(path.read_text()) == json.loads(json.dumps(schema(name)))
