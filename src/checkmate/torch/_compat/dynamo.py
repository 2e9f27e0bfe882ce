"""Private names of torch.compile's front end, Dynamo.

Seen and tested in torch 2.13.0; 2.11 is the declared floor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch._dynamo.config as dynamo_config
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.exc import ShortenTraceback, TorchDynamoException, Unsupported
from torch._dynamo.symbolic_convert import InstructionTranslator

__all__ = ["DynamoTransparentError", "TorchDynamoException", "Unsupported", "dynamo_config", "recompile_current_frame"]


class DynamoTransparentError(ShortenTraceback):
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


def recompile_current_frame() -> Callable[[], None] | None:
    """What makes Dynamo compile the frame that it compiles now once more at its next call; None outside of Dynamo."""
    try:
        code = InstructionTranslator.current_tx().output.root_tx.f_code  # type: ignore[union-attr]
    except AttributeError:
        return None
    return lambda: reset_code(code)
