"""Amounts of memory and cost: what people write is read exactly, what is printed reads back."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate import Graph, Problem, UnitError, format_bytes, parse_bytes
from checkmate.core.budget import Budget
from checkmate.core.units import format_at_least, format_cost

HINT = "\n\nhint: write an amount such as '8GiB', '512 MB' or '70%', or give an integer number of bytes"
UNITS = {
    "": 1, "B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4,
    "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4,
    "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4, "Ki": 1024, "Mi": 1024**2, "Gi": 1024**3, "Ti": 1024**4,
}  # fmt: skip


@given(
    st.integers(0, 999), st.sampled_from(sorted(UNITS)), st.sampled_from([str, str.lower, str.upper]), st.sampled_from(["", " "])
)
def test_a_number_and_its_unit_multiply(number, unit, case, space):
    """Only a B without an i makes a unit decimal; case and a space say nothing. "8G" is what Slurm and Docker take it for."""
    assert parse_bytes(f" {number}{space}{case(unit)} ") == number * UNITS[unit]


@pytest.mark.parametrize(
    ("amount", "size"),
    [
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("1.5MiB", 3 * 2**19),
        (".5KiB", 512),
        ("0.1KiB", 102),
        ("12e9", 12 * 10**9),
        ("1E+3", 1000),
        (12e9, 12 * 10**9),
        (0.0, 0),
        (5, 5),
        ("7B", 7),
        ("0", 0),
        (" 1 ", 1),
        (np.int64(3), 3),
        (2**62, 2**62),
        ("4194304TiB", 2**62),
    ],
    ids=repr,
)
def test_amounts_as_people_write_them(amount, size):
    """Binary and decimal units, spaces, any case, numbers; a fraction of a byte is rounded."""
    read = parse_bytes(amount)
    assert read == size
    assert type(read) is int


@pytest.mark.parametrize(
    ("amount", "says"),
    [
        ("", "cannot read '' as an amount of memory"),
        ("lots", "cannot read 'lots' as an amount of memory"),
        ("GiB", "cannot read 'GiB' as an amount of memory"),
        ("-1", "cannot read '-1' as an amount of memory"),
        ("1 000", "cannot read '1 000' as an amount of memory"),
        ("1e999", "'1e999' is too much to be an amount of memory"),
        ("8 GiBs", "unknown unit 'GiBs' in '8 GiBs'"),
        ("70%", "'70%' is a share, and an amount in bytes is needed here"),
        (True, "True is not an amount of memory"),
        (-1, "-1 bytes is negative"),
        (-2.0, "-2 bytes is negative"),
        (1.5, "1.5 is not a whole number of bytes"),
        (None, "None is not a whole number of bytes"),
        (float("nan"), "nan is not a whole number of bytes"),
        (float("inf"), "inf is not a whole number of bytes"),
        ("1.5", "'1.5' is not a whole number of bytes"),
        ("1e308GiB", "'1e308GiB' is too much to be an amount of memory"),
        ("9999999999TiB", "'9999999999TiB' is too much to be an amount of memory"),
        ("1e300", "'1e300' is too much to be an amount of memory"),
        (1e300, "1e+300 is too much to be an amount of memory"),
        (2**62 + 1, f"{2**62 + 1} is too much to be an amount of memory"),
    ],
    ids=repr,
)
def test_amounts_that_cannot_be_read_are_refused_with_a_hint(amount, says):
    """The message has the text, the hint an example."""
    with pytest.raises(UnitError) as caught:
        parse_bytes(amount)
    assert str(caught.value) == says + (HINT.replace(" or '70%'", "") if "a share" in says else HINT)


@pytest.mark.parametrize(
    ("amount", "share"),
    [(0.5, "50%"), ("0.5", "50%"), (" .75 ", "75%"), ("1e-3", "0.1%"), (0.999, "99.9%"), (1.0, "100%"), ("1.0", "100%")],
    ids=repr,
)
def test_a_fraction_of_a_byte_is_taken_for_a_share_that_was_meant(amount, share):
    """PyTorch's own memory budget is a number from 0 to 1; as bytes it would be none, and refused for another reason."""
    with pytest.raises(UnitError) as caught:
        Budget.parse(amount)
    assert caught.value.message == f"{amount!r} means {'1 byte' if float(amount) == 1 else '0 bytes'}"
    assert caught.value.hint.startswith(f"did you mean {share!r}? Otherwise write an amount such as '8GiB'")


@pytest.mark.parametrize("percent", ["1e308", "1e9", "9" * 100, "100000.5"])
def test_a_share_without_measure_is_refused(percent):
    """It would be more bytes than 64 bits count."""
    with pytest.raises(UnitError) as caught:
        Budget.parse(f"{percent}%")
    assert caught.value.message == f"'{percent}%' is more than 100000%"
    assert caught.value.hint == "give 100%, which keeps everything, or less"
    assert Budget.parse("100000%").within(fixed_bytes=0, keep_all_bytes=2**60) == 2**62


@given(st.integers(0, 10**6), st.integers(0, 2**40), st.integers(0, 100))
def test_a_share_counts_above_what_no_plan_can_change(fixed, above, percent):
    """'50%' halves what a plan can change, not what is there anyway; a fraction of a byte is not there."""
    read = Budget.parse(f"{percent}%").within(fixed_bytes=fixed, keep_all_bytes=fixed + above)
    assert read == fixed + above * percent // 100


def test_a_budget_is_a_share_or_an_amount():
    """Spaces around and before the sign; what has no sign is bytes, whatever is resident."""
    assert Budget.parse("50%").within(fixed_bytes=100, keep_all_bytes=300) == 200
    assert Budget.parse(" 70 % ").within(fixed_bytes=0, keep_all_bytes=10) == 7
    assert Budget.parse("1KiB").within(fixed_bytes=100, keep_all_bytes=300) == 1024
    assert Budget.parse(5).within(fixed_bytes=100, keep_all_bytes=300) == 5
    chain = Graph.from_dag(cost=[1, 1], size_bytes=[4, 4], edges=[(0, 1)], resident_bytes=10)
    assert Problem(chain, "50%").budget_bytes == 14


@pytest.mark.parametrize(
    ("amount", "says"),
    [
        ("x%", "cannot read 'x%' as an amount of memory"),
        ("5 GiB%", "cannot read '5 GiB%' as a share"),
        ("5%%", "cannot read '5%%' as a share"),
    ],
)
def test_a_share_that_cannot_be_read_is_refused(amount, says):
    """A percent sign makes it a share, and then it is nothing else."""
    with pytest.raises(UnitError) as caught:
        Budget.parse(amount).within(fixed_bytes=0, keep_all_bytes=10)
    assert str(caught.value) == says + HINT


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20 - 2**10, "1023.00 KiB"),
        (2**20, "1.00 MiB"),
        (2**30, "1.00 GiB"),
        (2**40, "1.00 TiB"),
        (2**50, "1024.00 TiB"),
        (-1023, "-1023 B"),
        (-1536, "-1.50 KiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_an_amount_is_printed_in_the_largest_binary_unit_it_fills(size, text):
    """Three digits before the point are the most that one reads at a glance; a difference may be negative."""
    assert format_bytes(size) == text


@given(st.integers(0, 2**60))
def test_what_is_printed_reads_back_to_two_decimals(size):
    """A figure in a message may be typed back as a budget."""
    printed = format_bytes(size)
    scale = UNITS[printed.split()[1]]
    assert abs(parse_bytes(printed) - size) <= scale / 200 + 1


@given(st.integers(0, 2**50))
def test_a_hinted_budget_is_enough_and_not_a_hundredth_more(size):
    """What an error suggests must work when typed back, and not ask for more than its two decimals need."""
    hinted = format_at_least(size)
    unit = hinted.lstrip("0123456789.")
    assert size <= parse_bytes(hinted) <= size + math.ceil(Fraction(UNITS[unit], 100))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1.00KiB"),
        (1025, "1.01KiB"),
        (2**20 - 1, "1024.00KiB"),
        (2**20, "1.00MiB"),
        (2**30, "1.00GiB"),
        (2**30 + 1, "1.01GiB"),
        (2**40, "1024.00GiB"),
        (5 * 2**30 // 4, "1.25GiB"),
    ],
)
def test_a_hinted_budget_is_one_word(size, text):
    """A shell splits at spaces, so a hint that is typed back has none."""
    assert format_at_least(size) == text


@pytest.mark.parametrize(
    ("cost", "unit", "text"),
    [
        (0, "ns", "0 ns"),
        (999, "ns", "999 ns"),
        (999.6, "ns", "1000 ns"),
        (1_000, "ns", "1.0 µs"),
        (1_549, "ns", "1.5 µs"),
        (999_949, "ns", "999.9 µs"),
        (1_000_000, "ns", "1.0 ms"),
        (1_000_000_000, "ns", "1.00 s"),
        (2.5e9, "ns", "2.50 s"),
        (3, "us", "3.0 µs"),
        (3, "µs", "3.0 µs"),
        (3, "ms", "3.0 ms"),
        (3, "s", "3.00 s"),
        (12, "FLOP", "12 FLOP"),
        (99_999.4, "FLOP", "99999 FLOP"),
        (1e5, "FLOP", "1e+05 FLOP"),
        (123_456_789, "FLOP", "1.235e+08 FLOP"),
        (12, "", "12"),
        (2e5, "", "2e+05"),
    ],
)
def test_a_time_is_printed_in_the_largest_unit_it_fills_and_other_costs_in_their_own(cost, unit, text):
    """Costs are times, operations, or have no unit at all; only times have units to choose from."""
    assert format_cost(cost, unit) == text
