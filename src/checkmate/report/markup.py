"""HTML as a type of text: what is put into it is escaped. No other module of the report escapes or joins HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable


class Markup(str):
    """HTML, or a template of HTML. Text that is formatted into it or joined by it is escaped, unless it is `Markup` itself.

    Examples:
        >>> Markup("<td>{}</td>").format("a < b")
        '<td>a &lt; b</td>'
        >>> Markup(", ").join([Markup("<b>1</b>"), "<b>"])
        '<b>1</b>, &lt;b&gt;'
    """

    __slots__ = ()

    def format(self, *values: object, **named: object) -> Markup:
        """The template with values in its fields."""
        return Markup(super().format(*map(_safe, values), **{name: _safe(value) for name, value in named.items()}))

    def join(self, parts: Iterable[str], /) -> Markup:
        """The parts with this between them."""
        return Markup(super().join(str(_safe(part)) for part in parts))


def _safe(value: object) -> object:
    """A number or `Markup` as it is, everything else as escaped text."""
    return value if isinstance(value, Markup | int | float) else html.escape(str(value))
