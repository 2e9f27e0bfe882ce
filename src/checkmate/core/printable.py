"""Text of files, such as the names of ops, as it is shown: a terminal must not obey it, and it must not look like other text."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Text with escapes for all that is not printed: control characters, line ends, marks that reverse the direction of text.

    Args:
        text: Text of one line that a file, a path or a user's program gave.

    Examples:
        >>> printable("conv1"), printable("\x1b]0;title\x07"), printable("a\nerror: b")
        ('conv1', '\\x1b]0;title\\x07', 'a\\nerror: b')
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def printable_lines(text: str) -> str:
    """As `printable`, for text of several lines, which stay lines."""
    return "\n".join(printable(line) for line in text.split("\n"))
