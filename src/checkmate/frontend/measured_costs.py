"""Costs of ops measured once per distinct op and kept in a store that all processes of a user share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from checkmate.cost.store import CostStore, OpCost

_log = logging.getLogger("checkmate.frontend")

OpT = TypeVar("OpT")


class MeasuredCosts(Generic[OpT]):
    """Costs of the ops of a framework: from the store, else measured, or estimated if an op cannot run alone.

    A signature is a text with everything on which the cost of an op depends; None for an op that cannot run in isolation.
    ``measure`` gets all missing ops at once by signature, and the other requested ops with their known costs. It leaves out ops
    that could not be measured.

    Examples:
        >>> import tempfile
        >>> store = CostStore(tempfile.mkdtemp() + "/costs.sqlite")
        >>> measured = []
        >>> def measure(ops, known):
        ...     measured.extend(ops)
        ...     return {key: OpCost(1000, 8) for key in ops}
        >>> costs = MeasuredCosts(signature=str, measure=measure, estimate=lambda op: OpCost(1, 0), store=store)
        >>> [cost.cost_ns for cost in costs(["mm", "add", "mm"])], measured
        ([1000, 1000, 1000], ['mm', 'add'])
    """

    def __init__(
        self,
        *,
        signature: Callable[[OpT], str | None],
        measure: Callable[[Mapping[str, OpT], Mapping[str, tuple[OpT, OpCost]]], Mapping[str, OpCost]],
        estimate: Callable[[OpT], OpCost],
        store: CostStore | None = None,
    ) -> None:
        self.store = CostStore() if store is None else store
        self.known: dict[str, OpCost] = {}
        self._signature, self._measure, self._estimate = signature, measure, estimate

    def __call__(self, ops: Sequence[OpT]) -> list[OpCost]:
        """Cost of each op, in order; ops of the same signature share one measurement."""
        keys = [self._signature(op) for op in ops]
        distinct = {k: op for k, op in zip(keys, ops, strict=True) if k is not None}
        missing = [k for k in distinct if k not in self.known]
        if missing:
            self.known.update(self.store.get(missing))
            missing = [k for k in missing if k not in self.known]
        if missing:
            began = time.perf_counter()
            known = {k: (op, self.known[k]) for k, op in distinct.items() if k in self.known}
            measured = self._measure({k: distinct[k] for k in missing}, known)
            self.store.add(measured)
            self.known.update(measured)
            # Another process may have measured the same op meanwhile. The first entry of the store counts: all processes then
            # plan with the same costs.
            self.known.update(self.store.get(missing))
            _log.info("measured %d ops in %.1f s", len(missing), time.perf_counter() - began)
        # An op that could not be measured now, for want of memory for example, may be measured another time.
        estimated = {k: self._estimate(op) for k, op in distinct.items() if k not in self.known}
        found = self.known | estimated
        return [found[k] if k is not None else self._estimate(op) for k, op in zip(keys, ops, strict=True)]
