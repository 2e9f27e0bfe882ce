"""A traced step as it would be on a device that is not there: its kernels, its allocator, its costs."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.utils import _pytree as pytree

from checkmate.core.errors import OptionError
from checkmate.cost.device import Device
from checkmate.cost.store import OpCost
from checkmate.torch._compat.autocast import autocast_enter
from checkmate.torch._compat.dispatch import FakeTensor, fake_tensor_on
from checkmate.torch.emulate.attention import attention_for
from checkmate.torch.emulate.autocast import cast
from checkmate.torch.emulate.workspace import modelled_workspace_bytes
from checkmate.torch.measure.roofline import estimate_ns

aten = torch.ops.aten

_STATISTICS = (aten.native_layer_norm.default, aten.native_group_norm.default, aten._fused_rms_norm.default)
"""Ops whose statistics are float32 on a CUDA device, and of the input's type on a processor."""

_CPU_ONLY = ("mkldnn", "onednn", "_for_cpu", "quantized")


@dataclass(frozen=True, slots=True)
class EmulatedDevice:
    """The device that a step is planned for.

    Attributes:
        device: Its profile.
        cpu_costs: Costs of ops on the processor at hand; of them the workspace counts where the target is a processor too.
        unknown_workspace: Op -> how many of them have a workspace that nobody knows before they run.
        cpu_only: Op -> how many of them only a processor has, so that the device runs others.
    """

    device: Device
    cpu_costs: Callable[[Sequence[fx.Node]], Sequence[OpCost]]
    unknown_workspace: Counter[str] = field(default_factory=Counter)
    cpu_only: Counter[str] = field(default_factory=Counter)

    def lower(self, gm: fx.GraphModule) -> None:
        """Put the device's own kernels into a graph of Dynamo, in place, where a processor has others.

        Raises:
            OptionError: Part of the step is under autocast for a device whose tensors are not there.
        """
        if self.device.kind != "cuda":
            return
        _refuse_autocast_by_name(gm.graph)
        attention = attention_for(self.device)
        for node in gm.graph.nodes:
            if node.op != "call_function":
                continue
            if node.target is torch.nn.functional.scaled_dot_product_attention:
                node.target = attention

    def relabel(self, graph: fx.Graph) -> None:
        """Say of every traced tensor that it is on the device, in place: sizes and states are then the device's."""
        if self.device.kind != "cuda":
            return
        moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for node in graph.nodes:
            if "val" not in node.meta:
                continue
            value = node.meta["val"]
            if node.target is operator.getitem and node.args[0].target in _STATISTICS:
                node.meta["val"] = node.args[0].meta["val"][node.args[1]]
                continue
            if node.target in _STATISTICS:
                value = (value[0], *cast(value[1:], torch.float32))
            node.meta["val"] = pytree.tree_map_only(FakeTensor, lambda t: _moved(t, moved), value)

    def costs(self, nodes: Sequence[fx.Node]) -> list[OpCost]:
        """Least times on the device, and workspace: as measured on a processor, modelled for a CUDA device."""
        times = [estimate_ns(n, self.device) for n in nodes]
        if self.device.kind == "cpu":
            return [OpCost(t, c.workspace_bytes) for t, c in zip(times, self.cpu_costs(nodes), strict=True)]
        return [OpCost(t, self._workspace(n)) for t, n in zip(times, nodes, strict=True)]

    def _workspace(self, node: fx.Node) -> int:
        known, name = modelled_workspace_bytes(node), str(node.target)
        if any(word in name for word in _CPU_ONLY):
            self.cpu_only[name] += 1
        elif known is None:
            self.unknown_workspace[name] += 1
        return known or 0


def _refuse_autocast_by_name(graph: fx.Graph) -> None:
    """Autocast for CUDA by name is silently off for tensors that are elsewhere, and what runs under it cannot be trusted."""
    inputs = pytree.tree_leaves([n.meta.get("example_value") for n in graph.find_nodes(op="placeholder")])
    here = {t.device.type for t in inputs if isinstance(t, torch.Tensor)}
    regions = [n.args for n in graph.find_nodes(op="call_function", target=autocast_enter)]
    around = [name for name in ("cpu", "cuda") if torch.is_autocast_enabled(name)]
    by_name = "cuda" in around or any(name == "cuda" for name, *_ in regions)
    on = bool(around) or any(enabled for _, _, enabled, _ in regions)
    if by_name and on and "cuda" not in here:
        raise OptionError(
            "part of the step is under torch.autocast('cuda'), which is off where it is traced: on the processor",
            hint="write torch.autocast(x.device.type), or leave it to autocast=torch.bfloat16",
        )


def _moved(tensor: FakeTensor, moved: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    if id(tensor) not in moved:
        # The one that came is kept, so that its id is nobody else's.
        moved[id(tensor)] = (tensor, fake_tensor_on(tensor, "cuda"))
    return moved[id(tensor)][1]
