"""Ops that no CUDA graph can record, found in a planned step before it runs, as if the step were captured.

A graph has the kernels of a device. What the host does runs once, while the graph is captured, and never when it is replayed: the
host may neither read a number that the device computes, nor compute with numbers of the step itself.
"""

from __future__ import annotations

import copy
import traceback
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from checkmate.core.errors import OptionError
from checkmate.torch._compat.dispatch import FakeTensorMode, OpOverload, TorchDispatchMode, no_modes
from checkmate.torch.graph.op_properties import random_op
from checkmate.torch.graph.optimizer_ops import UPDATE, Updates, initial_state, updates_of
from checkmate.torch.graph.provenance import source_of
from checkmate.torch.graph.storages import leaves

aten = torch.ops.aten
_INDEX = aten.index.Tensor
# Indices of the host are copied to the device.
_COPIES = (aten._to_copy.default, aten.copy_.default, aten.copy.default, _INDEX, aten.index_put.default, aten.index_put_.default)


def refuse_uncapturable(graph: fx.Graph, device: torch.device) -> list[tuple[int, int]]:
    """Refuse a whole step if a CUDA graph of its device cannot replay it.

    Otherwise return an update of each group of each optimizer: the key of the `Updates`, and the index of the parameter.
    """
    constants: set[fx.Node] = set()  # tensors on the host that no step changes
    updated: dict[tuple[int, int], tuple[int, int]] = {}
    for node in graph.nodes:
        made, read = leaves(node.meta.get("val")), node.all_input_nodes
        inside = node.op == "get_attr" or (node.op == "call_function" and random_op(node) is None and constants.issuperset(read))
        if inside and any(t.device.type != device.type for t in made):
            constants.add(node)
        elif node.target is UPDATE:
            key, which = node.args[2:]
            updated[key, updates_of(key).group_index(which)] = key, which
        elif isinstance(node.target, OpOverload):
            changing = [t for n in read if n not in constants for t in leaves(n.meta.get("val"))]
            why = _refusal(node.target, changing, made, device)
            if why is None and node.target in _COPIES and not constants.isdisjoint(read):
                why = "copies from the host"
            if why is not None:
                raise OptionError(
                    f"mode='reduce-overhead' cannot replay {node.target} ({source_of(node)}): it {why}",
                    hint="make its inputs on the device of the model; or leave out mode",
                )
    for key, which in updated.values():
        refuse_update(updates_of(key), which, device)
    return [*updated.values()]


def _refusal(op: OpOverload, read: Iterable[torch.Tensor], made: Iterable[torch.Tensor], device: torch.device) -> str | None:
    """Why a graph cannot record an op that reads some tensors, constants apart; None if it can."""
    if torch.Tag.data_dependent_output in op.tags:
        return "reads a number back to Python"
    by_mask = any(isinstance(n, torch.SymInt) for t in made for n in t.shape)
    if torch.Tag.dynamic_output_shape in op.tags and (by_mask or op is not _INDEX):
        return "makes a tensor whose size depends on data"
    if any(t.device.type != device.type for t in read):
        return "reads a tensor of the host"
    return "copies to the host" if any(t.device.type != device.type for t in made) else None


class _AsIfCaptured(TorchDispatchMode):
    """Refuses ops of an optimizer that a graph cannot record."""

    def __init__(self, optimizer: str, hint: str, device: torch.device) -> None:
        super().__init__()
        self._optimizer, self._hint, self._device = optimizer, hint, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run an op on fake tensors, unless it is refused."""
        why = _refusal(func, leaves((args, kwargs)), (), self._device)
        if why is None:
            return func(*args, **(kwargs or {}))
        frames = [f for f in traceback.extract_stack() if Path(f.filename).parent == Path(torch.optim.__file__).parent]
        line = f", at {Path(frames[-1].filename).name}:{frames[-1].lineno}: `{frames[-1].line}`" if frames else ""
        told = f"mode='reduce-overhead' cannot replay the step of {self._optimizer}: {func} {why}{line}"
        raise OptionError(told, hint=f"{self._hint}; or leave out mode")


def refuse_update(updates: Updates, which: int, device: torch.device) -> None:
    """Run the update of a parameter on fake tensors; refuse it if it does what no graph can record."""
    parameter, group, name = updates.parameter(which), updates.group(which), type(updates.optimizer).__name__
    hint = f"use SGD, or AdamW with capturable=True, in place of {name}"
    if group.get("capturable") is False:
        hint = f"write torch.optim.{name}(..., capturable=True)"
    elif isinstance(group.get("lr"), torch.Tensor):
        hint = f"write torch.optim.{name}(..., lr=torch.tensor(1e-3, device='{device}'), fused=True)"

    def fake(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    with no_modes(), FakeTensorMode() as mode, torch.no_grad():
        made, shadow = fake(parameter), copy.copy(updates.optimizer)
        made.grad = torch.empty_like(made)
        state = updates.optimizer.state.get(parameter) or initial_state(updates.optimizer, group, made)
        shadow.param_groups = [{**{k: fake(v) for k, v in group.items()}, "params": [made]}]
        shadow.state = defaultdict(dict, {made: {k: fake(v) for k, v in state.items()}})
        with _AsIfCaptured(name, hint, device):
            updates.step(shadow)
