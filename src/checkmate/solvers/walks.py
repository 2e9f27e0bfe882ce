"""Walks of graphs, by stacks: a chain of the graph of a step is longer than Python's limit of recursion."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def reached(starts: Iterable[T], following: Callable[[T], Iterable[T]], wanted: Callable[[T], bool] = lambda _: True) -> set[T]:
    """The wanted ones of the starts and of all that follow them, directly or through other wanted ones."""
    found, todo = set[T](), list(starts)
    while todo:
        item = todo.pop()
        if item not in found and wanted(item):
            found.add(item)
            todo += following(item)
    return found


def after_needs(targets: Iterable[T], needs: Callable[[T], Iterable[T]]) -> list[T]:
    """The targets and all that they need, each once: in the order of the targets, what is still missing right before its reader.

    Examples:
        >>> after_needs("abc", {"a": "", "b": "yx", "c": "xz", "x": "", "y": "", "z": "a"}.__getitem__)
        ['a', 'x', 'y', 'b', 'z', 'c']
    """
    found: dict[T, None] = {}
    for target in targets:
        stack = [target]
        while stack:
            missing = [need for need in needs(stack[-1]) if need not in found]
            if missing:
                stack += missing
            else:
                found[stack.pop()] = None
    return list(found)
