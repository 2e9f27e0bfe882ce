"""Models and batches without memory behind them, made ready to be traced as if on a processor."""

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
    """Stand-ins with shapes and nothing else for tensors on the meta device, for as long as a step is traced.

    Tensors of the meta device are traced with other kernels than a processor's, and tensors of several fake modes not at all.
    Where there are none of either, nothing is replaced.

    Args:
        example: A batch.
        owners: Modules and optimizers whose tensors are replaced in place, and put back afterwards; others are left alone.

    Yields:
        The batch.
    """
    modules = [m for owner in owners if isinstance(owner, nn.Module) for m in owner.modules()]
    groups = [g for owner in owners if isinstance(owner, torch.optim.Optimizer) for g in owner.param_groups]
    held = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
    batch = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor)]
    modes = {id(t.fake_mode) if isinstance(t, FakeTensor) else None for t in (*held, *batch)}
    if len(modes) == 1 and not any(t.device.type == "meta" for t in (*held, *batch)):
        yield example
        return
    stand_in = _maker()
    undo: list[Callable[[], None]] = []
    try:
        for module in modules:
            for tensors in cast(tuple[dict[str, Any], ...], (module._parameters, module._buffers)):
                before = dict(tensors)
                undo.append(lambda tensors=tensors, before=before: tensors.update(before))
                tensors.update({name: None if t is None else stand_in(t) for name, t in before.items()})
        for group in groups:
            parameters = group["params"]
            undo.append(lambda group=group, parameters=parameters: group.update(params=parameters))
            group["params"] = [stand_in(p) for p in parameters]
        yield pytree.tree_map_only(torch.Tensor, stand_in, example)
    finally:
        for step in reversed(undo):
            step()


def _maker() -> Callable[[torch.Tensor], Any]:
    """Makes one stand-in for each tensor: what is shared stays shared."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
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

    return stand_in
