"""From the stack of an allocation: the line of the user's code, and the kind of data, as far as a stack tells."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from checkmate.core.errors import printable, shortened
from checkmate.oom.snapshot import Frame

BACKWARD = "backward: gradients and temporaries"
FORWARD = "forward: activations and temporaries"
RECOMPUTED = "recomputed: activations, in the backward"
OPTIMIZER = "optimizer: state and temporaries"
PARAMETERS = "parameters and buffers"
NO_STACK = "no Python stack: usually the backward"
BEFORE = "no stack: allocated before the recording, or without stacks"
OTHER = "other"

_TORCH = re.compile(
    r"(?:^|/)(?:site|dist)-packages/torch/|^torch/"
    r"|/torch/(?:nn|optim|autograd|utils|_dynamo|_functorch|_inductor|cuda|amp|distributed|fx|_tensor\.py|_ops\.py|functional\.py)"
    r"|/torchinductor_"  # code that Inductor generated
)
_NOT_PYTHON = re.compile(r"^(?:\?\?)?$|\.(?:cpp|cc|cu|h|cuh|c|so)(?:$|[.:])|^<(?!ipython|stdin)")


class Origin(NamedTuple):
    """The origin of an allocation."""

    place: str  # line and function of the innermost Python frame outside PyTorch; "" if there is none
    kind: str  # one of the constants of this module


def origin_of(frames: Sequence[Frame]) -> Origin:
    """The line and the kind of an allocation, from its stack with the innermost frame first.

    Examples:
        >>> stack = [Frame("linear", "??", 0), Frame("_call_impl", "/x/site-packages/torch/nn/modules/module.py", 1787)]
        >>> origin_of([*stack, Frame("forward", "/x/me/gpt.py", 12)])
        Origin(place='me/gpt.py:12 forward', kind='forward: activations and temporaries')
    """
    python = [frame for frame in frames if not _NOT_PYTHON.search(_path(frame))]
    user = next((frame for frame in python if not _TORCH.search(_path(frame))), python[0] if python else None)
    if user is None:
        return Origin("", _kind(frames, has_python=False))
    file, name = (shortened(printable(text)) for text in (_short(_path(user)), user.name))
    return Origin(f"{file}:{user.line} {name}".rstrip(), _kind(frames, has_python=True))


def _kind(frames: Sequence[Frame], has_python: bool) -> str:
    calls = {(re.sub(r"^.*/torch/", "torch/", _path(frame)), frame.name) for frame in frames}

    def has(file: str, *names: str) -> bool:
        return any(path.startswith(file) and (not names or name in names) for path, name in calls)

    module = "torch/nn/modules/module.py"
    in_module = has(module, "_call_impl", "_wrapped_call_impl")
    if has("torch/optim/"):
        return OPTIMIZER
    if has("torch/utils/checkpoint.py", "unpack_hook", "recompute_fn", "backward"):
        return RECOMPUTED
    # A custom Function calls `apply` of this file in both passes, and in the forward below a module.
    called = has("torch/_tensor.py", "backward") or has("torch/autograd/__init__.py", "backward", "grad")
    called = called or has("torch/autograd/graph.py", "_engine_run_backward")
    if called or (has("torch/autograd/function.py", "apply") and not in_module) or any("autograd::Engine" in n for _, n in calls):
        return BACKWARD
    if has("torch/nn/init.py") or has("torch/nn/parameter.py") or has("torch/serialization.py"):
        return PARAMETERS
    if has(module, "_apply", "to", "cuda"):
        return PARAMETERS
    if in_module:
        return FORWARD
    if has("torch/nn/modules/", "__init__", "reset_parameters"):
        return PARAMETERS
    return OTHER if has_python else NO_STACK


def _path(frame: Frame) -> str:
    return frame.filename.replace("\\", "/")


def _short(path: str) -> str:
    """The path below the packages of an installation, else its last two parts."""
    below = re.split(r"(?:site|dist)-packages/", path)[-1]
    return below if below != path else "/".join(path.split("/")[-2:])
