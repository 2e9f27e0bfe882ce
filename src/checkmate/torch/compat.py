"""Every private name of torch that this package uses, in one place.

Seen and tested in 2.13.0; 2.11 is the declared floor. A release that moves one of them breaks here, at
import, and nowhere else.
"""

from __future__ import annotations

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import ShortenTraceback, Unsupported
from torch._functorch.partitioners import default_partition
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.graph import _BoxedCodeGen
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "COLLECTIVES",
    "Carrier",
    "FakeTensor",
    "HigherOrderOperator",
    "OpOverload",
    "Unsupported",
    "aot_autograd",
    "boxed",
    "default_partition",
    "detect_fake_mode",
    "dynamo_config",
    "functorch_config",
    "is_tangent",
    "memory_events",
    "no_dispatch",
    "no_modes",
    "profiler_running",
    "run_and_save_rng_state",
    "run_with_rng_state",
]

COLLECTIVES = ("_c10d_functional", "c10d_functional", "_dtensor")
"""Namespaces of ops that talk to other processes."""

no_modes = _disable_current_modes


class Carrier(ShortenTraceback):
    """Takes an exception through Dynamo unwrapped.

    Dynamo turns what a backend raises into ``BackendCompilerFailed``, except a ``ShortenTraceback``: of
    that it raises what ``remove_dynamo_frames`` returns, and this one returns the exception it carries.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error), first_useful_frame=None)
        self.error = error

    def remove_dynamo_frames(self) -> BaseException:  # type: ignore[override]
        """The exception that the user is to see."""
        return self.error


def boxed(module: torch.fx.GraphModule) -> object:
    """The module as a callable that takes one list, empties it, and frees every tensor after its last use."""
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    forward = module.forward

    def run(args: list[object]) -> object:
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def is_tangent(node: torch.fx.Node) -> bool:
    """Whether a placeholder of a joint graph is a tangent: the gradient of a forward output."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def profiler_running() -> bool:
    """Whether a torch profiler is on in this process; it cannot be nested."""
    return torch.autograd._profiler_enabled()


def memory_events(profile: torch.profiler.profile) -> list[tuple[int, int]]:
    """(time in ns, bytes allocated or freed) of every event of the CPU allocator, in order."""
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]" and e.device_type() == torch.autograd.DeviceType.CPU]
    return sorted(changes, key=lambda change: change[0])
