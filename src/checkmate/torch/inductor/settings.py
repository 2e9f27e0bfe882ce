"""Inductor's configuration for a compilation: the settings of the user, and the decisions that are left to the plan.

``mode`` and ``inductor_options`` mean the same as ``mode`` and ``options`` of ``torch.compile`` with its own backend: both are
patches of Inductor's configuration, and an option overrides the same option of the mode. Measurements of a compiled plan are
stored under a hash of all of these settings.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from checkmate.core.errors import OptionError
from checkmate.frontend.plan_store import sources_digest
from checkmate.torch._compat.inductor import inductor_config, stock_patches
from checkmate.torch.graph.kernel_settings import kernel_settings
from checkmate.torch.options import Options

_log = logging.getLogger("checkmate.torch")

PLANNED_SETTINGS: dict[str, Any] = {
    "reorder_for_peak_memory": False,  # it would undo the order of the plan
    "allow_buffer_reuse": False,  # it keeps dead buffers for later ones of equal size: up to 15 % above the planned peak
    "memory_planning": False,  # it allocates pools, which live longer than the tensors in them
}
"""Decisions of Inductor that are left to the plan."""

_INSTALLED = {
    "custom_partitioner_fn": "the plan enters there",
    "inductor_choices_class": "the choices that keep ops apart in time are installed there",
}
"""Options that a plan does not allow, with the reason."""

CUDA_GRAPHS = "triton.cudagraphs"


def config_patches(options: Options, device_types: set[str], *, as_stock: bool = False) -> dict[str, Any]:
    """Patches of Inductor's configuration for a compilation under a plan, or for code as stock Inductor generates it."""
    for given, value in options.inductor_options.items():
        _refuse(given.replace("-", "_"), given, value)
    try:
        patches = stock_patches(options.mode, dict(options.inductor_options))
    except RuntimeError as error:  # the value has another type
        raise OptionError(f"inductor_options: {error}", hint="see torch._inductor.config for the type of each option") from None
    wanted = patches.get(CUDA_GRAPHS, inductor_config.triton.cudagraphs)
    if wanted and "cuda" not in device_types:
        if CUDA_GRAPHS in patches:
            how = f"mode={options.mode!r}" if CUDA_GRAPHS not in options.inductor_options else "triton.cudagraphs"
            _log.warning("%s asks for CUDA graphs, which have no effect on a CPU: the step is compiled without them", how)
        patches[CUDA_GRAPHS] = False
    return patches if as_stock else {**patches, **PLANNED_SETTINGS}


def _refuse(name: str, given: str, value: Any) -> None:
    """Refuse an option that is unknown, or that would undo the plan."""
    known = inductor_config.get_config_copy()
    if name not in known:
        near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
        raise OptionError(
            f"unknown option {given!r} in inductor_options; the nearest known one is {near!r}",
            hint="use names of torch._inductor.config, as torch._inductor.list_options() lists them",
        )
    if name in _INSTALLED:
        raise OptionError(f"inductor_options={{{given!r}: ...}} cannot be: {_INSTALLED[name]}", hint=f"leave out {given!r}")
    if name in PLANNED_SETTINGS and value != PLANNED_SETTINGS[name]:
        raise OptionError(
            f"inductor_options={{{given!r}: {value!r}}} would undo the plan, which decides what is in memory at each time",
            hint=f"leave out {given!r}; it is {PLANNED_SETTINGS[name]!r} under a plan",
        )


def compiler_fingerprint(inputs: Sequence[Any], options: Options, patches: Mapping[str, Any]) -> str:
    """Hash of everything except the graph that decides the measured memory of a compiled plan."""
    devices = {t.device for t in inputs if isinstance(t, torch.Tensor)}
    settings = {
        "checkmate": sources_digest(),
        "kernels": sorted({kernel_settings(d) for d in (*devices, torch.device("cpu"))}),
        "outputs": options.outputs,
        "inductor": {
            k: v if isinstance(v, (int, float, str, type(None))) else repr(type(v))
            for k, v in inductor_config.save_config_portable().items()
        },
        "patches": {name: repr(value) for name, value in patches.items()},
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
