"""Private names of torch, one module per subsystem of torch; nothing else in this package imports ``torch._*``.

A release of torch that moves or changes one of them breaks here, and only here. Read in torch 2.13.0, tested in 2.11 to 2.14; the
declared minimum is in pyproject.toml.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let an attribute of an object, a class or a module be another value inside."""
    inherited, before = name not in vars(owner), vars(owner).get(name)  # getattr would bind the function of a class
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
