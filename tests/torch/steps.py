"""Run a step and see everything it leaves behind."""

from __future__ import annotations

import copy
import functools
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config

from checkmate import Problem, Result, Termination
from checkmate.core.result import Reason
from checkmate.solvers.session import Session
from checkmate.torch.backend import compile_graph
from checkmate.torch.compilation.resident_account import Hooks
from checkmate.torch.measure.device_memory import device_memory
from checkmate.torch.options import Options
from checkmate.torch.steps.program import GraphInterface

dynamo_settings, functorch_settings = dynamo_config.patch, functorch_config.patch
"""Contexts and decorators with other settings of torch."""

Planned = list[tuple[GraphInterface, Result]]
ROOMY = "64GiB"


@dataclass(frozen=True, slots=True)
class Forgetful:
    """A solver that forgets every value of the forward after each few backward ops and computes it again.

    The worst plan there is, and so the best one to find out whether recomputation is right.
    """

    every: int = 4

    def run(self, problem: Problem, session: Session) -> Termination:
        """Offer that one order."""
        graph = problem.graph
        boundary = next(o for o, op in enumerate(graph.ops) if op.kind == "boundary" or op.phase == "backward")
        clobbered: dict[int, list[int]] = {}
        for o, op in enumerate(graph.ops):
            for by in op.clobbered_by:
                clobbered.setdefault(by, []).append(o)
        order, live, done = [], set[int](), set[int]()

        def compute(op: int) -> None:
            stack = [op]
            while stack:
                missing = [graph.producer[v] for v in graph.ops[stack[-1]].inputs if v not in live]
                if missing:
                    stack.append(missing[0])
                    continue
                o = stack.pop()
                order.append(o)
                done.add(o)
                live.update(graph.ops[o].outputs)

        for op in range(boundary + 1):
            compute(op)
        for count, op in enumerate(range(boundary + 1, len(graph.ops))):
            if count % self.every == 0:
                again = [o for o in range(boundary) if graph.ops[o].recomputable and done.isdisjoint(graph.ops[o].clobbered_by)]
                live.difference_update(v for o in again for v in graph.ops[o].outputs)
            for o in clobbered.get(op, ()):  # the last time that what it made can be made
                if not live.issuperset(graph.ops[o].outputs):
                    compute(o)
            compute(op)
        session.offer(order)
        return Termination(Reason.FEASIBLE)


@dataclass(frozen=True, slots=True)
class Observed:
    """What a step computed."""

    results: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    buffers: list[torch.Tensor]
    random_state: torch.Tensor

    def differs(self, other: Observed) -> list[str]:
        """What is not equal to the bit."""
        wrong = []
        for name in ("results", "gradients", "buffers"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if len(mine) != len(theirs) or not all(_equal(a, b) for a, b in zip(mine, theirs, strict=True)):
                wrong.append(name)
        return wrong if torch.equal(self.random_state, other.random_state) else [*wrong, "random_state"]


def observe(model: nn.Module, run: Callable[[], Any], steps: int = 2) -> Observed:
    """Everything that a few steps from a fixed seed leave; the model's buffers are as before afterwards."""
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    results, gradients = [], []
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        loss = run()
        loss.backward()
        results.append(loss.detach().clone())
        gradients += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    found = Observed(results, gradients, [b.clone() for b in model.buffers()], torch.get_rng_state())
    model.load_state_dict(before)
    model.zero_grad(set_to_none=True)
    return found


def compiled(
    fn: Callable[..., Any], *, fullgraph: bool = True, dynamic: bool | None = None, **options: Any
) -> tuple[Callable[..., Any], Planned]:
    """A function compiled by the backend, and the list that its plans are noted in."""
    planned: Planned = []
    hooks = Hooks(planned=lambda interface, result: planned.append((interface, result)))
    backend = functools.partial(compile_graph, options=Options(**options), hooks=hooks)
    return torch.compile(fn, backend=backend, fullgraph=fullgraph, dynamic=dynamic), planned


def planned_bytes(planned: Planned) -> int:
    """Peak of the newest plan above what is resident."""
    interface, result = planned[-1]
    assert result.peak_bytes is not None
    return result.peak_bytes - interface.graph.resident_bytes


def recomputes(planned: Planned) -> int:
    """How many computations of the newest plan are repetitions."""
    plan = planned[-1][1].plan
    assert plan is not None
    return len(plan.order) - len(set(plan.order))


def live_bytes() -> int:
    """Bytes of all tensors that exist now."""
    gc.collect()
    return device_memory(torch.device("cpu")).total_bytes


def close(measured: int, planned: int) -> bool:
    """Whether a measured peak is the planned one: within 64 bytes or a thousandth.

    A plan counts 5056 bytes beside every random op, for the generator's own state while another is
    replayed; where the peak is at one that is not replayed, so much less is measured.
    """
    return abs(measured - planned) <= max(64, planned // 1000) or 0 <= planned - measured <= 5056


def child(code: str, **environment: str) -> Any:
    """What a fresh Python process prints last, as JSON."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))
