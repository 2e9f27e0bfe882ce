"""Errors of Dynamo whose cause in the user's code is known, in one sentence each."""

from __future__ import annotations

import re

from checkmate.core.errors import CheckmateError, GraphError, OptionError

NO_GRADIENT = "nothing in this step requires a gradient, so that there is no backward to plan"
NO_GRADIENT_HINT = "check that parameters have requires_grad=True, and that the loss depends on them"
_TWO_DEVICES = r"tensors of model and batch are on two devices, \1 and \2"
_ONE_DEVICE = "call model.to(device) and x.to(device) with one device; what is on meta has no data and has to be made there"
_FROZEN = "a parameter that the step updates does not require a gradient any more"
_AGAIN = "call checkmate.torch.compile again, with an optimizer of [p for p in model.parameters() if p.requires_grad]"
_BACKWARD = "model or loss call backward() or torch.autograd.grad themselves, and the step does the backward"
_KNOWN: tuple[tuple[str, type[CheckmateError], str, str], ...] = (
    (r"at least two devices, (\S+) and ([^\s!]+)", OptionError, _TWO_DEVICES, _ONE_DEVICE),
    (r"does not have a grad_fn|argument to `grad\(\)` cannot be empty", GraphError, NO_GRADIENT, NO_GRADIENT_HINT),
    ("One of the differentiated Tensors does not require grad", OptionError, _FROZEN, _AGAIN),
    ("consumed? grad_fn", OptionError, _BACKWARD, "return the loss alone"),
)
"""Patterns of torch's text, with the error, the sentence and the hint for each."""


def in_words(error: BaseException | None) -> CheckmateError | None:
    """The error that tells the cause of an error of Dynamo; None if the cause is not known."""
    for pattern, kind, sentence, hint in _KNOWN:
        found = re.search(pattern, str(error))
        if found is not None:
            return kind(found.expand(sentence), hint=hint)
    return None
