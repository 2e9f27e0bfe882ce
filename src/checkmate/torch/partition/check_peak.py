"""Peak memory of forward and backward modules, from nothing but their nodes.

A second account of memory, independent of the first: it reads neither the captured graph nor the plan, and shares with capture,
simulation and validation only the sizes of storages and of random states. A partitioner that saves one tensor too many, a node
in the wrong place, or a value that capture took for a view changes this peak and not the planned one. Without the check, this
error would appear as a step over its budget, perhaps hours into training; with it, `SplitError` is raised before anything runs.

Liveness is as in boxed FX code: a storage is allocated by the first node that returns a tensor of it, and freed after the
last node that reads any tensor of it, except:

- inputs that exist before the step are never allocated nor freed;
- outputs for the caller live to the end of their module, or of the step if the caller holds them;
- the tangent of a scalar is held by ``loss.backward()`` until the backward returns (`is_scalar`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from checkmate.core.errors import CheckmateError
from checkmate.torch._compat.aot import is_tangent
from checkmate.torch._compat.dispatch import HigherOrderOperator
from checkmate.torch.graph.op_properties import UNDEFINED, random_op
from checkmate.torch.graph.rng import rng_state_bytes
from checkmate.torch.graph.storages import is_scalar, leaves, storage_bytes, storage_key
from checkmate.torch.graph.traced import results
from checkmate.torch.joint.capture import Costs
from checkmate.torch.partition.copies import COPY_FUNCTIONS
from checkmate.torch.partition.update_groups import WORKSPACE


class SplitError(CheckmateError, RuntimeError):
    """Forward and backward modules would take more memory than planned: a bug of Checkmate, found before the step ran."""


def peak_of_split(
    forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int, costs: Costs, *, hold_outputs: bool
) -> int:
    """Peak of forward and backward modules, in bytes above resident bytes; ``costs`` gives the workspace of ops.

    The outputs of the forward after the first ``num_fwd_outputs`` are saved for the backward, whose placeholders for them have
    the names of the forward's nodes. With ``hold_outputs`` the caller holds the first ones to the end of the step.

    Raises:
        SplitError: The backward reads a value that the forward does not return.
    """
    liveness = _Liveness(costs, forward, backward)
    liveness.module(forward, {})
    returned = results(forward)
    liveness.use(returned)
    saved = {n.name: liveness.where[n] for n in returned[num_fwd_outputs:] if isinstance(n, fx.Node)}
    saved.update({n.name: liveness.where[n] for n in forward.graph.nodes if n.op == "placeholder"})
    liveness.module(backward, saved)
    tangents = [n for n in backward.graph.nodes if is_tangent(n) and not n.meta.get(UNDEFINED)]
    scalar_tangents = [n for n in tangents if all(map(is_scalar, leaves(n.meta.get("val"))))]
    liveness.use([*results(backward), *scalar_tangents, *(returned[:num_fwd_outputs] if hold_outputs else ())])
    return liveness.peak()


def peak_of_whole_step(module: fx.GraphModule, costs: Costs) -> int:
    """Peak of the module of a whole step, in bytes above resident bytes; see `peak_of_split`."""
    liveness = _Liveness(costs, module)
    liveness.module(module, {})
    liveness.use(results(module))
    return liveness.peak()


class _Liveness:
    """First and last use of every storage along the nodes of one or two modules.

    Storage keys identify storages within one trace only: a recomputation returns the key of the original, but allocates again.
    Each allocation is therefore an instance with separate times, and nodes map keys to instances. Storages from before the step
    have no instance.
    """

    def __init__(self, costs: Costs, *modules: fx.GraphModule) -> None:
        self.now = 0  # the number of nodes visited
        self.instances: list[list[int]] = []  # bytes, and the times of the first and the last use
        self.where: dict[fx.Node, dict[int, int | None]] = {}  # the instances of a node's result, by storage key
        self.extra: dict[int, int] = {}  # time to workspace in bytes
        nodes = [n for m in modules for n in m.graph.nodes if n.op == "call_function"]
        run = [n for n in nodes if n.target is not operator.getitem and n.target not in COPY_FUNCTIONS]
        self.workspace = {n: n.meta.get(WORKSPACE, c.workspace_bytes) for n, c in zip(run, costs(run), strict=True)}

    def module(self, module: fx.GraphModule, saved: dict[str, dict[int, int | None]]) -> None:
        """Visit the nodes of a module; a backward gets the values that the forward saved, by name."""
        for node in module.graph.nodes:
            self.now += 1
            if node.meta.get(UNDEFINED):
                self.where[node] = {}
            elif node.op == "placeholder" and is_tangent(node):
                self.where[node] = {storage_key(t): self._new(storage_bytes(t)) for t in leaves(node.meta.get("val"))}
            elif node.op == "placeholder" and saved and leaves(node.meta.get("val")):
                if node.name not in saved:
                    raise SplitError(f"the backward reads {node.name!r}, which the forward does not return")
                self.where[node] = saved[node.name]
            elif node.op in ("placeholder", "get_attr"):
                self.where[node] = {storage_key(t): None for t in leaves(node.meta.get("val"))}
            elif node.op == "call_function":
                self._run(node)
        self.now += 1  # later uses come after all nodes

    def _run(self, node: fx.Node) -> None:
        self.use(node.all_input_nodes)
        given: dict[int, int | None] = {}
        # A higher-order op returns new storages, even if two calls share one trace and its keys.
        for read in () if isinstance(node.target, HigherOrderOperator) else node.all_input_nodes:
            given.update(self.where[read])
        made: dict[int, int | None] = {}
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

    def use(self, nodes: Sequence[object]) -> None:
        """Note that the storages of the nodes in ``nodes`` are alive now."""
        for node in nodes:
            for instance in self.where[node].values() if isinstance(node, fx.Node) else ():
                if instance is not None:
                    self.instances[instance][2] = self.now

    def _new(self, size: int) -> int:
        self.instances.append([size, self.now, self.now])
        return len(self.instances) - 1

    def peak(self) -> int:
        """Maximum over time of the bytes of live instances and workspace."""
        change = [0] * (self.now + 2)
        for size, birth, death in self.instances:
            change[birth] += size
            change[death + 1] -= size
        peak = held = 0
        for time, delta in enumerate(change):
            held += delta
            peak = max(peak, held + self.extra.get(time, 0))
        return peak
