"""A budget is read once, keeps its text, and becomes bytes when the graph is known; resident memory prints what it is for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate import Graph, OptionError
from checkmate.core.budget import Budget, ResidentMemory, fixed_bytes, keep_all_bytes
from checkmate.core.units import format_at_least


def chain() -> Graph:
    """A chain with 12 bytes that no plan can change and a peak of 16 bytes if everything is kept."""
    return Graph.from_dag(cost=[1, 1, 1], size_bytes=[4, 2, 2], edges=[(0, 1), (1, 2)], kept=[2], resident_bytes=10)


@pytest.mark.parametrize(
    ("amount", "text", "total_bytes", "percentage"),
    [
        (" 1 KiB ", "1 KiB", 1024, None),
        (7, "7 bytes", 7, None),
        (8.0, "8 bytes", 8, None),
        (" 70 % ", "70 %", None, 70.0),
        ("0%", "0%", None, 0.0),
        ("0", "0", 0, None),
    ],
    ids=repr,
)
def test_a_budget_is_a_total_or_a_share_and_prints_as_it_was_written(amount, text, total_bytes, percentage):
    """Messages repeat the words of the user; a bare number gets its unit."""
    budget = Budget.parse(amount)
    assert (budget.text, str(budget)) == (text, text)
    assert (budget.total_bytes, budget.percentage) == (total_bytes, percentage)


@pytest.mark.parametrize("both", [{}, {"total_bytes": 0, "percentage": 0.0}], ids=["neither", "both"])
def test_a_budget_of_neither_or_both_is_refused(both):
    """Without exactly one of the two, `resolve` could not tell how many bytes it is."""
    with pytest.raises(OptionError) as caught:
        Budget("x", **both)
    assert caught.value.message == "a budget is either a total or a share"
    assert caught.value.hint == "use Budget.parse('8GiB') or Budget.parse('70%')"


@pytest.mark.parametrize(
    ("amount", "words", "has_no_unit"),
    [
        ("50%", "50% of what can be given up: 14 B of 16 B in all", False),
        ("50 %", "50 % of what can be given up: 14 B of 16 B in all", False),
        (" 14 B ", "14 B", False),
        ("14", "14 B", True),
        (14, "14 B", True),
        (7, "7 B", True),
        ("1e9", "953.67 MiB", True),
        (14.0, "14 B", True),
        ("8GiB", "8.00 GiB", False),
        ("8G", "8.00 GiB", False),
    ],
    ids=repr,
)
def test_a_share_is_told_as_itself_and_a_number_alone_has_no_unit(amount, words, has_no_unit):
    """No user who wrote "50%" knows 14 bytes again, or forgot their unit; what is known of it in bytes is told beside it."""
    budget = Budget.parse(amount)
    assert budget.describe(budget.resolve(chain()), 16) == words
    assert budget.has_no_unit == has_no_unit
    known = Budget(budget.text, total_bytes=budget.resolve(chain()))
    assert (known.describe(budget.resolve(chain()), 16), known.has_no_unit) == (words, has_no_unit)


def test_a_share_is_rounded_down_between_what_is_fixed_and_the_peak():
    """A total needs neither amount."""
    assert (fixed_bytes(chain()), keep_all_bytes(chain())) == (12, 16)
    assert [Budget.parse(f"{p}%").resolve(chain()) for p in (0, 24, 25, 100, 200)] == [12, 12, 13, 16, 20]
    assert Budget.parse("33%").within(fixed_bytes=100, keep_all_bytes=200) == 133
    assert Budget.parse(7).resolve(chain()) == 7
    assert Budget.parse(0).within(fixed_bytes=100, keep_all_bytes=200) == 0
    assert Budget.parse("0%").within(fixed_bytes=100, keep_all_bytes=200) == 100


def test_resident_memory_lists_each_part_that_is_there():
    """In the order of the fields, with the names of the fields; nothing after the total if nothing is resident."""
    names = ("parameters", "inputs", "gradients", "optimizer", "wrappers", "in_flight", "reserve", "other")
    memory = ResidentMemory(**{f"{name}_bytes": 1024 * 2**i for i, name in enumerate(names)})
    assert memory.total_bytes == 1024 * 255
    assert str(memory) == (
        "255.00 KiB resident: parameters 1.00 KiB, inputs 2.00 KiB, gradients 4.00 KiB, optimizer 8.00 KiB, "
        "wrappers 16.00 KiB, in flight 32.00 KiB, reserve 64.00 KiB, other 128.00 KiB"
    )
    assert str(ResidentMemory(in_flight_bytes=5)) == "5 B resident: in flight 5 B"
    assert (ResidentMemory().total_bytes, str(ResidentMemory())) == (0, "0 B resident")


def test_a_share_refers_to_the_graph_that_it_was_resolved_for():
    """A variant of the graph, such as one with ops in pieces, has another peak of keeping everything."""
    known = Budget.parse("10%").with_total(13, chain())
    larger = Graph.from_dag(cost=[1, 1], size_bytes=[400, 200], edges=[(0, 1)])
    assert known.at_least(14, larger) == Budget.parse("10%").at_least(14, chain())
    assert known.reference(larger) == (fixed_bytes(chain()), keep_all_bytes(chain()))


def test_more_than_everything_takes_is_named_in_bytes():
    """A share of 100 % and more would not be enough: something beside the graph takes memory. A share of 0 % says nothing."""
    for size in (fixed_bytes(chain()), keep_all_bytes(chain())):
        assert Budget.parse("10%").at_least(size, chain()) == f"{size}B"


@given(st.integers(0, 10**6), st.integers(2, 10**6), st.data())
def test_a_hinted_share_is_enough_and_a_tenth_of_a_per_cent_less_is_not(fixed, above, data):
    """What a hint suggests works when typed back, to the byte."""
    size = data.draw(st.integers(fixed + 1, fixed + above - 1))
    asked = Budget("10%", percentage=10.0, share_of=(fixed, fixed + above))
    share, _, total = asked.at_least(size, chain()).partition(" ")
    tenths = round(10 * float(share.removesuffix("%")))
    assert (share, total) == (f"{tenths / 10:g}%", f"({format_at_least(size)})")
    enough, less = (
        Budget.parse(f"{t / 10}%").within(fixed_bytes=fixed, keep_all_bytes=fixed + above) for t in (tenths, tenths - 1)
    )
    assert less < size <= enough


def test_a_share_counts_with_its_decimals():
    """89.6 % of 2875 bytes are 2576: as a binary fraction it is a little less, and the last byte would be missing."""
    assert Budget.parse("89.6%").within(fixed_bytes=0, keep_all_bytes=2875) == 2576


def test_a_total_refers_to_nothing():
    """It is the same number of bytes for every graph."""
    assert Budget.parse("1KiB").reference(chain()) == (0, 0)


@pytest.mark.parametrize(
    ("amount", "keeps"), [("100%", True), ("100.5%", True), ("99.9%", False), ("1TiB", False), (100, False)], ids=repr
)
def test_a_budget_that_keeps_everything_is_a_share_of_100_percent(amount, keeps):
    """Such a step needs no plan; of a total it is not known before its graph is."""
    assert Budget.parse(amount).keeps_everything is keeps
