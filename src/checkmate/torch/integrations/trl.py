"""TRL's trainers within a budget. All that depends on private names of TRL is here; tested with TRL 1.16."""

from __future__ import annotations

import contextlib
import functools
import logging
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional as F

from checkmate.core.errors import MissingExtraError, OptionError
from checkmate.core.units import Amount
from checkmate.frontend.options import budget_of_environment
from checkmate.torch._compat import replaced

_log = logging.getLogger("checkmate.torch")


def train_within(trainer: Any, budget: Amount | None = None, **options: Any) -> None:
    """Train a model with a trainer of TRL within a budget, the reference model included: before ``trainer.train()``.

    The forwards that return log-probabilities are compiled, and generation runs as before. The output layer and the
    log-probabilities are computed in ops that can run piece by piece, in place of TRL's own kernel. Gradient checkpointing is
    turned off, unless ``checkpoints="respected"`` is given: the plan decides what is recomputed.

    Args:
        trainer: An ``SFTTrainer``, ``DPOTrainer``, ``GRPOTrainer``, ``RLOOTrainer`` or ``KTOTrainer``.
        budget: Memory for a training step: ``"8GiB"``, a number of bytes, or a share (``"70%"``). None: the budget of the
            environment variable ``CHECKMATE_BUDGET``; without it everything is kept.
        **options: Further options of the backend; ``chunking`` is ``"auto"`` unless given.

    Examples:
        >>> train_within(trainer, "20GiB")  # doctest: +SKIP
    """
    try:
        utils = import_module("trl.trainer.utils")
    except ImportError as error:
        raise MissingExtraError("train_within needs trl, which is not installed", hint="pip install trl") from error
    if not scores_in_the_model():
        raise OptionError("train_within needs a TRL whose models compute log-probabilities", hint="pip install 'trl>=1.16'")
    options = {"chunking": "auto", **options, "budget": budget_of_environment() if budget is None else budget}
    # Transformers adds a hook to the embeddings whenever TRL turns it on again, after each generation, and removes none: Dynamo
    # would compile the model again in each step.
    found = [n for n in ("activation_checkpointing", "gradient_checkpointing") if getattr(trainer.args, n, False)]
    planned = options.get("checkpoints") != "respected"
    if found and planned:
        _log.warning("gradient checkpointing is turned off: the plan decides what is recomputed")
        vars(trainer.args).update(dict.fromkeys(found, False))
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            inner = trainer.accelerator.unwrap_model(model)
            if planned and getattr(inner, "is_gradient_checkpointing", False):
                inner.gradient_checkpointing_disable()
            _compile_scoring(inner.get_base_model() if hasattr(inner, "get_base_model") else inner, utils, options)


def scores_in_the_model() -> bool:
    """Whether this TRL has models that compute log-probabilities."""
    return hasattr(import_module("trl.trainer.utils"), "_ChunkedLogProbFunction")


def _compile_scoring(model: torch.nn.Module, utils: Any, options: dict[str, Any]) -> None:
    """Compile the calls of a model that return log-probabilities."""
    plain = model.forward
    compiled = torch.compile(plain, backend="checkmate", dynamic=False, options=options)

    @functools.wraps(plain)  # `generate` reads the signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("fused_lm_head"):
            return plain(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(utils, "_ChunkedLogProbFunction", _LogProbs))
            # Otherwise the number of rows depends on the labels.
            stack.enter_context(replaced(utils, "_use_triton", lambda device: False))
            return compiled(*args, **kwargs)

    model.forward = forward


class _LogProbs:
    """``ChunkedLogProbFunction`` of ``trl/kernels/chunked_logprob.py``, whose writes into slices Dynamo does not trace."""

    @staticmethod
    def apply(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, *settings: Any
    ) -> tuple[torch.Tensor | None, ...]:
        temperature, _, softcap, scale, outputs = settings
        logits = F.linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)).float()
        if softcap is not None:
            logits, scale = softcap * torch.tanh(logits * (scale / softcap)), 1.0
        if scale != temperature:
            logits = logits * (scale / temperature)
        log_z = torch.logsumexp(logits, -1)
        log_probs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - log_z
        entropy = log_z - (torch.softmax(logits, -1) * logits).sum(-1) if "entropy" in outputs else None
        with torch.no_grad():
            squares = torch.logsumexp(2 * logits, -1) - 2 * log_z if "log_sum_sq_probs" in outputs else None
            mean = logits.mean(-1) if "mean_logits" in outputs else None
            top = logits.argmax(-1) == targets if "is_top1" in outputs else None
        return log_probs, entropy, squares, mean, top
