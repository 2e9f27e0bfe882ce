"""Every private name of Inductor that this package uses; imported only where Inductor compiles, since it takes a second.

Seen and tested in 2.13.0, as in `checkmate.torch._compat.dispatch`.
"""

from __future__ import annotations

from torch._inductor import config as inductor_config
from torch._inductor.choices import InductorChoices
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.fx import GraphModule

__all__ = [
    "CustomPartitionerFn",
    "InductorChoices",
    "compile_fx",
    "compile_fx_inner",
    "inductor_config",
    "prefers_channels_last",
    "use_inductor_choices",
]

use_inductor_choices = V.set_choices_handler
"""Within it, Inductor asks another `InductorChoices`: the setting for it counts once in a thread."""


def prefers_channels_last(gm: GraphModule) -> bool:
    """Whether Inductor, by the device, the sizes and its settings, would give convolutions channels last."""
    return GraphLowering.decide_layout_opt(gm, is_inference=False)
