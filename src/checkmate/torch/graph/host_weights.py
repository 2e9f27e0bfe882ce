"""Frozen weights on the host, in the graph of a step.

Each such weight is read by one node only, ``checkmate::on_device``, whose result is the weight on the device. A plan has this
result when the step begins, or replaces the node by copies before each use (`checkmate.torch.partition.copies`). What is fetched
is a storage, such as the packed numbers of a quantized weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from checkmate.core.errors import OptionError
from checkmate.torch._compat.dispatch import detect_fake_mode, traced_parts
from checkmate.torch.graph.op_properties import op_properties
from checkmate.torch.graph.storages import storage_key

_library = torch.library.Library("checkmate", "FRAGMENT")
_library.define("on_device(Tensor weight, Device device) -> Tensor")

ON_DEVICE = torch.ops.checkmate.on_device.default
_library.impl("on_device", lambda weight, device: weight.to(device), "CompositeExplicitAutograd")  # where no plan runs the graph


def is_frozen(tensor: object) -> bool:
    """Whether a tensor is a frozen parameter on the host."""
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad and tensor.device.type == "cpu"


def frozen_weights(inputs: Sequence[Any], device: torch.device) -> list[torch.Tensor | None]:
    """For each input of the traced graph of a step on a device: the weight, if it is a frozen one on the host; else None.

    A graph has the parts of a quantized weight as inputs, for example its packed numbers and its scales.

    Raises:
        OptionError: A frozen parameter is on the host, and a step on another device cannot fetch it.
    """
    parts = [(part, is_frozen(value)) for value in inputs for part in traced_parts(value)]
    owners = Counter(storage_key(t) for t, _ in parts if isinstance(t, torch.Tensor) and t.layout is torch.strided)
    found: list[torch.Tensor | None] = []
    for t, frozen in parts:
        alone = frozen and t.layout is torch.strided and owners[storage_key(t)] == 1
        found.append(t if alone and t.numel() * t.itemsize == t.untyped_storage().nbytes() else None)
        if frozen and found[-1] is None and device.type != "cpu":
            raise OptionError(
                f"a frozen parameter of shape {tuple(t.shape)} is on the host, shares its storage or is not dense, and cannot be "
                "fetched",
                hint=f"move it to the device: parameter.data = parameter.data.to({str(device)!r})",
            )
    return found


def read_on_device(weights: Iterable[fx.Node], first: fx.Node, device: torch.device) -> None:
    """Have a graph, whose first op is ``first``, read weights from a device, except those that it also overwrites or returns."""
    for weight in weights:
        users = [*weight.users]
        if not users or any(user.op == "output" or op_properties(user).mutates for user in users):
            continue
        with weight.graph.inserting_before(first):
            read = weight.graph.create_node("call_function", ON_DEVICE, (weight, device), name=f"{weight.name}_on_device")
        read.meta["val"] = like = weight.meta["val"]  # its views share its storage
        mode = detect_fake_mode([like])
        assert mode is not None
        with mode:
            weight.meta["val"] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        for user in users:
            user.replace_input_with(weight, read)


def weights_on_host(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of a graph that are read from the device, and whose bytes are on the host."""
    return [node.all_input_nodes[0] for node in graph.find_nodes(op="call_function", target=ON_DEVICE)]
