"""Policies for `torch.utils.checkpoint`: chosen within a budget, and applied to a model."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Unpack

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from checkmate.core.errors import InfeasibleBudgetError, OptionError
from checkmate.core.problem import Problem
from checkmate.core.result import Limits
from checkmate.core.units import Amount, format_at_least, format_bytes
from checkmate.frontend import progress
from checkmate.frontend.options import TIME_LIMIT_S, CostSource, takes_options
from checkmate.regions import RegionPolicy, choose_policy
from checkmate.regions.answer import Save
from checkmate.regions.blocks import Call
from checkmate.solvers.solve import solve
from checkmate.torch.measure.device_memory import step_temporary_bytes
from checkmate.torch.options import TracedOptions
from checkmate.torch.step.arguments import Example, Loss
from checkmate.torch.step.step import capture


@takes_options(TracedOptions, time_limit_s=2 * TIME_LIMIT_S)
def region_policy(
    model: torch.nn.Module,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    example: Example,
    budget: Amount,
    save: Save = "ops",
    regions: Sequence[str] | None = None,
    costs: CostSource = "measured",
    **options: Unpack[TracedOptions],
) -> RegionPolicy:
    """The cheapest policy for activation checkpointing that keeps a budget in eager mode, and its extra cost over a plan.

    For training loops that cannot run a plan. The step is a plain one: forward, ``loss.backward()``, ``optimizer.step()``.

    Args:
        model: As in `compile`, like ``loss``, ``optimizer``, ``example``, ``autocast`` and ``costs``.
        loss: The loss.
        optimizer: The optimizer; its state and the temporary tensors of its step count.
        example: A batch.
        budget: A total (``"8GiB"``) or a share (``"50%"``).
        save: Values to save. ``"ops"``: of single ops, in each region separately. ``"modules"``: the same modules in all
            regions. ``"nothing"``: regions are checkpointed as a whole or not at all.
        regions: Paths of modules to checkpoint, with ``*`` and ``?``, such as ``["layers.*"]``; by default the outermost modules
            with a number for a name that have siblings.
        costs: Source of costs.
        options: ``autocast``, the type of `torch.autocast` around model and loss, and ``time_limit_s``, the seconds for the
            search, 60 by default, half of it for the plan to compare with.

    Raises:
        InfeasibleBudgetError: The step exceeds the budget even with all regions checkpointed and nothing saved.
        OptionError: No module matches, or no region can be checkpointed.
        GraphBreakError: The step cannot be traced as one graph.

    Examples:
        >>> import torch
        >>> layers = [torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(4)]
        >>> model, x = torch.nn.Sequential(*layers), torch.ones(512, 64)
        >>> policy = region_policy(model, torch.nn.functional.mse_loss, example=(x, x), budget="50%", costs="estimated")
        >>> policy.peak_bytes <= policy.budget_bytes, policy.evaluated.overhead < 1.4
        (True, True)
        >>> model = checkpoint_regions(model, policy)
    """
    given: dict[str, Any] = {"example": example, "optimizer": optimizer, "autocast": options.get("autocast"), "costs": costs}
    half_s = options.get("time_limit_s", 2 * TIME_LIMIT_S) / 2
    with progress.shown("choosing regions to checkpoint"):
        # Eager mode makes tensors of a few bytes from Python numbers, 32 with unfused attention; the trace has none.
        graph = capture(model, loss, **given, whole=False, reserve=4096)
        problem = Problem(graph, budget)
        _check_update(graph.resident_bytes, model, optimizer, problem.budget_bytes)
        on_cpu = all(p.device.type in ("cpu", "meta") for p in model.parameters())  # the random state is always there
        return choose_policy(
            graph,
            problem.budget_bytes,
            solve(problem, limits=Limits(time_s=half_s), raise_on_failure=False),
            save=save,
            regions=regions,
            region_bytes=torch.get_rng_state().nbytes if on_cpu else 0,
            time_limit_s=half_s,
        )


def checkpoint_regions(model: torch.nn.Module, policy: RegionPolicy) -> torch.nn.Module:
    """Checkpoint the regions of a model by a policy, in place.

    The forward of each region is replaced; modules, parameters and their names stay.

    Args:
        model: The model that the policy was made for, or one of the same structure.
        policy: The policy.

    Returns:
        The model.

    Raises:
        OptionError: The model has no module of that name.
    """
    for name, saved in policy.saved.items():
        try:
            module = model.get_submodule(name)
        except AttributeError:
            raise OptionError(f"the model has no module {name!r}", hint="give the model that the policy was made for") from None
        module.forward = functools.partial(_checkpointed, module.forward, context_fn(saved))
    return model


def context_fn(saved: Iterable[Call]) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
    """The argument ``context_fn`` of `torch.utils.checkpoint.checkpoint` and of ``checkpoint_wrapper``, for one region.

    Args:
        saved: Ops to save: kind, and number of earlier ops of the same kind in the region, as in `RegionPolicy.saved`.
    """
    calls = frozenset((kind, occurrence) for kind, occurrence in saved)
    return functools.partial(_contexts, calls) if calls else noop_context_fn


def _checkpointed(forward: Callable[..., Any], contexts: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(saved: frozenset[Call]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    counts: Counter[tuple[bool, str]] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        run = (context.is_recompute, str(op))  # before 2.13 the policy is asked in the recomputation as well
        counts[run] += 1
        return CheckpointPolicy.MUST_SAVE if (run[1], counts[run] - 1) in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _check_update(
    resident_bytes: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, budget_bytes: int
) -> None:
    """Refuse a budget that the optimizer's step exceeds while all gradients exist."""
    if optimizer is None:
        return
    trained = [p for p in model.parameters() if p.requires_grad]
    kind = trained[0].device.type if trained else "cpu"
    needed = resident_bytes + sum(p.numel() * p.element_size() for p in trained) + step_temporary_bytes(optimizer, kind)
    if needed > budget_bytes:
        raise InfeasibleBudgetError(
            f"the optimizer's step needs {format_bytes(needed)}, and the budget is {format_bytes(budget_bytes)}",
            hint=f"raise the budget to at least {format_at_least(needed)}, or use checkmate.torch.compile, which updates each "
            "parameter during the backward",
            budget_bytes=budget_bytes,
            floor_bytes=needed,
        )
