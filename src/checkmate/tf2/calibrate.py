"""Hold a budget by measuring: plan, run on saved and restored variables, and plan again until it fits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from checkmate.core.errors import InfeasibleBudgetError
from checkmate.core.result import Result
from checkmate.core.units import format_at_least, format_bytes
from checkmate.tf2.allocator import Account, account
from checkmate.tf2.capture import Capture
from checkmate.tf2.classify import KERNEL_RANDOM
from checkmate.tf2.compat import grappler_off
from checkmate.tf2.measure import counts, default_device, measure_peak
from checkmate.tf2.rewrite import Runner, build_function

_log = logging.getLogger("checkmate.tf2")
_ROUNDS = 8
_RUNS = 2  # the second step finds the free chunks that the first has left
_ROOM = 0.02  # share of the budget that is not worth planning again for
_GOOD = 1.005  # overhead that is not worth planning again for

Ask = Callable[[int], Result]
"""The best plan within a budget."""


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """A plan that was measured to keep its budget.

    Attributes:
        capture: The step.
        result: The plan, with its proof.
        function: Runs it.
        account: Its peak as planned, with buffers passed on, and in the allocator's chunks.
        measured_bytes: Its measured peak, resident bytes included; None where TensorFlow does not count.
    """

    capture: Capture
    result: Result
    function: Runner
    account: Account
    measured_bytes: int | None


def fit(capture: Capture, budget_bytes: int, ask: Ask) -> Fitted:
    """The cheapest plan found whose measured peak keeps a budget.

    What TensorFlow allocates differs from the live bytes of a plan: less where buffers pass from op to op, more
    where chunks are not split. Both are reckoned first, so that most plans fit when they are first run.

    Args:
        capture: The step.
        budget_bytes: The most bytes at any moment, resident bytes included.
        ask: Plans within an amount of live bytes.

    Raises:
        InfeasibleBudgetError: No plan was measured to keep the budget.
    """
    best: Fitted | None = None
    target, bias, smallest = budget_bytes, 0, None
    for _ in range(_ROUNDS):
        try:
            result = ask(target)
        except InfeasibleBudgetError as error:
            if best is not None:
                break
            if target == budget_bytes:
                raise
            raise _refused(budget_bytes, smallest, target, error) from error
        assert result.plan is not None
        reckoned = account(capture, result.plan)
        taken = reckoned.chunk_bytes + bias
        if taken <= budget_bytes:
            found = _run(capture, result, reckoned)
            measured = found.measured_bytes
            _tell(found, budget_bytes)
            if measured is None or measured <= budget_bytes:
                better = best is None or _cost(result) < _cost(best.result)
                best = found if better else best
                room = 0 if measured is None else budget_bytes - measured
                if not better or (result.overhead or 1.0) <= _GOOD or room <= _ROOM * (budget_bytes - capture.graph.resident_bytes):
                    break
                target += room
                continue
            bias += measured - taken
            taken = measured
        if best is not None:
            break
        smallest = taken if smallest is None else min(smallest, taken)
        target = min(target, _peak(result)) - (taken - budget_bytes)
    if best is None:
        raise _refused(budget_bytes, smallest, target, None)
    return best


def run_once(capture: Capture, result: Result) -> Fitted:
    """A plan that is not held to a budget, built and not run."""
    assert result.plan is not None
    return Fitted(capture, result, build_function(capture, result.plan), account(capture, result.plan), None)


def measure_plan(capture: Capture, function: Runner) -> int | None:
    """Measured peak of a function on saved and restored variables, resident bytes included; None if nothing counts."""
    device = default_device()
    if not counts(device):
        return None
    variables = capture.trace.function.graph.variables
    # Copies: what `numpy` gives may be the variable's own buffer, which a step would then have to copy.
    saved = [np.array(v.numpy()) for v in variables]
    batch = [_synthetic(t) for t in capture.trace.arguments]
    peak = 0
    try:
        with grappler_off():
            for _ in range(_RUNS):
                peak = max(peak, measure_peak(lambda: function(*batch), device=device))
    finally:
        for variable, value in zip(variables, saved, strict=True):
            variable.assign(value)
    return capture.graph.resident_bytes + peak


def _run(capture: Capture, result: Result, reckoned: Account) -> Fitted:
    assert result.plan is not None
    function = build_function(capture, result.plan)
    measured = measure_plan(capture, function)
    if any(op.type in KERNEL_RANDOM for op in capture.members):
        function = build_function(capture, result.plan)  # kernels that have drawn nothing yet
    return Fitted(capture, result, function, reckoned, measured)


def _synthetic(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype.is_floating:
        return tf.cast(tf.random.stateless_uniform(tensor.shape, (1, 2)), tensor.dtype)
    return tf.zeros(tensor.shape, tensor.dtype)


def _tell(found: Fitted, budget_bytes: int) -> None:
    if found.measured_bytes is None:
        _log.warning(
            "the peak cannot be measured: TensorFlow does not count on %s; the plan's own account is %s of %s. Set "
            "TF_CPU_ALLOCATOR_USE_BFC=1 before TensorFlow starts to have it counted",
            default_device(),
            format_bytes(found.account.live_bytes),
            format_bytes(budget_bytes),
        )
        return
    _log.info(
        "planned %s, reckoned %s, measured %s of %s, overhead %.4f",
        format_bytes(found.account.live_bytes),
        format_bytes(found.account.chunk_bytes),
        format_bytes(found.measured_bytes),
        format_bytes(budget_bytes),
        found.result.overhead or 1.0,
    )


def _refused(budget_bytes: int, smallest: int | None, target: int, error: InfeasibleBudgetError | None) -> InfeasibleBudgetError:
    why = "" if error is None else f"; within {format_bytes(target)} of live bytes, which would fit: {error.message}"
    took = "" if smallest is None else f": the smallest plan tried takes {format_bytes(smallest)} of TensorFlow's allocator"
    return InfeasibleBudgetError(
        f"no plan keeps the budget of {format_bytes(budget_bytes)} as TensorFlow allocates{took}{why}",
        hint=f"raise the budget to at least {format_at_least(smallest or budget_bytes)}, or lower the batch size",
        budget_bytes=budget_bytes,
        floor_bytes=0 if error is None else error.floor_bytes,
        smallest_bytes=smallest,
        binding_op="" if error is None else error.binding_op,
    )


def _cost(result: Result) -> int:
    assert result.cost is not None
    return result.cost


def _peak(result: Result) -> int:
    assert result.peak_bytes is not None
    return result.peak_bytes
