"""Compiles a graph by Inductor under a plan: plan, generate code, count its memory, and plan again with a corrected target.

Inductor fuses ops and decides itself which values it stores: the planned peak is a prediction. The memory of the generated code
is counted before its kernels are built, and only the kernels of the chosen plan are built. The budget is kept by measuring: the
compiled step that is returned was run on the real batch, and its measured peak was within the budget.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import fx

from checkmate.core.errors import OptionError
from checkmate.core.result import Result
from checkmate.core.units import format_at_least, format_bytes
from checkmate.frontend.plan_store import misfits
from checkmate.frontend.step_memory import StepMemory
from checkmate.torch._compat.dispatch import FakeTensor
from checkmate.torch._compat.inductor import inductor_config, without_graphs
from checkmate.torch.compilation.compilation import Compilation
from checkmate.torch.inductor.fusion import trailing_reductions
from checkmate.torch.inductor.generate import CompiledGraph, generate
from checkmate.torch.inductor.pieces import with_fused_pieces, with_pieces
from checkmate.torch.inductor.search import CalibratedSearch
from checkmate.torch.inductor.settings import CUDA_GRAPHS, compiler_fingerprint, config_patches
from checkmate.torch.inductor.stock import as_stock
from checkmate.torch.inductor.whole_step import WholeStep
from checkmate.torch.joint.capture import Capture
from checkmate.torch.measure.peak import measure_step, measure_whole_step
from checkmate.torch.partition.split import Recapture

_log = logging.getLogger("checkmate.torch")


def compile_if_it_fits(gm: fx.GraphModule, example_inputs: Sequence[Any], compilation: Compilation) -> CompiledGraph | None:
    """Compile a graph of Dynamo by Inductor; None if no compilation keeps the budget, a fact stored for later processes."""
    trials = _Trials(gm, example_inputs, compilation)
    least = None if trials.key is None else misfits().get([trials.key]).get(trials.key)
    if least is not None:
        _log.warning(
            "no plan that Inductor compiled before kept the budget; the smallest takes %s: compiled by 'eager'",
            format_bytes(least),
        )
        return None
    search, first = trials.search, trials.compile()
    if first.planned is None or first.cached:
        first.kernels.build()
        first.store()
        return first
    again, cost_of = (lambda: trials.compile().counted), (lambda at: trials.compiled[at].cost_ns)
    chosen = search.choose(first.counted, again, trials.measure, cost_of)
    if chosen is None:
        least = _give_up(compilation, search)
        if trials.key is not None:
            misfits().add({trials.key: least})
        return None
    best = trials.compiled[chosen]
    best.kernels.build()
    assert best.planned is not None
    if not search.measures:
        best.store()
        return best
    interface, result = best.planned
    best.memory = search.trials[chosen].outcome.memory
    peak = format_bytes(best.memory.peak_bytes)
    remark = f"compiled by Inductor (plan {len(search.trials)}): measured peak {peak} above the resident bytes"
    result = msgspec.structs.replace(result, budget_bytes=search.budget_bytes, remarks=(*result.remarks, remark))
    best.planned = interface, result
    if compilation.planner.is_alone(interface.graph):
        best.store()
    return best


def _give_up(compilation: Compilation, search: CalibratedSearch) -> int:
    """Say that no compilation keeps the budget. Returns the budget that the smallest compilation would keep."""
    peaks = [t.outcome.memory.peak_bytes for t in search.trials]
    if compilation.options.plan is not None:
        raise OptionError(
            f"the given plan has a measured peak of {format_bytes(peaks[0])} above the resident bytes, and the budget leaves "
            f"{format_bytes(search.limit_bytes)}",
            hint=f"raise the budget by at least {format_at_least(peaks[0] - search.limit_bytes)}, or leave out `plan` to have "
            "one made and measured",
        )
    _log.warning(
        "none of %d plans that Inductor compiled kept the %s that the budget leaves above the resident bytes (the smallest "
        "of them takes %s): compiled by 'eager' instead, whose peak is the planned one",
        len(peaks),
        format_bytes(search.limit_bytes),
        format_bytes(min(peaks)),
    )
    return search.chains.contracted.resident_bytes + min(peaks)


class _Trials:
    """The compilations of one graph of Dynamo, which is not changed; trial steps run on its real inputs."""

    def __init__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], compilation: Compilation) -> None:
        if any(isinstance(value, FakeTensor) for value in example_inputs):
            raise OptionError(
                "compiler='inductor' measures the compiled step, and this one was traced without real tensors",
                hint="under DistributedDataParallel set torch._dynamo.config.optimize_ddp = False; otherwise compile outside "
                "FakeTensorMode, or use compiler='eager'",
            )
        self.compiled: list[CompiledGraph] = []
        self._gm, self._inputs, self._compilation = gm, example_inputs, compilation
        target = compilation.hooks.target
        devices = {t.device.type for t in example_inputs if isinstance(t, torch.Tensor)}
        on_gpu = not devices <= {"cpu"} if target is None else target.device.kind == "cuda"
        self._as_stock = on_gpu and not compilation.hooks.whole
        self._patches = config_patches(compilation.options, devices, as_stock=self._as_stock)
        fingerprint = compiler_fingerprint(example_inputs, compilation.options, self._patches)
        cached = compilation.may_be_cached()
        self._problem = f"{compilation.resident} {fingerprint}" if cached else None
        described = [
            f"{t.dtype} {tuple(t.shape)} {t.stride()} {t.device} {t.requires_grad}" if isinstance(t, torch.Tensor) else repr(t)
            for t in example_inputs
        ]
        text = "\n".join([str(self._problem), repr(compilation.options), gm.code, *described])
        self.key = hashlib.sha256(text.encode()).hexdigest() if cached else None  # of all that decides whether the step fits
        self.search = CalibratedSearch(compilation, fingerprint)
        self._task = dataclasses.replace(
            compilation.task,
            costs=with_fused_pieces(compilation.task.costs),
            plan=functools.partial(_plan, self.search, compilation.planner.in_pieces, on_gpu),
        )

    def compile(self) -> CompiledGraph:
        """Generate the code of the next plan."""
        whole = WholeStep() if self._compilation.hooks.whole else None
        make = functools.partial(generate, self._gm, self._inputs, self._task, self._compilation.options)
        made = make(self._patches, whole, self._problem, self._as_stock)
        if self._as_stock and self._compilation.ranks is None and made.counted is None and made.joint is not None:
            # Code from Inductor's cache has no lines to count, and cannot be compared.
            made = make({**self._patches, "fx_graph_cache": False}, whole, self._problem, self._as_stock)
        self.compiled.append(made)
        return made

    def measure(self, index: int) -> StepMemory:
        """The measured memory of a compilation, whose kernels are built for the measurement."""
        compiled = self.compiled[index]
        compiled.kernels.build()
        if compiled.whole is None:
            reserved = self._patches.get(CUDA_GRAPHS, inductor_config.triton.cudagraphs)
            with without_graphs():
                step = measure_step(compiled.run, self._inputs, hold_outputs=self._task.hold_outputs, reserved=reserved)
        else:
            with compiled.whole.on_trial():
                step = measure_whole_step(compiled.run, self._inputs)
        if compiled.counted not in (None, step):
            _log.debug("counted in the generated code: %s; measured: %s", compiled.counted, step)
        return step


def _plan(
    search: CalibratedSearch,
    allows: Callable[[fx.Node], bool] | None,
    on_gpu: bool,
    capture: Capture,
    recapture: Recapture,
) -> tuple[Capture, Result]:
    """The next plan to compile. On a CPU, values that it counts as stored are marked, and Inductor stores them.

    Without the marks Inductor inlines a pointwise op into its readers and may compute it once for each. The memory would differ
    from the plan. Reductions would run over other loops from plan to plan, which changes the order of sums and the bits. On a GPU
    bits depend on the plan with marks too, and each mark may cost a kernel, or padding that a matrix product needs.
    """
    capture, kinds = (capture, []) if allows is None else with_pieces(capture, recapture, allows)
    capture, partitions = as_stock(capture, recapture) if on_gpu else (capture, None)
    graph, result = search.plan(capture.graph, trailing_reductions(m.node for m in capture.members), partitions)
    if kinds:
        result = msgspec.structs.replace(result, remarks=(*result.remarks, *(f"in pieces: {kind.description}" for kind in kinds)))
    if not on_gpu:
        stored = [node for o in search.chains.stored if (node := capture.members[o].node) is not None]
        # An op without inputs, such as a constant, is cheaper inlined than read. Ops of several outputs may be inlined too.
        for node in (*(n for n in stored if n.all_input_nodes), *(g for member in capture.members for g in member.getitems)):
            node.meta["inductor_realize_to_strides"] = True
    return dataclasses.replace(capture, graph=graph), result
