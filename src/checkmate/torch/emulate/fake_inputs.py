"""Fake tensors in the place of models and batches on the meta device, so that they can be traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from checkmate.torch._compat.dispatch import FakeTensor, FakeTensorMode


@contextmanager
def fake_inputs(example: Any, *owners: object) -> Iterator[Any]:
    """Replace tensors on the meta device, or of several fake modes, by fake CPU tensors of one mode while a step is traced.

    Meta tensors dispatch to other kernels than CPU tensors, so that the graph would be another; tensors of several fake modes
    cannot be traced together. Where neither occurs, nothing is replaced.

    Args:
        example: A batch: any nesting of tensors and other values.
        owners: Modules and optimizers; their tensors are replaced in place and restored on leaving. Other objects are ignored.

    Yields:
        The batch, with its tensors replaced.
    """
    modules = [m for owner in owners if isinstance(owner, nn.Module) for m in owner.modules()]
    groups = [g for owner in owners if isinstance(owner, torch.optim.Optimizer) for g in owner.param_groups]
    held = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
    batch = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor)]
    modes = {id(t.fake_mode) if isinstance(t, FakeTensor) else None for t in (*held, *batch)}
    if len(modes) == 1 and not any(t.device.type == "meta" for t in (*held, *batch)):
        yield example
        return
    to_fake = _fake_tensor_cache()
    undo: list[Callable[[], None]] = []
    try:
        for module in modules:
            for tensors in cast(tuple[dict[str, Any], ...], (module._parameters, module._buffers)):
                before = dict(tensors)
                undo.append(lambda tensors=tensors, before=before: tensors.update(before))
                tensors.update({name: None if t is None else to_fake(t) for name, t in before.items()})
        for group in groups:
            parameters = group["params"]
            undo.append(lambda group=group, parameters=parameters: group.update(params=parameters))
            group["params"] = [to_fake(p) for p in parameters]
        yield pytree.tree_map_only(torch.Tensor, to_fake, example)
    finally:
        for step in reversed(undo):
            step()


def _fake_tensor_cache() -> Callable[[torch.Tensor], Any]:
    """A function from tensors to fake tensors; equal objects map to one fake tensor, so that tied weights stay tied."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def to_fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            device = "cpu" if tensor.device.type == "meta" else tensor.device
            with mode:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            elif tensor.requires_grad:
                fake.requires_grad_()
            made[id(tensor)] = (tensor, fake)
        return made[id(tensor)][1]

    return to_fake
