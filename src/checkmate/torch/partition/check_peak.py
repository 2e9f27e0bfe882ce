"""Peak memory of forward and backward modules, from their own nodes alone.

A second account of memory, independent of the first: it reads neither the captured graph nor the plan, and shares with capture,
simulation and validation only the sizes of storages and of random states. A partitioner that saves one tensor too many, a node
in the wrong place, or a value that capture took for a view changes this peak and not the planned one. Without the check such an
error would surface as a step over its budget, perhaps hours into training; with it, `SplitError` is raised before anything runs.

Liveness is that of boxed FX code: a storage is allocated by the node that first returns a tensor of it, and freed after the
last node that reads any tensor of it, except:

- inputs that exist before the step are never allocated nor freed (`_EXTERNAL`);
- outputs for the caller live to the end of their module, or of the step if the caller holds them;
- the tangent of a scalar is held by ``loss.backward()`` until the backward returns (`is_scalar`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from torch import fx

from checkmate.core.errors import CheckmateError
from checkmate.cost.store import OpCost
from checkmate.torch._compat.aot import is_tangent
from checkmate.torch._compat.dispatch import HigherOrderOperator
from checkmate.torch.graph.op_properties import UNDEFINED, random_op
from checkmate.torch.graph.rng import rng_state_bytes
from checkmate.torch.graph.storages import is_scalar, leaves, storage_bytes, storage_key
from checkmate.torch.partition.copies import is_copy

_EXTERNAL = -1


class SplitError(CheckmateError, RuntimeError):
    """Forward and backward modules would take more memory than planned: a bug of Checkmate, found before anything ran."""


def peak_of_split(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    num_fwd_outputs: int,
    costs: Callable[[Sequence[fx.Node]], Sequence[OpCost]],
    *,
    hold_outputs: bool,
) -> int:
    """Peak of forward and backward modules, in bytes above resident bytes.

    Args:
        forward: The forward module.
        backward: The backward module. Its placeholders for saved values have the names of the forward's nodes.
        num_fwd_outputs: How many outputs of the forward go to the caller; the others are saved for the backward.
        costs: Maps nodes to costs, of which the workspace is used.
        hold_outputs: Whether the caller holds the forward's outputs to the end of the step.

    Raises:
        SplitError: The backward reads a value that the forward does not return.
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
    tangents = [n for n in backward.graph.nodes if is_tangent(n) and not n.meta.get(UNDEFINED)]
    scalar_tangents = [n for n in tangents if all(map(is_scalar, leaves(n.meta.get("val"))))]
    liveness.use([n for n in _results(backward) if isinstance(n, fx.Node)] + scalar_tangents + (held if hold_outputs else []))
    return liveness.peak()


def peak_of_whole_step(module: fx.GraphModule, costs: Callable[[Sequence[fx.Node]], Sequence[OpCost]]) -> int:
    """Peak of the module of a whole step, in bytes above resident bytes; see `peak_of_split`.

    Args:
        module: The module.
        costs: Maps nodes to costs, of which the workspace is used.
    """
    liveness = _Liveness(costs, [n for n in module.graph.nodes if n.op == "call_function"])
    liveness.module(module, {})
    liveness.step()
    liveness.use([n for n in _results(module) if isinstance(n, fx.Node)])
    return liveness.peak()


def _results(module: fx.GraphModule) -> Sequence[object]:
    return next(iter(reversed(module.graph.nodes))).args[0]


class _Liveness:
    """First and last use of every storage along the nodes of one or two modules.

    Storage keys identify storages within one trace only: a recomputation returns the key of the original, but allocates
    again. So each allocation is an instance with its own times, and nodes map keys to instances.

    Attributes:
        now: Time: the number of nodes visited.
        size: Bytes of each instance.
        birth: Time at which each instance is allocated.
        death: Time of its last use.
        where: Node to the instances of the storages in its result, by storage key.
        extra: Time to workspace in bytes.
        workspace: Node to workspace in bytes.
    """

    def __init__(self, costs: Callable[[Sequence[fx.Node]], Sequence[OpCost]], nodes: list[fx.Node]) -> None:
        self.now = 0
        self.size: list[int] = []
        self.birth: list[int] = []
        self.death: list[int] = []
        self.where: dict[fx.Node, dict[int, int]] = {}
        self.extra: dict[int, int] = {}
        run = [n for n in nodes if n.target is not operator.getitem and not is_copy(n)]
        self.workspace = {n: c.workspace_bytes for n, c in zip(run, costs(run), strict=True)}

    def module(self, module: fx.GraphModule, saved: dict[str, dict[int, int]]) -> None:
        """Visit the nodes of a module.

        Args:
            module: The module.
            saved: For a backward module, name of a node of the forward to its instances; empty for others.

        Raises:
            SplitError: A backward module reads a value that the forward does not return.
        """
        for node in module.graph.nodes:
            self.step()
            if node.meta.get(UNDEFINED):
                self.where[node] = {}
            elif node.op == "placeholder" and is_tangent(node):
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
        # A higher-order op returns new storages, even where two calls share one trace and with it the keys.
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
        """Advance time, so that uses noted next are later than all nodes so far."""
        self.now += 1

    def use(self, nodes: Sequence[fx.Node]) -> None:
        """Note that the storages of nodes are alive now."""
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
        """Largest sum of live instances and workspace over time, in bytes."""
        change = [0] * (self.now + 2)
        for size, birth, death in zip(self.size, self.birth, self.death, strict=True):
            change[birth] += size
            change[death + 1] -= size
        peak = held = 0
        for time, delta in enumerate(change):
            held += delta
            peak = max(peak, held + self.extra.get(time, 0))
        return peak
