"""Provenance of ops: module path and source line in the user's program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_ROOT = re.compile(r"^[LG]\['(\w+)'\]\.?")
_CLOSURE = re.compile(r"^.*\bcell_contents\b\.?")  # Dynamo's path to a module that it found in a closure
# Frames of torch and of all of `checkmate.torch` are not the user's; the programs that `compile` traces are ours.
_LIBRARY_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def source_of(node: fx.Node) -> str:
    """Module path, file and line of an op, as in ``"layers.0.mlp, model.py:12"``; unknown parts are left out."""
    return ", ".join(part for part in (_module(node), _line(node)) if part)


def _module(node: fx.Node) -> str:
    stacks = [_stack(node)]
    if node.meta.get("autograd_backward"):  # no metadata names its forward op; take a module from its inputs
        stacks += [_stack(read) for read in node.all_input_nodes]
    stack = next(filter(None, stacks), None)
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return _ROOT.sub(lambda m: "" if m[1] in ("self", "model") else f"{m[1]}.", _CLOSURE.sub("", str(path))) or "self"


def _stack(node: fx.Node) -> dict[str, Any] | None:
    return node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")


def _line(node: fx.Node) -> str:
    """The innermost frame outside torch and Checkmate; the file without its folder, which differs between machines."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or node.meta.get("fwd_stack_trace") or "")
    mine = [f for f in frames if not f[0].startswith(_LIBRARY_FOLDERS)]
    return f"{Path(mine[-1][0]).name}:{mine[-1][1]}" if mine else ""
