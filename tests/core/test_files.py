"""Files: what is written is read back, what cannot be read is refused in words, nothing is half written."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

import checkmate
from checkmate import Curve, FileFormatError, Graph, Plan, Problem, WrongGraphError, simulate, solve
from checkmate.core.errors import shortened
from checkmate.core.files import formats, read_as, schema, schema_of, write_atomically
from checkmate.core.result import Measured
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


def test_a_measured_result_round_trips(tmp_path):
    """What steps measured stays with the plan; a result without it is written as by releases that know no measurements."""
    result = solve(Problem(chain(), "100%"))
    checkmate.write(result, tmp_path / "r.json")
    assert "measured" not in json.loads((tmp_path / "r.json").read_text())
    measured = Measured(peak_bytes=12, seconds=0.5, planned_s=0.4, curve=((0.0, 4), (1.0, 12)))
    checkmate.write(msgspec.structs.replace(result, measured=measured), tmp_path / "m.json")
    assert checkmate.read(tmp_path / "m.json").measured == measured
    assert repr(checkmate.read(tmp_path / "m.json")).endswith("; op costs sum to 0.80 of the measured 500.0 ms>")


def test_a_plan_is_refused_for_another_graph(tmp_path):
    """The digest of the graph is in the plan's file."""
    plan = solve(Problem(chain(4), "100%")).plan
    checkmate.write(plan, tmp_path / "p.json")
    with pytest.raises(WrongGraphError, match="made for another graph"):
        simulate(chain(5), read_as(tmp_path / "p.json", Plan))


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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            '{"format": "checkmate.graph/9"}',
            "format 'checkmate.graph/9' is not read here; this release reads checkmate.graph/1, checkmate.plan/1, "
            "checkmate.result/1, checkmate.curve/1, checkmate.plan/2, checkmate.result/2, checkmate.curve/2, checkmate.graph/2"
            "\n\nhint: upgrade checkmate-remat if the file is newer",
        ),
        (
            "",
            "not a Checkmate file, or cut short: Input data was truncated"
            "\n\nhint: write it again with `checkmate.write` or `checkmate capture`",
        ),
        ('{"format": "checkmate.plan/1"}', "Object missing required field `steps`"),
    ],
)
def test_the_whole_message_of_a_file_that_cannot_be_read(tmp_path, text, says):
    """The file, what is wrong with it, and what to do."""
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(FileFormatError) as caught:
        checkmate.read(path)
    assert str(caught.value) == f"{path}: {says}"


@pytest.mark.parametrize("data", [b"\xff\xfe", b'{"format": "\xff"}', b"[" * 100_000], ids=["binary", "not unicode", "deep"])
def test_what_is_no_text_is_refused_too(tmp_path, data):
    """A picture, or a file made to crash a parser."""
    path = tmp_path / "bad.json"
    path.write_bytes(data)
    with pytest.raises(FileFormatError, match="not a Checkmate file, or cut short"):
        checkmate.read(path)


def test_a_curve_that_rises_is_refused_with_the_name_of_its_file(tmp_path):
    """What a value checks of itself is checked when it is read."""
    plan = {"steps": [], "graph_digest": ""}
    point = {
        "budget_bytes": 1,
        "cost": 1,
        "overhead": 1.0,
        "bound": 1.0,
        "gap": 0.0,
        "peak_bytes": 1,
        "plan": plan,
        "elapsed_s": 0.0,
    }
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"format": "checkmate.curve/1", "points": [point, point], "graph_digest": ""}))
    with pytest.raises(FileFormatError) as caught:
        checkmate.read(path)
    assert str(caught.value).startswith(f"{path}: the points at 1 and 1 bytes are no part of a curve")
    path.write_text(json.dumps({"format": "checkmate.curve/1", "points": [point], "graph_digest": "d"}))
    assert read_as(path, Curve).points[0].budget_bytes == 1


def test_the_same_value_is_the_same_bytes(tmp_path):
    """The format comes first, the line ends with a line feed: files can be compared and concatenated."""
    graph = Graph.from_dag(cost=[1], size_bytes=[4], edges=[], names=["a"])
    for name in ("one.json", "two.json"):
        checkmate.write(graph, str(tmp_path / name))
    data = (tmp_path / "one.json").read_bytes()
    assert data == (tmp_path / "two.json").read_bytes()
    assert data == (
        b'{"format":"checkmate.graph/1","ops":[{"name":"a","inputs":[],"outputs":[0],"cost":1}],'
        b'"values":[{"name":"a","size_bytes":4}],"order":[],"resident_bytes":0,"cost_unit":"ns","name":""}\n'
    )


def test_a_failed_write_leaves_the_old_file(tmp_path, fails):
    """A file is there whole or not at all."""
    path = tmp_path / "g.json"
    checkmate.write(chain(), path)
    before = path.read_bytes()

    fails("os.fsync", OSError("disk full"))
    with pytest.raises(OSError, match="disk full"):
        checkmate.write(chain(6), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["g.json"]


def test_the_data_is_on_the_disk_before_the_name_is(tmp_path, before_fsync):
    """A crash between the two must not leave an empty file under the name; while it is written it lies beside, hidden."""
    path = tmp_path / "g.json"
    seen: list[tuple[list[str], int]] = []

    def look(handle: int) -> None:
        seen.append(([entry.name for entry in tmp_path.iterdir()], os.fstat(handle).st_size))

    before_fsync(look)
    write_atomically(path, b"x" * 10)
    (((name,), size),) = seen
    assert name.startswith(".g.json.")
    assert size == 10
    assert path.read_bytes() == b"x" * 10


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o000])
def test_a_file_is_readable_as_the_umask_says(tmp_path, mask):
    """A temporary file is private; what it becomes is a file like any other, and the umask stays what it was."""
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "g.json", b"{}")
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "g.json").stat().st_mode) == 0o666 & ~mask


def test_a_temporary_file_that_is_gone_is_no_second_error(tmp_path, before_fsync):
    """The first error is the one to see."""
    path = tmp_path / "g.json"

    def fail(*_: object) -> None:
        for entry in tmp_path.iterdir():
            entry.unlink()
        raise OSError("disk full")

    before_fsync(fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"{}")


def test_only_graphs_plans_results_and_curves_are_written(tmp_path):
    """Anything else is a mistake of the caller."""
    with pytest.raises(TypeError) as refused:
        checkmate.write({"a": 1}, tmp_path / "x.json")
    assert str(refused.value) == "a dict is no graph, plan, result or curve"
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_kind_is_refused_by_name(tmp_path):
    """Both kinds are named as people call them."""
    path = tmp_path / "g.json"
    checkmate.write(chain(), path)
    with pytest.raises(FileFormatError) as caught:
        read_as(path, Plan)
    assert caught.value.message == f"{path}: holds a graph, not a plan"
    assert caught.value.hint == "write one with `checkmate plan`"
    assert read_as(path, Graph) == chain()


def test_a_file_that_is_not_there_is_the_systems_error(tmp_path):
    """It names the file already."""
    with pytest.raises(FileNotFoundError):
        checkmate.read(tmp_path / "none.json")


def test_every_kind_has_one_format():
    """A new version is a new name; the old one goes on being read."""
    first = ("checkmate.graph/1", "checkmate.plan/1", "checkmate.result/1", "checkmate.curve/1")
    assert formats() == (*first, "checkmate.plan/2", "checkmate.result/2", "checkmate.curve/2", "checkmate.graph/2")
    with pytest.raises(KeyError):
        schema("checkmate.graph/0")


def test_a_schema_names_its_format_first():
    """A tool that knows only JSON Schema tells the formats apart by it."""
    document = schema("checkmate.plan/1")
    assert list(document)[:2] == ["$id", "title"]
    assert document["$id"] == document["title"] == "checkmate.plan/1"
    definition = document["$defs"]["Plan"]
    assert next(iter(definition["properties"].items())) == ("format", {"const": "checkmate.plan/1"})
    assert definition["required"] == ["format", "steps"]


def test_a_kind_without_required_fields_requires_its_format():
    """Other files of the house are described in the same way."""

    class Settings(msgspec.Struct):
        depth: int = 3

    document = schema_of("settings/2", Settings)
    assert document["$defs"]["Settings"]["required"] == ["format"]
    assert list(document["$defs"]["Settings"]["properties"]) == ["format", "depth"]


@pytest.mark.parametrize("name", formats())
def test_the_published_schema_is_the_code(name):
    """The JSON Schema in the docs changes only with the version of the format."""
    path = SCHEMAS / f"{name.replace('/', '.').removeprefix('checkmate.')}.json"
    assert json.loads(path.read_text()) == json.loads(json.dumps(schema(name)))


@pytest.mark.parametrize("figure", [10**400, 2**62 + 1, -1], ids=["huge", "2**62+1", "-1"])
@pytest.mark.parametrize("name", ["budget_bytes", "peak_bytes", "cost", "floor_bytes"])
def test_figures_of_results_and_curves_are_amounts(tmp_path, name, figure):
    """What cannot be a number of bytes or a cost is not drawn: a float does not hold it."""
    graph = Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[(0, 1)])
    curve = checkmate.pareto(graph, points=2)
    path = tmp_path / "x.json"
    for content in (solve(Problem(graph, "100%")), msgspec.structs.replace(curve, points=curve.points[:1])):
        checkmate.write(content, path)
        document = json.loads(path.read_text())
        holder = document["points"][0] if "points" in document and name != "floor_bytes" else document
        if name not in holder:
            continue
        holder[name] = 2**62
        path.write_text(json.dumps(document))
        assert checkmate.read(path)
        holder[name] = figure
        path.write_text(json.dumps(document))
        with pytest.raises(FileFormatError) as caught:
            checkmate.read(path)
        assert str(caught.value) == f"{path}: {name} {shortened(str(figure))} is not between 0 and {2**62}"
