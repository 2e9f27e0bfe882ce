"""What runs and watches a script: `compiled` around its model, `steps` around its batches, `log` of its losses.

They stand where a script has `torch.compile`, a progress bar and a line of its log. Without a benchmark that watches, they
do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

STEPS = 6

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Script:
    """A training script."""

    source: str  # the public script, example or repository that it has the shape of
    features: str  # what its loop does besides forward, backward and update
    main: Callable[[], None]


SCRIPTS: dict[str, Script] = {}


def script(source: str, features: str = "") -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Decorator of a script, which is listed under its own name."""

    def listed(main: Callable[[], None]) -> Callable[[], None]:
        SCRIPTS[main.__name__] = Script(source=source, features=features, main=main)
        return main

    return listed


class Watch:
    """Callbacks of a benchmark, and the models that are trained."""

    def __init__(self) -> None:
        self.compile: Callable[[Any, bool], Any] = lambda model, in_place: model
        self.begin_step: Callable[[Any], None] = lambda batch: None
        self.loss: Callable[[float], None] = lambda loss: None
        self.models: list[Any] = []


WATCH = Watch()


def compiled(model: Any, *, in_place: bool = False) -> Any:
    """``torch.compile(model, backend=...)``, or ``model.compile(backend=...)``, which keeps the class of the model."""
    WATCH.models.append(model)
    return WATCH.compile(model, in_place)


def steps(batches: Iterable[T]) -> Iterator[T]:
    """The batches, as a progress bar passes them on."""
    for batch in batches:
        WATCH.begin_step(batch)
        yield batch


def log(*losses: Any) -> None:
    """A line of the log."""
    for loss in losses:
        WATCH.loss(loss.item() if hasattr(loss, "item") else loss)
