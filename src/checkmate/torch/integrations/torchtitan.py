"""A budget for torchtitan's graph trainer. All that depends on private names of it is here; tested with torchtitan 0.3.0."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from typing import Any, TypeVar

import msgspec
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from checkmate.core.errors import InfeasibleBudgetError, MissingExtraError, OptionError
from checkmate.core.evaluate import evaluate
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, Result
from checkmate.core.simulate import simulate
from checkmate.core.units import Amount, format_at_least, format_bytes
from checkmate.frontend.options import TIME_LIMIT_S, budget_of_environment
from checkmate.solvers.solve import solve
from checkmate.torch.distributed.consensus import job_ranks, plan_on_rank0
from checkmate.torch.graph.op_properties import is_collective, tagged_random
from checkmate.torch.joint.capture import capture_joint
from checkmate.torch.measure.estimates import estimated_costs

_log = logging.getLogger("checkmate.torch")
_TRAINER = "torchtitan.experiments.graph_trainer"
Config = TypeVar("Config")


def with_budget(config: Config, budget: Amount | None = None) -> Config:
    """Let torchtitan's graph trainer recompute what a plan within a budget recomputes: in a function of your ``config_registry``.

    Registers the memory policy ``"checkmate"`` and selects it. It tags the forward of the traced step, and passes of torchtitan
    run each tagged op a second time, directly before the backward needs it.

    Args:
        config: A ``GraphTrainer.Config``.
        budget: Memory of the traced step on one device: parameters, gradients and activations, without the optimizer's state.
            None: the budget of the environment variable ``CHECKMATE_BUDGET``.

    Returns:
        The configuration.

    Raises:
        OptionError: There is no budget.

    Examples:
        >>> def llama3_8b_within():  # doctest: +SKIP
        ...     return with_budget(graph_trainer_llama3_8b(), "70GiB")
    """
    try:
        policies = import_module(f"{_TRAINER}.memory_policy")
    except ImportError as error:
        raise MissingExtraError("with_budget needs torchtitan, which is not installed", hint="pip install torchtitan") from error
    budget = budget_of_environment() if budget is None else budget
    if budget is None:
        raise OptionError("there is no budget", hint='give one: with_budget(config, "70GiB"), or set CHECKMATE_BUDGET')
    policy = functools.partial(_tagged, full=policies.MEMORY_POLICY_REGISTRY["full"], budget=budget)
    policies.register_memory_policy("checkmate")(policy)
    config.compile.memory_policy = "checkmate"  # type: ignore[attr-defined]
    return config


def _tagged(module: fx.GraphModule, *, config: Any, full: Any, budget: Amount) -> fx.GraphModule:
    """The policy: of the ops that torchtitan's full recomputation runs again, those that a plan recomputes."""
    full(module, config=config)
    step = _Step(module)
    limit_bytes, ranks = Problem(step.graph, budget).budget_bytes, job_ranks()
    plan = functools.partial(step.planned, budget_bytes=limit_bytes)
    result = plan(step.graph) if ranks is None else plan_on_rank0(ranks, step.graph, f"a budget of {budget}", plan)[1]
    again = _repeated(result.plan)
    for o, nodes in enumerate(step.nodes):
        for node in nodes:
            if "recompute" in node.meta:
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE if o in again else CheckpointPolicy.MUST_SAVE
    peak, limit = format_bytes(result.peak_bytes), format_bytes(limit_bytes)
    _log.info("torchtitan: planned %s of %s, overhead %.4fx", peak, limit, result.overhead)
    return module


def _backward_of_loss(module: fx.GraphModule) -> list[fx.Node]:
    """The first nodes of the backward, up to the last one of the loss: `selective_activation_remat_pass` leaves them as they are.

    Sums of gradients in the backward of the layers have the name of the loss too, up to PyTorch 2.14: it is removed.
    """
    backward = [node for node in module.graph.nodes if node.meta.get("autograd_backward")]
    names = [node.meta.get("custom", {}).get("module_fqn", "") for node in backward]
    end = next((i for i, name in enumerate(names) if name and name not in ("loss", "lm_head")), len(backward))
    for node, name in zip(backward[end:], names[end:], strict=True):
        if name in ("loss", "lm_head"):
            node.meta["custom"] = {k: v for k, v in node.meta["custom"].items() if k != "module_fqn"}
    return backward[:end]


def _repeated(plan: Plan) -> set[int]:
    return {o for o, count in Counter(plan.order).items() if count > 1}


class _Step:
    """The traced step, in which only the forward ops that torchtitan can run twice are recomputable."""

    def __init__(self, module: fx.GraphModule) -> None:
        capture = capture_joint(module, None, estimated_costs)
        self.nodes = [(m.node, *m.getitems) for m in capture.members if m.node is not None]  # a whole step has no boundary
        once = {read for node in _backward_of_loss(module) for read in node.all_input_nodes}
        ops = capture.graph.ops
        free = [
            ((op.recomputable and not tagged_random(made[0])) or is_collective(made[0]))
            and made[0].meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE
            and once.isdisjoint(made)
            for op, made in zip(ops, self.nodes, strict=True)
        ]
        changed = tuple(msgspec.structs.replace(op, recomputable=may) for op, may in zip(ops, free, strict=True))
        self.graph = msgspec.structs.replace(capture.graph, ops=changed)
        self._made_by = {v: o for o, op in enumerate(ops) for v in op.outputs}

    def planned(self, graph: Graph, budget_bytes: int) -> Result:
        """The plan of the tags. A plan of single ops has less memory than tags for the same ops: it is made for less."""
        target = budget_bytes
        free = {o for o, op in enumerate(graph.ops) if op.recomputable}
        while True:
            again = free
            if target > 0:
                single = solve(Problem(graph, target), limits=Limits(time_s=TIME_LIMIT_S), raise_on_failure=False)
                again = free if single.plan is None else _repeated(single.plan)
            plan = Plan.from_order(graph, self._order(graph, again))
            peak = simulate(graph, plan).peak_bytes
            if peak <= budget_bytes:
                return evaluate(graph, plan, budget_bytes)
            if again == free:
                raise InfeasibleBudgetError(
                    f"with every op tagged to be recomputed the step needs {format_bytes(peak)}, and the budget is "
                    f"{format_bytes(budget_bytes)}",
                    hint=f"raise the budget to at least {format_at_least(peak)}",
                    budget_bytes=budget_bytes,
                    smallest_bytes=peak,
                )
            target -= peak - budget_bytes

    def _order(self, graph: Graph, again: set[int]) -> Iterator[int]:
        """The order that `selective_activation_remat_pass` makes: an op runs again before the first backward op that needs it."""
        done = set[int]()
        for o, op in enumerate(graph.ops):
            if op.phase == "backward":
                needed, stack = set[int](), list(op.inputs)
                while stack:
                    maker = self._made_by.get(stack.pop())
                    if maker in again and maker not in needed:
                        needed.add(maker)
                        stack += graph.ops[maker].inputs
                yield from sorted(needed - done)
                done |= needed
            yield o
