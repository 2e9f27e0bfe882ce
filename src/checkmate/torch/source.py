"""Where in the user's program an op comes from."""

from __future__ import annotations

import re

from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_ROOT = re.compile(r"^[LG]\['(\w+)'\]\.?")


def source_of(node: fx.Node) -> str:
    """Path of the module that an op belongs to, else file and line, else ""."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if stack:
        path, _ = list(stack.values())[-1]
        return _ROOT.sub(lambda m: "" if m[1] == "self" else f"{m[1]}.", str(path)) or "self"
    frames = _FRAME.findall(node.meta.get("stack_trace") or node.meta.get("fwd_stack_trace") or "")
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""
