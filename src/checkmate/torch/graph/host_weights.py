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
from checkmate.torch._compat.dispatch import detect_fake_mode
from checkmate.torch.graph.op_properties import op_properties
from checkmate.torch.graph.storages import storage_key

_library = torch.library.Library("checkmate", "FRAGMENT")
_library.define("on_device(Tensor weight, Device device) -> Tensor")

ON_DEVICE = torch.ops.checkmate.on_device.default


def is_frozen(tensor: object) -> bool:
    """Whether a tensor is a frozen parameter on the host."""
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad and tensor.device.type == "cpu"


def frozen_weights(inputs: Sequence[Any], device: torch.device) -> frozenset[int]:
    """Positions of the inputs of a step on a device that are frozen parameters on the host, each in a storage of its own.

    Raises:
        OptionError: A frozen parameter is on the host, and a step on another device cannot fetch it.
    """
    owners = Counter(storage_key(t) for t in inputs if isinstance(t, torch.Tensor) and t.layout is torch.strided)
    found = set[int]()
    for k, t in enumerate(inputs):
        if not is_frozen(t):
            continue
        if t.layout is torch.strided and owners[storage_key(t)] == 1 and t.numel() * t.itemsize == t.untyped_storage().nbytes():
            found.add(k)
        elif device.type != "cpu":
            raise OptionError(
                f"a frozen parameter of shape {tuple(t.shape)} is on the host, shares its storage or is not dense, and cannot be "
                "fetched",
                hint=f"move it to the device: parameter.data = parameter.data.to({str(device)!r})",
            )
    return frozenset(found)


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
