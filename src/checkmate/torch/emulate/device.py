"""A device that need not be present, for planning a traced step: its kernels, allocator and costs."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from checkmate.core.errors import OptionError
from checkmate.cost.device import Device
from checkmate.cost.store import OpCost
from checkmate.torch._compat.dispatch import FakeTensor, FakeTensorMode, autocast_enter, fake_tensor_on
from checkmate.torch.emulate.attention import attention_for
from checkmate.torch.emulate.autocast import cast
from checkmate.torch.emulate.workspace import modelled_workspace_bytes
from checkmate.torch.graph.op_properties import PIECES
from checkmate.torch.measure.estimates import estimate_ns, pieces_workspace_bytes
from checkmate.torch.measure.profiler import described

aten = torch.ops.aten

_STATISTICS = (aten.native_layer_norm.default, aten.native_group_norm.default, aten._fused_rms_norm.default)
"""Normalisations whose saved statistics are float32 on CUDA, and of the input's type on a CPU."""

_CPU_ONLY = ("mkldnn", "onednn", "_for_cpu", "quantized")
"""Parts of names of ops that exist only for CPUs; a CUDA device runs other, unknown ops in their place."""

_CUDA = torch.device("cuda")


@dataclass(frozen=True, slots=True)
class EmulatedDevice:
    """A device that a step is planned for, described by its profile."""

    device: Device
    cpu_costs: Callable[[Sequence[fx.Node]], Sequence[OpCost]]  # gives the workspaces if the device is a CPU too
    # Counted by `costs`: nodes, by op, with workspace decided at run time; and nodes that a CUDA device replaces by other ops.
    unknown_workspace: Counter[str] = field(default_factory=Counter)
    cpu_only: Counter[str] = field(default_factory=Counter)

    def lower(self, gm: fx.GraphModule) -> None:
        """Replace ops in a Dynamo graph, in place, if the device's op saves other tensors than the CPU's.

        Raises `OptionError` if part of the step is under ``torch.autocast("cuda")``, which does nothing in a trace on the CPU.
        """
        if self.device.kind != "cuda":
            return
        _refuse_autocast_by_name(gm.graph)
        attention = attention_for(self.device)
        for node in gm.graph.find_nodes(op="call_function", target=torch.nn.functional.scaled_dot_product_attention):
            node.target = attention

    def relabel(self, graph: fx.Graph) -> None:
        """Move every fake tensor of a graph to the device, in place; sizes are then rounded as by its allocator.

        The tensors keep their storages, and with them all aliasing. Devices among the arguments of ops are replaced too, for
        later traces of an op on slices of its tensors.
        """
        if self.device.kind != "cuda":
            return
        moved = functools.cache(lambda tensor: fake_tensor_on(tensor, _CUDA))
        for node in graph.nodes:
            node.args, node.kwargs = pytree.tree_map_only(torch.device, lambda d: _CUDA, (node.args, node.kwargs))
            if node.target is operator.getitem and node.args[0].target in _STATISTICS:
                node.meta["val"] = node.args[0].meta["val"][node.args[1]]
            elif "val" in node.meta:
                value = node.meta["val"]
                if node.target in _STATISTICS:
                    value = (value[0], *cast(value[1:], torch.float32))
                node.meta["val"] = pytree.tree_map_only(FakeTensor, moved, value)

    def costs(self, nodes: Sequence[fx.Node]) -> list[OpCost]:
        """Costs that the profile has as measured; else roofline times, and workspace: measured for a CPU, modelled for CUDA."""
        known = {n: self.device.measured.get(described(n) or "") for n in nodes} if self.device.measured else {}
        others = [n for n in nodes if known.get(n) is None]
        here = [c.workspace_bytes for c in self.cpu_costs(others)] if self.device.kind == "cpu" else map(self._workspace, others)
        found = {n: (estimate_ns(n, self.device), workspace) for n, workspace in zip(others, here, strict=True)}
        return [OpCost(*(known.get(n) or found[n])) for n in nodes]

    def _workspace(self, node: fx.Node) -> int:
        if PIECES in node.meta:
            return pieces_workspace_bytes(node, self._workspace)
        known, name = modelled_workspace_bytes(node), str(node.target)
        if any(word in name for word in _CPU_ONLY):
            self.cpu_only[name] += 1
        elif known is None:
            self.unknown_workspace[name] += 1
        return known or 0


def _refuse_autocast_by_name(graph: fx.Graph) -> None:
    """Refuse ``torch.autocast("cuda")``: without CUDA tensors it is silently off, and the traced types would be wrong with it."""
    inputs = pytree.tree_leaves([n.meta.get("example_value") for n in graph.find_nodes(op="placeholder")])
    here = {t.device.type for t in inputs if isinstance(t, torch.Tensor)}
    regions = [n.args for n in graph.find_nodes(op="call_function", target=autocast_enter)]
    around = [name for name in ("cpu", "cuda") if torch.is_autocast_enabled(name)]
    by_name = "cuda" in around or any(name == "cuda" for name, *_ in regions)
    on = bool(around) or any(enabled for _, _, enabled, _ in regions)
    if by_name and on and "cuda" not in here:
        raise OptionError(
            "part of the step is under torch.autocast('cuda'), which does nothing here, because the step is traced on the CPU",
            hint="write torch.autocast(x.device.type) in the model, or remove it and pass autocast=torch.bfloat16",
        )


@contextmanager
def fake_inputs(example: Any, *owners: object) -> Iterator[Any]:
    """Replace tensors on the meta device, or of several fake modes, by fake CPU tensors of one mode while a step is traced.

    Meta tensors dispatch to other kernels than CPU tensors, which would change the graph; tensors of several fake modes cannot be
    traced together. Without either, nothing is replaced. Yields the batch; tensors of the modules and optimizers among the owners
    are replaced in place and restored on leaving.
    """
    modules = [m for owner in owners if isinstance(owner, nn.Module) for m in owner.modules()]
    groups = [g for owner in owners if isinstance(owner, torch.optim.Optimizer) for g in owner.param_groups]
    held = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
    tensors = [*held, *(leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor))]
    modes = {id(t.fake_mode) if isinstance(t, FakeTensor) else None for t in tensors}
    if len(modes) == 1 and not any(t.device.type == "meta" for t in tensors):
        yield example
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    @functools.cache  # the same object is one fake tensor: tied weights stay tied
    def faked(tensor: torch.Tensor) -> torch.Tensor:
        device = "cpu" if tensor.device.type == "meta" else tensor.device
        with mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)

    with ExitStack() as restored:
        stores: list[dict[str, Any]] = [store for m in modules for store in (m._parameters, m._buffers)]  # type: ignore[misc]
        for store in stores:
            restored.callback(store.update, dict(store))
            store.update({name: None if t is None else faked(t) for name, t in store.items()})
        for group in groups:
            restored.callback(group.update, params=group["params"])
            group["params"] = [faked(p) for p in group["params"]]
        yield pytree.tree_map_only(torch.Tensor, faked, example)
