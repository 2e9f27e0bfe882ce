"""Private names of Dynamo, the front end of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable

import torch._dynamo.config as dynamo_config
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.exc import ShortenTraceback, TorchDynamoException, Unsupported
from torch._dynamo.symbolic_convert import InstructionTranslator

__all__ = ["DynamoTransparentError", "TorchDynamoException", "Unsupported", "dynamo_config", "recompile_current_frame"]


class DynamoTransparentError(ShortenTraceback):
    """Carries an exception of a backend through Dynamo to the user unchanged.

    Dynamo wraps whatever a backend raises in ``BackendCompilerFailed``, which hides the type and the hint of the error.
    It makes an exception of ``ShortenTraceback``: it raises the result of ``remove_dynamo_frames``, here the carried error.

    Args:
        error: The exception that the user is to see.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error), first_useful_frame=None)
        self.error = error

    def remove_dynamo_frames(self) -> BaseException:  # type: ignore[override]
        """The carried exception; called by Dynamo."""
        return self.error


def recompile_current_frame() -> Callable[[], None] | None:
    """A function that drops the compiled code of the frame being compiled now, so that its next call compiles it again.

    Returns:
        The function, or None where Dynamo is not compiling.
    """
    try:
        code = InstructionTranslator.current_tx().output.root_tx.f_code  # type: ignore[union-attr]
    except AttributeError:
        return None
    return lambda: reset_code(code)
