"""Where in the user's program an op comes from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_ROOT = re.compile(r"^[LG]\['(\w+)'\]\.?")
_CLOSURE = re.compile(r"^.*\bcell_contents\b\.?")  # how a module in a closure of a closure is named
_LIBRARY_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def source_of(node: fx.Node) -> str:
    """Module path, file and line of an op, ``"layers.0.mlp, model.py:12"``; what is not known is left out."""
    return ", ".join(part for part in (_module(node), _line(node)) if part)


def _module(node: fx.Node) -> str:
    stacks = [_stack(node)]
    if node.meta.get("autograd_backward"):  # nothing says what it is the backward of, but what it reads
        stacks += [_stack(read) for read in node.all_input_nodes]
    stack = next(filter(None, stacks), None)
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return _ROOT.sub(lambda m: "" if m[1] in ("self", "model") else f"{m[1]}.", _CLOSURE.sub("", str(path))) or "self"


def _stack(node: fx.Node) -> dict[str, Any] | None:
    return node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")


def _line(node: fx.Node) -> str:
    """The innermost line that is neither torch's own nor ours, its file without folders: they differ from machine to machine."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or node.meta.get("fwd_stack_trace") or "")
    mine = [f for f in frames if not f[0].startswith(_LIBRARY_FOLDERS)]
    return f"{Path(mine[-1][0]).name}:{mine[-1][1]}" if mine else ""
