"""Adds gradients to existing ones inside a compiled backward, with the results and the hooks of autograd.

For these parameters the backward returns the sum, in the storage of ``.grad``, instead of the new gradient. Right before
autograd would add the sum to ``.grad``, a hook sets ``.grad`` to None, and autograd takes over the sum without a copy. All hooks
that run after a gradient is accumulated run as before. A hook that runs earlier must see the new gradient alone: autograd itself
accumulates for a parameter with an earlier hook.

Autograd sums all gradients that a parameter gets in one backward, and adds the sum to ``.grad``. Sums of floating-point numbers
depend on their order. Autograd therefore also accumulates until a backward has shown that a parameter gets only one gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any

import torch

from checkmate.torch._compat.engine import before_accumulation, current_backward, grad_accumulators, keeps_graph
from checkmate.torch.graph.storages import storage_key
from checkmate.torch.passes.gradients import ACCUMULATE


class GradientSources:
    """Records which leaves get their gradients from one compiled backward alone, according to the backwards so far."""

    def __init__(self) -> None:
        # By the identity of a leaf: whether its gradient was the one that a compiled backward had returned. A lookup in a
        # WeakIdKeyDictionary takes 5 us, and each backward needs several for each parameter.
        self._sole: dict[int, tuple[weakref.ref[torch.Tensor], bool]] = {}
        self.added = dict[int, int]()  # by the leaf: the backward of autograd in which a compiled backward added to its gradient
        self.seen: object = None  # leaves of a run, as it has them, that are all recorded

    def _known(self, leaf: torch.Tensor) -> bool | None:
        known = self._sole.get(id(leaf))
        return known[1] if known is not None and known[0]() is leaf else None

    def unseen(self, leaves: Mapping[int, torch.Tensor]) -> list[int]:
        """The keys of leaves that no backward has recorded."""
        return [k for k, leaf in leaves.items() if id(leaf) not in self._sole]  # a leaf that is freed is forgotten

    def record(self, leaf: torch.Tensor, sole: bool) -> None:
        """Record whether a leaf got its gradient from one compiled backward alone; a leaf that once got others stays False."""
        known = self._known(leaf)
        if known is None:
            key = id(leaf)
            self._sole[key] = weakref.ref(leaf, lambda _: self._forget(key)), sole
        elif known and not sole:
            self._sole[id(leaf)] = self._sole[id(leaf)][0], False

    def _forget(self, key: int) -> None:
        self._sole.pop(key, None)
        self.added.pop(key, None)
        self.seen = None

    def accumulates(self, leaf: torch.Tensor) -> bool:
        """Whether a compiled backward may add to the gradient of a leaf in place, with the same result as autograd."""
        return self._known(leaf) is True and not leaf._backward_hooks and _is_plain(leaf.grad, leaf)


def _is_plain(existing: torch.Tensor | None, leaf: torch.Tensor) -> bool:
    """Whether autograd would add to a gradient in place, and take it over without a copy."""
    return (
        existing is not None
        and type(existing) is torch.Tensor
        and existing.layout is torch.strided
        and existing.stride() == leaf.stride()
        and existing.dtype == leaf.dtype
        and not existing.requires_grad
        and not existing.is_inference()
    )


class Accumulation(AbstractContextManager[None]):
    """One run of a compiled backward, as a context in which its `ACCUMULATE` nodes add to existing gradients."""

    def __init__(self, leaves: Mapping[int, torch.Tensor], positions: Set[int], sources: GradientSources) -> None:
        self._sources = sources
        unseen = sources.unseen(leaves)
        self.saw_all = not unseen  # whether some backward has recorded each leaf
        adding = [k for k in positions if k in leaves and sources.accumulates(leaves[k])]
        # With create_graph=True, which keeps the graph, autograd adds out of place.
        nodes = grad_accumulators() if (adding or unseen) and not keeps_graph() else {}
        self._nodes = {k: nodes[id(leaves[k])] for k in (*unseen, *adding) if id(leaves[k]) in nodes}
        self._leaves = {k: leaves[k] for k in self._nodes}
        self._adding = self._nodes.keys() & set(adding)
        self._added: set[int] = set()

    def __enter__(self) -> None:
        """Have `ACCUMULATE` nodes of this thread add to the gradients of these leaves."""
        ACCUMULATE.adding.add = self._add

    def __exit__(self, *_: object) -> None:
        """End a backward that is over or has failed; after a failure some gradients are accumulated, as in any backward."""
        del ACCUMULATE.adding.add

    def hand_over(self, gradients: Sequence[Any]) -> None:
        """Have autograd take over the sums, and watch the gradients of leaves that no backward has recorded."""
        for k, node in self._nodes.items():
            gradient = gradients[k]
            if isinstance(gradient, torch.Tensor):
                self._watch(k, node, storage_key(gradient), gradient._version)

    def _add(self, position: int, gradient: torch.Tensor) -> torch.Tensor:
        leaf = self._leaves.get(position) if position in self._adding else None
        existing = None if leaf is None else leaf.grad
        if leaf is None or existing is None or not _fit(existing, gradient):
            return gradient
        backward = current_backward()
        if self._sources.added.get(id(leaf)) == backward:  # by another graph: autograd would sum two tensors that share a storage
            return gradient
        existing.add_(gradient)
        self._sources.added[id(leaf)] = backward
        self._added.add(position)
        return existing.detach()  # autograd copies a tensor that has another owner

    def _watch(self, position: int, node: Any, storage: int, version: int) -> None:
        leaf, added, sources = self._leaves[position], position in self._added, self._sources

        def arrives(gradient: torch.Tensor | None) -> None:
            # Autograd adds other gradients to the first one in place, unless its storage has another owner, as a sum has.
            sole = gradient is not None and storage_key(gradient) == storage and (added or gradient._version == version)
            if not leaf._backward_hooks:  # hooks may have replaced the gradient
                sources.record(leaf, sole)
            if added:
                leaf.grad = None

        before_accumulation(node, arrives)


def _fit(existing: torch.Tensor, gradient: torch.Tensor) -> bool:
    return (
        gradient.layout is torch.strided
        and existing.shape == gradient.shape
        and existing.dtype == gradient.dtype
        and existing.device == gradient.device
    )
