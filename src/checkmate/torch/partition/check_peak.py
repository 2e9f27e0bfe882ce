"""The peak of a forward and a backward module as split, by their own nodes alone.

Shares nothing with the capture or the core's account: a plan counts as imposed only if what will run
really takes what was planned.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from torch import fx

from checkmate.core.errors import CheckmateError
from checkmate.cost.store import OpCost
from checkmate.torch._compat.aot import is_tangent
from checkmate.torch._compat.dispatch import HigherOrderOperator
from checkmate.torch.graph.op_properties import random_op
from checkmate.torch.graph.rng import rng_state_bytes
from checkmate.torch.graph.storages import SCALAR_TANGENT_BYTES, leaves, storage_bytes, storage_key

_EXTERNAL = -1


class SplitError(CheckmateError, RuntimeError):
    """Forward and backward as split take other memory than planned: a bug, found before anything ran."""


def peak_of_split(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    num_fwd_outputs: int,
    costs: Callable[[Sequence[fx.Node]], Sequence[OpCost]],
    *,
    hold_outputs: bool,
) -> int:
    """Peak of the two modules above what is resident, in bytes.

    Args:
        forward: The forward module.
        backward: The backward module; what it reads of the forward has the same names there.
        num_fwd_outputs: How many outputs of the forward go to the caller.
        costs: Workspace of nodes.
        hold_outputs: Whether the caller holds the forward's outputs to the end.

    Raises:
        SplitError: The backward reads what the forward does not return.
    """
    liveness = _Liveness(costs, [n for m in (forward, backward) for n in m.graph.nodes if n.op == "call_function"])
    liveness.module(forward, {})
    liveness.step()
    results = _results(forward)
    liveness.use([n for n in results if isinstance(n, fx.Node)])
    saved = {n.name: liveness.where[n] for n in results[num_fwd_outputs:] if isinstance(n, fx.Node)}
    saved.update({n.name: liveness.where[n] for n in forward.graph.nodes if n.op == "placeholder"})
    held = [n for n in results[:num_fwd_outputs] if isinstance(n, fx.Node)]
    liveness.module(backward, saved)
    liveness.step()
    tangents = [n for n in backward.graph.nodes if is_tangent(n)]
    scalar_tangents = [n for n in tangents if sum(map(storage_bytes, leaves(n.meta.get("val")))) <= SCALAR_TANGENT_BYTES]
    liveness.use([n for n in _results(backward) if isinstance(n, fx.Node)] + scalar_tangents + (held if hold_outputs else []))
    return liveness.peak()


def peak_of_whole_step(module: fx.GraphModule, costs: Callable[[Sequence[fx.Node]], Sequence[OpCost]]) -> int:
    """Peak of the graph of a whole step above what is resident, in bytes."""
    liveness = _Liveness(costs, [n for n in module.graph.nodes if n.op == "call_function"])
    liveness.module(module, {})
    liveness.step()
    liveness.use([n for n in _results(module) if isinstance(n, fx.Node)])
    return liveness.peak()


def _results(module: fx.GraphModule) -> Sequence[object]:
    return next(iter(reversed(module.graph.nodes))).args[0]


class _Liveness:
    """Births and deaths of storages along the nodes of both modules."""

    def __init__(self, costs: Callable[[Sequence[fx.Node]], Sequence[OpCost]], nodes: list[fx.Node]) -> None:
        self.now = 0
        self.size: list[int] = []
        self.birth: list[int] = []
        self.death: list[int] = []
        self.where: dict[fx.Node, dict[int, int]] = {}  # node -> storage as traced -> instance
        self.extra: dict[int, int] = {}  # time -> workspace
        run = [n for n in nodes if n.target is not operator.getitem]
        self.workspace = {n: c.workspace_bytes for n, c in zip(run, costs(run), strict=True)}

    def module(self, module: fx.GraphModule, saved: dict[str, dict[int, int]]) -> None:
        for node in module.graph.nodes:
            self.step()
            if node.op == "placeholder" and is_tangent(node):
                self.where[node] = {storage_key(t): self._new(storage_bytes(t)) for t in leaves(node.meta.get("val"))}
            elif node.op == "placeholder" and saved and leaves(node.meta.get("val")):
                if node.name not in saved:
                    raise SplitError(f"the backward reads {node.name!r}, which the forward does not return")
                self.where[node] = saved[node.name]
            elif node.op in ("placeholder", "get_attr"):
                self.where[node] = {storage_key(t): _EXTERNAL for t in leaves(node.meta.get("val"))}
            elif node.op == "call_function":
                self._run(node)

    def _run(self, node: fx.Node) -> None:
        self.use(node.all_input_nodes)
        given: dict[int, int] = {}
        # What a higher-order op returns is new, even where two calls were traced as one.
        for read in () if isinstance(node.target, HigherOrderOperator) else node.all_input_nodes:
            given.update(self.where[read])
        made: dict[int, int] = {}
        for tensor in leaves(node.meta.get("val")):
            key = storage_key(tensor)
            if key not in made:
                made[key] = given[key] if key in given else self._new(storage_bytes(tensor))
        self.where[node] = made
        self.use([node])
        if node in self.workspace:
            drawn = random_op(node)
            replayed = rng_state_bytes(node) if drawn is not None and drawn[1] == "replay" else 0
            self.extra[self.now] = self.workspace[node] + replayed

    def step(self) -> None:
        self.now += 1

    def use(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            for instance in self.where[node].values():
                if instance != _EXTERNAL:
                    self.death[instance] = self.now

    def _new(self, size: int) -> int:
        self.size.append(size)
        self.birth.append(self.now)
        self.death.append(self.now)
        return len(self.size) - 1

    def peak(self) -> int:
        change = [0] * (self.now + 2)
        for size, birth, death in zip(self.size, self.birth, self.death, strict=True):
            change[birth] += size
            change[death + 1] -= size
        peak = held = 0
        for time, delta in enumerate(change):
            held += delta
            peak = max(peak, held + self.extra.get(time, 0))
        return peak
