"""Sizes that are symbols when a graph arrives: planned for as they are, or for the largest that they may be.

A plan is exact for one size of every dimension. Where the user asks for dynamic shapes, it is made for the largest:
whatever is smaller takes no more. A guard keeps everything larger out, so that torch compiles it, and plans it, anew.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from checkmate.torch._compat.dynamo import dynamo_config
from checkmate.torch._compat.symbolic import bound_by_hint, is_automatic_dynamic, user_upper_bound

_log = logging.getLogger("checkmate.torch")


def bound_dynamic_shapes(example_inputs: Sequence[Any]) -> None:
    """Bound every symbol among the sizes of some tensors, so that its largest value is known.

    A dimension that ``torch._dynamo.mark_dynamic(x, dim, min=2, max=...)`` bounds keeps its range. Others that the user asked
    to be dynamic are bounded by the size at hand. Those that torch made dynamic by itself, since their size
    changed, are guarded to be what they are: nobody asked to share a plan. Numbers that are given as they are may
    grow freely, unless they turn out to be sizes (`checkmate.torch.graph.storages`).
    """
    guessed: dict[str, int] = {}
    bounded: dict[str, int] = {}
    for symbol in _symbols(example_inputs):
        if is_automatic_dynamic(symbol):
            guessed[str(symbol)] = int(symbol)
        elif user_upper_bound(symbol) is None and symbol.node.hint is not None:
            bound_by_hint(symbol)
            bounded[str(symbol)] = symbol.node.hint
    if guessed:
        _log.warning(
            "shapes changed and are planned for as they are (%s): each new shape costs another compilation and solve; "
            "after %d of them torch compiles no more, and the rest runs without a plan unless "
            "torch._dynamo.config.fail_on_recompile_limit_hit is set; dynamic=True, or "
            "torch._dynamo.mark_dynamic(x, dim, min=2, max=...), makes one plan for all sizes up to the largest",
            ", ".join(map(str, guessed.values())),
            dynamo_config.recompile_limit,
        )
    if bounded:
        _log.info("planned for sizes up to %s; larger ones are compiled and planned anew", ", ".join(map(str, bounded.values())))


def _symbols(example_inputs: Sequence[Any]) -> list[torch.SymInt]:
    """Symbols of the inputs, those of numbers only where they were guessed."""
    found: dict[str, torch.SymInt] = {}
    for value in example_inputs:
        sizes = [value] if isinstance(value, torch.SymInt) and is_automatic_dynamic(value) else []
        if isinstance(value, torch.Tensor):
            sizes = [*value.shape, *value.stride(), value.storage_offset()]
        found.update((str(s), s) for s in sizes if isinstance(s, torch.SymInt) and s.node.expr.is_Symbol)
    return list(found.values())
