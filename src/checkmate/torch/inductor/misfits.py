"""Steps that do not fit as Inductor compiles them, which takes several compilations to find out: it is found out once."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from checkmate.core.units import format_bytes
from checkmate.frontend.plan_store import Misfits, sources_digest
from checkmate.torch.compilation.compilation import Compilation
from checkmate.torch.graph.kernel_settings import kernel_settings
from checkmate.torch.inductor.compile import Compiled, compile_by_inductor
from checkmate.torch.inductor.largest_inputs import dynamic_dimensions, traced_values

_log = logging.getLogger("checkmate.torch")


def compile_if_it_fits(gm: fx.GraphModule, example_inputs: Sequence[Any], compilation: Compilation) -> Compiled | None:
    """Compile a graph of Dynamo by Inductor, unless an earlier process found that nothing it compiles keeps the budget."""
    if not compilation.may_be_cached() or dynamic_dimensions(traced_values(gm)):  # the largest sizes are not in the key
        return compile_by_inductor(gm, example_inputs, compilation)
    misfits, key = Misfits(), _key(gm, example_inputs, compilation)
    least = misfits.get(key)
    if least is not None:
        compilation.least_fused_bytes = least
        _log.warning(
            "no plan that Inductor compiled before kept the budget; the smallest takes %s: compiled by 'eager'",
            format_bytes(least),
        )
        return None
    compiled = compile_by_inductor(gm, example_inputs, compilation)
    if compiled is None and compilation.least_fused_bytes is not None:
        misfits.add(key, compilation.least_fused_bytes)
    return compiled


def _key(gm: fx.GraphModule, inputs: Sequence[Any], compilation: Compilation) -> str:
    """Hash of a step and of everything that decides on whether it fits."""
    described = [
        f"{t.dtype} {tuple(t.shape)} {t.stride()} {t.device} {t.requires_grad}" if isinstance(t, torch.Tensor) else repr(t)
        for t in inputs
    ]
    devices = {torch.device("cpu"), *(t.device for t in inputs if isinstance(t, torch.Tensor))}
    kernels = sorted({kernel_settings(device) for device in devices})
    text = "\n".join([sources_digest(), repr(compilation.options), *kernels, gm.code, *described, str(compilation.resident)])
    return hashlib.sha256(text.encode()).hexdigest()
