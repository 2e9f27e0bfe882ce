"""Batches of a training step, compared with the example that it was made from before anything is traced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from checkmate.core.errors import OptionError

Example = Sequence[Any] | Mapping[str, Any]
"""A batch: positional arguments, the loss's target last, or keyword arguments of the model."""

_MOST_NUMBERS = 64
"""Most numbers in a batch outside of tensors: each is a constant of the graph, and a list of thousands takes minutes to trace."""


def validate_example(example: Example, has_loss: bool) -> Example:
    """The example, checked to be a batch.

    Args:
        example: What the user gave.
        has_loss: Whether a loss is called with its last element.

    Raises:
        OptionError: It is no batch, or has no target for the loss.
    """
    if isinstance(example, Mapping):
        if has_loss:
            raise OptionError("example is a mapping, so that the loss has no target", hint="give a tuple (x, y), or loss=None")
    elif not isinstance(example, (tuple, list)):
        loader = isinstance(example, Iterable) and not isinstance(example, torch.Tensor)
        hint = "give one batch of it: example=next(iter(loader))" if loader else "give a tuple (x, y), or a mapping"
        raise OptionError(f"example={type(example).__name__} is not a batch", hint=hint)
    elif len(example) < (least := 2 if has_loss else 1):
        what = "an input and a target" if has_loss else "an input"
        given = f"example with {len(example)} of at least {least} elements is not a batch" if example else "no example is given"
        raise OptionError(f"{given}: {what} must be in it", hint="write example=(x, y), or give a mapping")
    leaves = pytree.tree_leaves(example)
    sizes = [leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if sizes and not any(sizes):
        raise OptionError(f"example has no sample: {described(example)}", hint="give a batch of at least one")
    if len(numbers := [leaf for leaf in leaves if type(leaf) in (int, float, bool)]) > _MOST_NUMBERS:
        raise OptionError(
            f"example has {len(numbers):,} numbers in lists, and each would be a constant of the graph",
            hint="give tensors: torch.tensor(...) makes one of a list",
        )
    return example


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The arguments of the batches of a step, known from its example.

    Attributes:
        example: What the example was, in words: names, types and shapes.
        count: Elements of a batch by position; None where the example is a mapping.
        names: Names of a batch by keyword, in order; empty where the example is a sequence.
        tensors: Whether each of them is a tensor.
    """

    example: str
    count: int | None
    names: tuple[str, ...]
    tensors: tuple[bool, ...]

    @classmethod
    def of(cls, example: Example) -> BatchLayout:
        """The layout of an example."""
        mapping = isinstance(example, Mapping)
        values = example.values() if isinstance(example, Mapping) else example
        return cls(
            example=described(example),
            count=None if mapping else len(example),
            names=tuple(example) if isinstance(example, Mapping) else (),
            tensors=tuple(isinstance(value, torch.Tensor) for value in values),
        )

    def batch_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Example:
        """The batch that a step is called with: as the example was, also in one piece.

        Args:
            args: Positional arguments: the elements of a batch, or the batch itself.
            kwargs: Keyword arguments.

        Raises:
            OptionError: The arguments are not those of the example.
        """
        if self.count is None:
            whole = len(args) == 1 and not kwargs and isinstance(args[0], Mapping)
            batch: Any = args[0] if whole else kwargs
            if (args and not whole) or batch.keys() != set(self.names):
                raise self._refused((*args, *batch) if whole else args, batch)
            batch = {name: batch[name] for name in self.names}
            values: Sequence[Any] = tuple(batch.values())
        else:
            if len(args) == 1 != self.count and isinstance(args[0], (tuple, list)):
                args = tuple(args[0])
            if kwargs or len(args) != self.count:
                raise self._refused(args, kwargs)
            batch = values = args
        for number, (value, tensor) in enumerate(zip(values, self.tensors, strict=True)):
            if tensor and isinstance(value, (list, tuple, int, float, str, Mapping)):
                name = self.names[number] if self.names else f"argument {number + 1}"
                raise OptionError(
                    f"{name} of the step is a {type(value).__name__}, and that of the example is a tensor",
                    hint="give a tensor: torch.tensor(...) makes one of a list",
                )
        return batch

    def _refused(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OptionError:
        if self.count is not None:
            names = [f"x{i + 1}" for i in range(self.count)]
            names = ["x", "y"] if self.count == 2 else names
            hint = f"call step({', '.join(names)}): all elements of a batch by position, the target of a loss last"
        else:
            hint = f"call step(**batch) with {', '.join(self.names)}"
        return OptionError(f"the step is called with {described(args, kwargs)}, and its example was {self.example}", hint=hint)


def described(batch: Example, kwargs: Mapping[str, Any] | None = None) -> str:
    """A batch in words, such as ``2 arguments: float32 (64, 32), int64 (64,)``.

    Args:
        batch: The batch.
        kwargs: More arguments, by name.
    """
    named = {**(batch if isinstance(batch, Mapping) else {}), **(kwargs or {})}
    parts = [_described(value) for value in (() if isinstance(batch, Mapping) else batch)]
    parts += [f"{name}={_described(value)}" for name, value in named.items()]
    listed = ", ".join(parts)
    return f"{len(parts)} argument{'s' * (len(parts) != 1)}{': ' * bool(parts)}{listed}"


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        device = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{device}"
    if type(value) in (tuple, list) and len(value) <= 4 and not all(isinstance(v, (int, float)) for v in value):
        return f"({', '.join(map(_described, value))})"
    return type(value).__name__
