"""Measured costs of ops, shared by all processes of a user, and the processor's name."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from checkmate.cost.database import Store

_log = logging.getLogger("checkmate.cost")

OpT = TypeVar("OpT")


class OpCost(NamedTuple):
    """Measured cost of one computation of an op."""

    cost_ns: int
    workspace_bytes: int  # bytes that live only while it runs


class CostStore(Store[OpCost]):
    """Measurements by key. The first one written stays: all processes plan with the same costs.

    Examples:
        >>> import tempfile
        >>> store = CostStore(Path(tempfile.mkdtemp()) / "costs.sqlite")
        >>> store.add({"mm": OpCost(1200, 0)})
        >>> store.add({"mm": OpCost(9999, 0)})
        >>> store.get(["mm", "add"])
        {'mm': OpCost(cost_ns=1200, workspace_bytes=0)}
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__("cost", OpCost, "costs of ops are measured again in every process", path)


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


def quantise(cost: float) -> int:
    """A cost rounded to three significant digits, at least 1: more digits are noise and would change plans from run to run.

    Examples:
        >>> quantise(123456.7), quantise(9.4), quantise(0.2)
        (123000, 9, 1)
    """
    return max(1, int(float(f"{cost:.3g}")))


@cache
def processor() -> str:
    """Name of the processor: kernels are chosen by its instructions and cache sizes."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def library_variables(*prefixes: str) -> dict[str, str]:
    """Environment variables by which kernel libraries choose kernels, and variables that begin with a framework's prefix.

    Examples:
        >>> os.environ["ONEDNN_MAX_CPU_ISA"], os.environ["ONEDNN_VERBOSE"] = "AVX2", "1"
        >>> known = library_variables()
        >>> known["ONEDNN_MAX_CPU_ISA"], "ONEDNN_VERBOSE" in known
        ('AVX2', False)
        >>> del os.environ["ONEDNN_MAX_CPU_ISA"], os.environ["ONEDNN_VERBOSE"]
    """
    libraries = ("ONEDNN_", "DNNL_", "MKL_", "CUDNN_", "CUBLAS", "TORCH_CUDNN_", "NVIDIA_TF32_", "ATEN_", *prefixes)
    # Variables named VERBOSE or LOG change only a library's messages.
    known = (name for name in os.environ if name.startswith(libraries) and "VERBOSE" not in name and "LOG" not in name)
    return {name: os.environ[name] for name in sorted(known)}
