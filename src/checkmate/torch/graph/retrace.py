"""Results of ops that are added to a graph which was traced before."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx


def retraced(node: fx.Node, mode: AbstractContextManager[Any]) -> Any:
    """Trace an op: its result for the traced values of its arguments, with separate storages.

    Args:
        node: The op, whose arguments have values in their metadata.
        mode: The fake mode of those values.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with mode, torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]
