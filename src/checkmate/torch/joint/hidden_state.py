"""Custom ops whose results depend on more than their inputs, without a mark in the schema: found by running them.

An op that draws random numbers has a tag, by which PyTorch knows it. Custom ops often lack it, attention with dropout among
them: a recomputation in the backward would give other numbers than the forward, and wrong gradients. `torch.utils.checkpoint`
restores the generators around a whole region and needs no tag. Here each custom op runs twice on the same inputs from the same
state of the generators:

- If a generator of the op's own device moved, its state is replayed when the op is computed again.
- If another one moved, or the results differ, there is a state that nothing here can replay: the op runs once.
- If the op does not run alone, or if nothing may run, its state is unknown: it runs once as well.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import fx

from checkmate.torch._compat.dispatch import OpOverload, defined_memory, no_dispatch, no_modes
from checkmate.torch.graph.op_properties import HIDDEN, PURE, Hidden, is_collective
from checkmate.torch.graph.rng import generators_restored
from checkmate.torch.graph.storages import leaves, same_bytes
from checkmate.torch.measure.profiler import signature
from checkmate.torch.measure.single_op import ready_to_run

_log = logging.getLogger("checkmate.torch")

_KNOWN: dict[str, Hidden | None] = {}
"""Hidden state of each op, by its signature. Not kept for other processes: the same name may mean other code there."""


def mark_hidden_state(graph: fx.Graph, *, runs: bool) -> None:
    """Mark custom ops with hidden random numbers or a hidden state (`HIDDEN`) for `op_properties`."""
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload) or node.target.namespace in PURE or is_collective(node):
            continue
        hidden: Hidden | None = "state"
        if runs:
            key = signature(node)
            assert key is not None
            hidden = _KNOWN[key] = _KNOWN[key] if key in _KNOWN else _examined(node)
        if hidden is not None:
            node.meta[HIDDEN] = hidden


def _examined(node: fx.Node) -> Hidden | None:
    devices = {t.device for t in leaves([node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)])}
    try:
        with no_dispatch(), no_modes(), torch.no_grad(), defined_memory():
            (moved, first), (_, second) = _run(node), _run(node)
            same = len(first) == len(second) and all(map(_same, first, second))
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError) as error:
        _log.warning("%s (%s) does not run alone, so that it is never computed again: %s", node.name, node.target, error)
        return "state"
    if not same or not moved <= devices:
        _log.info("%s (%s) has a state besides its inputs, so that it is never computed again", node.name, node.target)
        return "state"
    return "random" if moved else None


def _run(node: fx.Node) -> tuple[set[torch.device], list[Any]]:
    """Run an op on new inputs: devices whose generators moved, and results."""
    with generators_restored():
        run = ready_to_run(node)
        before = _generators()
        results = run()
        moved = {device for device, state in _generators().items() if not torch.equal(state, before[device])}
    return moved, list(results) if isinstance(results, (tuple, list)) else [results]


def _generators() -> dict[torch.device, torch.Tensor]:
    """States of the default generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {torch.device("cpu"): torch.get_rng_state(), **{torch.device("cuda", i): state for i, state in enumerate(cuda)}}


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return same_bytes(first, second)
    return bool(first == second)
