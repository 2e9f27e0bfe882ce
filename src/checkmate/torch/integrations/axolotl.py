"""Plugin for axolotl, ``plugins: [checkmate.torch.integrations.axolotl.CheckmatePlugin]``; tested with axolotl 0.19."""

from __future__ import annotations

from typing import Any

from checkmate.core.errors import MissingExtraError
from checkmate.torch.integrations.transformers import BudgetCallback
from checkmate.torch.integrations.trl import scores_in_the_model, train_within

try:
    from axolotl.integrations.base import BasePlugin  # type: ignore[import-not-found]  # src/axolotl/integrations/base.py
    from pydantic import BaseModel
except ImportError as error:
    raise MissingExtraError(
        "checkmate.torch.integrations.axolotl needs axolotl, which is not installed", hint="pip install axolotl"
    ) from error


class CheckmateArgs(BaseModel):
    """The keys of the YAML."""

    checkmate_budget: str | None = None
    """Memory for a training step; without it the budget of the environment variable ``CHECKMATE_BUDGET``."""

    checkmate_options: dict[str, Any] = {}
    """Further options of the backend, such as ``host: 32GiB``."""


class CheckmatePlugin(BasePlugin):
    """Trains the model of an axolotl configuration within the budget of its key ``checkmate_budget``."""

    def get_input_args(self) -> str:
        """The path of the model of the keys: axolotl validates them."""
        return f"{__name__}.{CheckmateArgs.__name__}"

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[BudgetCallback]:
        """Compile the log-probabilities of a trainer with ``rl``, or else the model when the training begins."""
        budget, options = cfg.checkmate_budget, dict(cfg.checkmate_options or {})
        if cfg.rl and scores_in_the_model():
            train_within(trainer, budget, **options)
            return []
        return [BudgetCallback(budget, **options)]
