"""Callback for Hugging Face's ``Trainer``; in a separate module, since it imports transformers."""

from __future__ import annotations

from typing import Any

from checkmate.core.errors import MissingExtraError
from checkmate.core.units import Amount
from checkmate.frontend.options import budget_of_environment

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingExtraError(
        "checkmate.torch.integrations.transformers needs transformers, which is not installed",
        hint="pip install transformers accelerate",
    ) from error


class BudgetCallback(TrainerCallback):
    """Train a model within a budget with Hugging Face's ``Trainer``, whose list of compile backends is fixed.

    At the beginning of a training the model is compiled in place with the backend ``"checkmate"``. It keeps its class, its state
    dict and its signature.

    Args:
        budget: Memory for a training step, optimizer state included: ``"8GiB"``, a number of bytes, or a share (``"70%"``). None:
            the budget of the environment variable ``CHECKMATE_BUDGET``; without it everything is kept.
        **options: Further options of the backend, for example ``time_limit_s``.

    Examples:
        >>> trainer = Trainer(model, arguments, train_dataset=data, callbacks=[BudgetCallback("8GiB")])  # doctest: +SKIP
    """

    def __init__(self, budget: Amount | None = None, **options: Any) -> None:
        self.options = {"budget": budget_of_environment() if budget is None else budget, **options}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compile the model in place; the Trainer has already created its optimizer, whose state counts."""
        kwargs["model"].compile(backend="checkmate", options=self.options)
