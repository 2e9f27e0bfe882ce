"""Figures as SVG text that adapts to the reader's light or dark theme."""

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
    """Render a figure as one SVG element with a transparent background and the text colour of its surroundings.

    Args:
        figure: The figure; its text, ticks and spines get the theme's colour.
        standalone: Whether the SVG includes both themes; without them it uses the colour of the HTML page around it.

    Returns:
        The SVG element; the same figure gives the same text.
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
    """Give all text, ticks and spines of an `Axes` the placeholder of the theme's colour."""
    for text in ax.findobj(Text):
        text.set_color(_INK)
    for spine in ax.spines.values():
        spine.set_edgecolor(_INK)
    ax.tick_params(color=_INK, labelcolor=_INK)
