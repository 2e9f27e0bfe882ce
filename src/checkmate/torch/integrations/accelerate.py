"""Plugin for Hugging Face's accelerate; in a separate module, since it imports accelerate."""

from __future__ import annotations

from typing import Any

from checkmate.core.errors import MissingExtraError
from checkmate.core.units import Amount
from checkmate.frontend.options import budget_of_environment

try:
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin
except ImportError as error:
    raise MissingExtraError(
        "checkmate.torch.integrations.accelerate needs accelerate, which is not installed", hint="pip install accelerate"
    ) from error


class BudgetPlugin(TorchDynamoPlugin):
    """Let accelerate compile the model within a budget: ``Accelerator(dynamo_plugin=BudgetPlugin("8GiB"))``.

    ``Accelerator(dynamo_backend=...)`` and ``accelerate launch --dynamo_backend`` accept only a fixed list of backends. The
    plugin passes the backend ``"checkmate"`` to `torch.compile` at ``prepare``: there accelerate compiles models, after it has
    moved and wrapped them. It works in scripts under ``accelerate launch``.

    Args:
        budget: Memory for a training step: ``"8GiB"``, a number of bytes, or a share (``"70%"``). None: the budget of the
            environment variable ``CHECKMATE_BUDGET``; without it everything is kept.
        dynamic: As in `torch.compile`. The settings of ``accelerate launch`` for other backends are not used.
        **options: Further options of the backend, for example ``time_limit_s``.

    Examples:
        >>> accelerator = Accelerator(dynamo_plugin=BudgetPlugin("8GiB"))  # doctest: +SKIP
    """

    def __init__(self, budget: Amount | None = None, *, dynamic: bool | None = None, **options: Any) -> None:
        # accelerate compares the backend with its member for "no" only; it has no member for other backends.
        super().__init__(
            backend=DynamoBackend.EAGER, options={"budget": budget_of_environment() if budget is None else budget, **options}
        )
        self.use_regional_compilation = False  # each region would get a separate plan and budget
        self._compile = {"backend": "checkmate", "dynamic": dynamic, "options": self.options}

    def to_dict(self) -> dict[str, Any]:
        """The settings, with the name of the backend that runs."""
        return {**super().to_dict(), **self._compile}

    def to_kwargs(self) -> dict[str, Any]:
        """Arguments for `torch.compile`."""
        return dict(self._compile)
