"""Figures as SVG text that follows the reader's light or dark theme."""

from __future__ import annotations

import io
import re

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

_INK = "#010203"
_THEME = "svg { color: #24292f } @media (prefers-color-scheme: dark) { svg { color: #d0d7de } }"


def themed_svg(figure: Figure, *, standalone: bool = True) -> str:
    """A figure as one SVG element on no background, whose ink is the text colour around it.

    Args:
        figure: The figure; everything black in it takes the theme's colour.
        standalone: Whether the SVG brings both themes along; inside an HTML page it takes the page's colour.

    Returns:
        The element, the same text for the same figure.
    """
    stream = io.StringIO()
    figure.patch.set_alpha(0.0)
    for ax in figure.axes:
        ax.patch.set_alpha(0.0)
        _ink(ax)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "checkmate", "font.family": "sans-serif"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    if standalone:
        text = re.sub(r"(<svg[^>]*>)", lambda match: f"{match[1]}<style>{_THEME}</style>", text, count=1)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def _ink(ax: Axes) -> None:
    """Give all text, ticks and spines of an `Axes` the colour that stands for the theme's."""
    for text in ax.findobj(Text):
        text.set_color(_INK)
    for spine in ax.spines.values():
        spine.set_edgecolor(_INK)
    ax.tick_params(color=_INK, labelcolor=_INK)
