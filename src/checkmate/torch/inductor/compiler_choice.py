"""Which compiler a step is given: it is found out once for each step, and then remembered.

With ``compiler="auto"`` it is measured whether compiling the step by Inductor pays. The answer must not change from run to run,
since compiled steps round differently. Times do change, so that the first answer is stored, as the first measurement of an op is.
With ``compiler="inductor"`` the step may not fit as Inductor compiles it, which takes several compilations to find out.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from checkmate.core.errors import CheckmateError, InfeasibleBudgetError, OptionError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.units import format_bytes
from checkmate.frontend.plan_store import CompilerChoices, sources_digest
from checkmate.frontend.planner import planner_for
from checkmate.torch._compat.inductor import missing_compiler
from checkmate.torch.compilation.compilation import Compilation
from checkmate.torch.graph.kernel_settings import kernel_settings
from checkmate.torch.inductor.compile import Compiled, compile_by_inductor
from checkmate.torch.inductor.largest_inputs import dynamic_dimensions, traced_values
from checkmate.torch.measure.trial_step import time_step

_log = logging.getLogger("checkmate.torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Payoff:
    """When compiling pays.

    Attributes:
        steps: Steps within which a compiled step has to make up for the time that it took to compile. Trainings are longer.
        least_step_s: A shorter step is not compiled at all: within so many steps it could hardly save what compiling takes.
    """

    steps: int = 1000
    least_step_s: float = 0.05

    def pays(self, eager_s: float, compiled_s: float, compiling_s: float) -> bool:
        """Whether compiling pays.

        Args:
            eager_s: Seconds of a step that runs its ops one by one.
            compiled_s: Seconds of the compiled step.
            compiling_s: Seconds that compiling takes.

        Examples:
            >>> Payoff().pays(eager_s=2.0, compiled_s=1.9, compiling_s=40.0)
            True
            >>> Payoff().pays(eager_s=0.2, compiled_s=0.19, compiling_s=40.0)
            False
        """
        return (eager_s - compiled_s) * self.steps > compiling_s


_PAYOFF = Payoff()


class _ShortStepError(CheckmateError):
    """A step is too short to be compiled."""


def compile_if_it_pays(gm: fx.GraphModule, example_inputs: Sequence[Any], compilation: Compilation) -> Compiled | None:
    """Compile a graph of Dynamo by Inductor where that pays, and log why or why not.

    Args:
        gm: The graph; it is not changed.
        example_inputs: Its inputs.
        compilation: Options, resident memory and planner of the graph.

    Returns:
        The compiled graph; None if its ops are to run one by one.
    """
    if (reason := _reason_for_eager(example_inputs, compilation)) is not None:
        return _chosen("eager", reason, None)
    choices, key = CompilerChoices(), _key(gm, example_inputs, compilation)
    known = choices.get(key)
    if known is not None and known[0] == "eager":
        return _chosen("eager", f"as chosen before, {known[1]}", None)
    began = time.perf_counter()
    try:
        compiled = compile_by_inductor(gm, example_inputs, compilation, on_captured=_refuse_short if known is None else None)
    except OptionError as error:  # what Inductor does not compile
        return _chosen("eager", error.message, None)
    except _ShortStepError as error:
        compiled, reason = None, error.message
    else:
        if compiled is None:
            reason = "no step that Inductor compiled kept the budget"
        elif known is not None or compiled.planned is None:
            return _chosen("inductor", f"as chosen before, {known[1]}" if known else "nothing requires a gradient", compiled)
        else:
            pays, reason = _compared(compiled, example_inputs, compilation, time.perf_counter() - began)
            compiled = compiled if pays else None
    compiler = "eager" if compiled is None else "inductor"
    choices.add(key, compiler, reason)
    return _chosen(compiler, reason, compiled)


def compile_if_it_fits(gm: fx.GraphModule, example_inputs: Sequence[Any], compilation: Compilation) -> Compiled | None:
    """Compile a graph of Dynamo by Inductor, unless an earlier process found that nothing it compiles keeps the budget.

    Args:
        gm: The graph; it is not changed.
        example_inputs: Its inputs.
        compilation: Options, resident memory and planner of the graph.

    Returns:
        The compiled graph; None if no compilation keeps the budget.
    """
    if not compilation.may_be_cached() or dynamic_dimensions(traced_values(gm)):  # the largest sizes are not in the key
        return compile_by_inductor(gm, example_inputs, compilation)
    choices, key = CompilerChoices(), _key(gm, example_inputs, compilation, str(compilation.resident))
    known = choices.get(key)
    if known is not None and known[1].isdecimal():
        compilation.least_fused_bytes = int(known[1])
        least = format_bytes(compilation.least_fused_bytes)
        _log.warning("no plan that Inductor compiled before kept the budget; the smallest takes %s: compiled by 'eager'", least)
        return None
    compiled = compile_by_inductor(gm, example_inputs, compilation)
    if compiled is None:
        choices.add(key, "eager", str(compilation.least_fused_bytes))
    return compiled


def _chosen(compiler: str, reason: str, compiled: Compiled | None) -> Compiled | None:
    _log.info("compiler='auto' is %r: %s", compiler, reason)
    return compiled


def _reason_for_eager(inputs: Sequence[Any], compilation: Compilation) -> str | None:
    options = compilation.options
    if compilation.hooks.whole:
        return "updates that Inductor compiles are rounded in another way"
    if compilation.ranks is not None:
        return "each of several ranks would have to choose the same"
    if options.plan is not None:
        return "a given plan is one of single ops"
    if any(isinstance(value, torch.SymInt) for value in inputs):
        return "its sizes change"
    return missing_compiler({t.device.type for t in inputs if isinstance(t, torch.Tensor)})


def _refuse_short(graph: Graph) -> None:
    """Stop a compilation before any code is generated.

    Raises:
        _ShortStepError: The step is too short.
    """
    if graph.cost < 1e9 * _PAYOFF.least_step_s:
        raise _ShortStepError(f"its ops take {graph.cost / 1e6:.3g} ms, which compiling could not make up for", hint="")


def _compared(compiled: Compiled, inputs: Sequence[Any], compilation: Compilation, compiling_s: float) -> tuple[bool, str]:
    """Whether a compiled step pays, and why."""
    assert compiled.planned is not None
    compiled_s = time_step(compiled.run, inputs, hold_outputs=compilation.task.hold_outputs)
    try:
        eager_s = planner_for(compilation.options.planning)(compiled.planned[0].graph).cost / 1e9
    except (InfeasibleBudgetError, PlanNotFoundError):
        return True, "no plan of single ops keeps the budget"
    figures = f"a step takes {compiled_s:.3g} s compiled and {eager_s:.3g} s op by op; compiling took {compiling_s:.3g} s"
    pays = _PAYOFF.pays(eager_s, compiled_s, compiling_s)
    return pays, f"{figures}, which {_PAYOFF.steps} steps {'' if pays else 'do not '}make up for"


def _key(gm: fx.GraphModule, inputs: Sequence[Any], compilation: Compilation, besides: str = "") -> str:
    """Hash of a step and of everything that decides on its time, or with what is in memory besides, on whether it fits."""
    described = [
        f"{t.dtype} {tuple(t.shape)} {t.stride()} {t.device} {t.requires_grad}" if isinstance(t, torch.Tensor) else repr(t)
        for t in inputs
    ]
    devices = {torch.device("cpu"), *(t.device for t in inputs if isinstance(t, torch.Tensor))}
    kernels = sorted({kernel_settings(device) for device in devices})
    text = "\n".join([sources_digest(), repr(compilation.options), *kernels, gm.code, *described, besides])
    return hashlib.sha256(text.encode()).hexdigest()
