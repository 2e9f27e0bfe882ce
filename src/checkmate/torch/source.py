"""Where in the user's program an op comes from."""

from __future__ import annotations

import re
from pathlib import Path

from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_ROOT = re.compile(r"^[LG]\['(\w+)'\]\.?")
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")


def source_of(node: fx.Node) -> str:
    """Path of the module that an op belongs to, and file and line, as ``h.0.mlp, model.py:12``; one of the two; or "".

    An op of the backward has those of the forward op that it belongs to.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    module = ""
    if stack:
        path, _ = list(stack.values())[-1]
        module = _ROOT.sub(lambda m: "" if m[1] == "self" else f"{m[1]}.", str(path)) or "self"
    place = _place(node.meta.get("stack_trace") or node.meta.get("fwd_stack_trace") or "")
    return f"{module}, {place}" if module and place else module or place


def _place(trace: str) -> str:
    """File and line of the innermost frame, so named that the file says nothing about whose machine it is on."""
    frames = _FRAME.findall(trace)
    if not frames:
        return ""
    file, line = frames[-1]
    inside = _INSTALLED.sub("", file)
    if inside == file:
        here = Path.cwd()
        inside = str(Path(file).relative_to(here)) if Path(file).is_relative_to(here) else Path(file).name
    return f"{inside}:{line}"
