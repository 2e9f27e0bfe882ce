"""Language models of Hugging Face from their configurations, without memory, for `checkmate fits --config`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from checkmate.cli.targets import Built
from checkmate.core.errors import MissingExtraError, OptionError


def causal_model(config: str, batch: int, length: int | None) -> Built:
    """The model of a configuration on the meta device, with a batch of tokens; it returns its loss.

    Args:
        config: Path of a configuration, of the folder with one, or a name on the hub.
        batch: Sequences of the batch.
        length: Tokens of each sequence; as many as the model has positions for by default.

    Raises:
        MissingExtraError: transformers is not installed.
        OptionError: There is no such configuration, it is not one of a causal language model, or it has fewer positions.
    """
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError("--config needs transformers, which is not installed", hint="pip install transformers")
    if config.endswith(".json") and not Path(config).is_file():
        raise OptionError(f"--config {config}: no such file", hint="give a config.json of Hugging Face, or the folder of one")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        settings = AutoConfig.from_pretrained(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(
            f"--config {config} cannot be read: {' '.join(str(error).split())}",
            hint="give a config.json with a model_type, or the folder of one; a name on the hub needs a connection",
        ) from error
    positions = getattr(settings, "max_position_embeddings", None)
    if length is not None and (length < 2 or (positions is not None and length > positions)):
        raise OptionError(
            f"--seq {length} is not from 2 to the {positions} positions of the model", hint=f"give at most --seq {positions}"
        )
    if batch < 1:
        raise OptionError(f"--batch {batch} is not a number of sequences", hint="give --batch 1 or more")
    settings.use_cache = False  # training keeps no keys and values of earlier calls
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(settings)
        except ValueError as error:
            raise OptionError(
                f"--config {config}: {type(settings).__name__} is no configuration of a causal language model",
                hint="write build() for other models, and give FILE.py:build",
            ) from error
        tokens = torch.zeros(batch, length or positions or 2048, dtype=torch.long)
    return Built(model.train(), None, {"input_ids": tokens, "labels": tokens})
