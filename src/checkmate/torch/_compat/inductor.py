"""Private names of Inductor; imported only where Inductor compiles, since importing it takes a second."""

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
"""Context that installs an `InductorChoices`; the config option of that name is read only once per thread."""


def prefers_channels_last(gm: GraphModule) -> bool:
    """Whether Inductor's own heuristic (device, sizes, configuration) would convert convolutions to channels last."""
    return GraphLowering.decide_layout_opt(gm, is_inference=False)
