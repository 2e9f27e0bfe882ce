"""Frozen weights on the host, in the graph of a step.

Each such weight is read by one node only, ``checkmate::on_device``, whose result is the weight on the device. A plan has this
result when the step begins, or replaces the node by copies before each use (`checkmate.torch.partition.copies`). What is fetched
is a storage, such as the packed numbers of a quantized weight.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import fx

from checkmate.core.errors import OptionError
from checkmate.core.units import format_bytes
from checkmate.torch._compat.dispatch import detect_fake_mode, traced_on, traced_parts
from checkmate.torch.graph.op_properties import op_properties
from checkmate.torch.graph.storages import storage_key, unique_bytes

_log = logging.getLogger("checkmate.torch")
_library = torch.library.Library("checkmate", "FRAGMENT")
_library.define("on_device(Tensor weight, Device device) -> Tensor")

ON_DEVICE = torch.ops.checkmate.on_device.default
_library.impl("on_device", lambda weight, device: weight.to(device), "CompositeExplicitAutograd")  # where no plan runs the graph


ON_HOST: Final = weakref.WeakValueDictionary[int, torch.UntypedStorage]()
"""The storages of weights that graphs read by `ON_DEVICE`, by their keys: no memory of a device, even if that is a CPU."""


def is_frozen(tensor: object) -> bool:
    """Whether a tensor is a frozen parameter on the host."""
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad and tensor.device.type == "cpu"


def traced_on_device(device: torch.device) -> AbstractContextManager[None]:
    """Context in which frozen weights on the host have fake tensors on the device of a step, whose ops read them there."""
    return nullcontext() if device.type == "cpu" else traced_on(device, is_frozen)


def frozen_weights(inputs: Sequence[Any], device: torch.device) -> list[torch.Tensor | None]:
    """For each input of the traced graph of a step on a device: the weight, if it is a frozen one on the host; else None.

    A graph has the parts of a quantized weight as inputs, for example its packed numbers and its scales.

    Raises:
        OptionError: A frozen parameter is on the host, and a step on another device cannot fetch it.
    """
    there = unique_bytes(t for t in inputs if isinstance(t, torch.nn.Parameter) and not t.requires_grad and not is_frozen(t))
    if there:
        _log.warning(
            "%s of frozen parameters are on %s already: they stay there, and only those on the CPU are fetched from the host\n"
            "hint: leave the model on the CPU, and move what is trained: p.data = p.data.to(%r) for p with p.requires_grad",
            format_bytes(there),
            device,
            str(device),
        )
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


def read_on_device(weights: Mapping[fx.Node, torch.Tensor], first: fx.Node, device: torch.device) -> None:
    """Have a graph, whose first op is ``first``, read weights from a device, except those that it also overwrites or returns."""
    for weight, tensor in weights.items():
        users = [*weight.users]
        if not users:
            continue
        if any(user.op == "output" or op_properties(user).mutates for user in users):
            if device.type == "cpu":
                continue
            raise OptionError(
                f"a frozen parameter of shape {tuple(tensor.shape)} is on the host, and the graph returns or overwrites it",
                hint=f"move it to the device: parameter.data = parameter.data.to({str(device)!r})",
            )
        with weight.graph.inserting_before(first):
            read = weight.graph.create_node("call_function", ON_DEVICE, (weight, device), name=f"{weight.name}_on_device")
        read.meta["val"] = like = weight.meta["val"]  # its views share its storage
        mode = detect_fake_mode([like])
        assert mode is not None
        with mode:
            weight.meta["val"] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        for user in users:
            user.replace_input_with(weight, read)
        ON_HOST[storage_key(tensor)] = tensor.untyped_storage()


def weights_on_host(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of a graph that are read from the device, and whose bytes are on the host."""
    return [node.all_input_nodes[0] for node in graph.find_nodes(op="call_function", target=ON_DEVICE)]
