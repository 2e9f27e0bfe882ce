"""Amounts of memory and cost as people read and write them; all other modules count integers."""

from __future__ import annotations

import math
import operator
import re

from checkmate.core.errors import UnitError, shortened

_PREFIXES = ("", "k", "m", "g", "t")
_BINARY = {prefix + end: 1024**power for power, prefix in enumerate(_PREFIXES) if power for end in ("", "i", "ib")}
_UNITS = {**_BINARY, **{f"{prefix}b": 1000**power for power, prefix in enumerate(_PREFIXES)}}
MOST_BYTES = 2**62
"""Largest amount in bytes: the sum of two amounts still fits in 64 bits."""
_TIMES = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9}
_AMOUNT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z%]*)\s*\Z")
_HINT = "write an amount such as '8GiB', '512 MB' or '70%', or give an integer number of bytes"

Amount = int | float | str
"""Type of a budget as users write it: a number of bytes, or text such as ``"8GiB"`` or ``"70%"``."""


def parse_bytes(amount: Amount) -> int:
    """Bytes of an amount: ``"8GiB"`` is 8 * 2**30, ``"8GB"`` is 8 * 10**9, a number is bytes.

    ``"8G"`` and ``"8Gi"`` are ``"8GiB"``: Slurm, Docker, Kubernetes, Java and the GNU tools read them this way.

    Raises:
        UnitError: The text cannot be read, or the amount is negative, not whole, or more than 2**62 bytes.

    Examples:
        >>> parse_bytes("1.5 KiB"), parse_bytes("2GB"), parse_bytes("2G"), parse_bytes(7)
        (1536, 2000000000, 2147483648, 7)
    """
    if not isinstance(amount, str):
        return _whole(amount)
    number, unit = _split(amount)
    if unit == "%":
        raise UnitError(f"{amount!r} is a share, and an amount in bytes is needed here", hint=_HINT.replace(" or '70%'", ""))
    if not unit:
        return _whole(number, amount)
    scale = _UNITS.get(unit.lower())
    if scale is None:
        raise UnitError(f"unknown unit {unit!r} in {amount!r}", hint=_HINT)
    if number * scale > MOST_BYTES:
        raise _too_much(amount)
    return round(number * scale)


def parse_percentage(text: str) -> float:
    """Per cent of a share: 70.0 for ``"70%"``.

    Raises:
        UnitError: The text cannot be read as a share, or is more than 100,000 %.

    Examples:
        >>> parse_percentage("70%")
        70.0
    """
    number, unit = _split(text)
    if unit != "%":
        raise UnitError(f"cannot read {text!r} as a share", hint=_HINT)
    if number > 100_000:
        raise UnitError(f"{text!r} is more than 100000%", hint="give 100%, which keeps everything, or less")
    return number


def format_bytes(size_bytes: int) -> str:
    """An amount for people, in binary units.

    Examples:
        >>> format_bytes(0), format_bytes(1536), format_bytes(8 * 2**30)
        ('0 B', '1.50 KiB', '8.00 GiB')
    """
    size = float(size_bytes)
    if abs(size) < 1024:
        return f"{size_bytes} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if abs(size) < 1024:
            return f"{size:.2f} {unit}"
    return f"{size / 1024:.2f} TiB"


def format_at_least(size_bytes: int) -> str:
    """An amount for hints, which `parse_bytes` reads as at least ``size_bytes``.

    Examples:
        >>> format_at_least(2**30 + 1), parse_bytes(format_at_least(2**30 + 1)) > 2**30
        ('1.01GiB', True)
    """
    scale, unit = next(((s, u) for u, s in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)) if size_bytes >= s), (1, "B"))
    if scale == 1:
        return f"{size_bytes}{unit}"
    hundredths = -(-size_bytes * 100 // scale)
    return f"{hundredths // 100}.{hundredths % 100:02d}{unit}"


def format_cost(cost: float, unit: str) -> str:
    """A cost in the graph's unit; times in the unit that reads best.

    Examples:
        >>> format_cost(1_500, "ns"), format_cost(2.5e9, "ns"), format_cost(12, "FLOP")
        ('1.5 µs', '2.50 s', '12 FLOP')
    """
    scale = _TIMES.get(unit)
    if scale is None:
        return f"{cost:.4g} {unit}".strip() if cost >= 1e5 else f"{cost:.0f} {unit}".strip()
    nanoseconds = cost * scale
    for size, name, digits in ((1e9, "s", 2), (1e6, "ms", 1), (1e3, "µs", 1)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.{digits}f} {name}"
    return f"{nanoseconds:.0f} ns"


def seconds(cost: float, unit: str) -> float | None:
    """A cost in seconds; None if its unit is not one of time.

    Examples:
        >>> seconds(2500, "ms"), seconds(12, "FLOP")
        (2.5, None)
    """
    return cost * _TIMES[unit] / 10**9 if unit in _TIMES else None


def _split(text: str) -> tuple[float, str]:
    match = _AMOUNT.match(text)
    if match is None:
        raise UnitError(f"cannot read {text!r} as an amount of memory", hint=_HINT)
    number = float(match[1])
    if math.isinf(number):
        raise _too_much(text)
    return number, match[2]


def _whole(amount: int | float, written: Amount | None = None) -> int:
    """Bytes of a number without a unit, which the user may have written in another way."""
    written = amount if written is None else written
    if isinstance(amount, bool):
        raise UnitError(f"{amount!r} is not an amount of memory", hint=_HINT)
    if isinstance(amount, float) and 0 < amount <= 1 and str(written).strip() != "1":
        hint = f"did you mean '{100 * amount:g}%'? Otherwise write an amount such as '8GiB'"
        raise UnitError(f"{written!r} means {int(amount)} byte{'s' * (amount < 1)}", hint=hint)
    if isinstance(amount, float) and amount.is_integer():
        amount = int(amount)
    try:
        whole = operator.index(amount)  # type: ignore[arg-type]
    except TypeError:
        raise UnitError(f"{written!r} is not a whole number of bytes", hint=_HINT) from None
    if whole < 0:
        raise UnitError(f"{amount} bytes is negative", hint=_HINT)
    if whole > MOST_BYTES:
        raise _too_much(written)
    return whole


def _too_much(amount: Amount) -> UnitError:
    return UnitError(f"{shortened(repr(amount))} is too much to be an amount of memory", hint=_HINT)
