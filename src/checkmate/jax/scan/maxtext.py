"""A policy as lines of a configuration of MaxText, which names values of its layers and saves them by these names."""

from __future__ import annotations

from typing import Final

from checkmate.core.errors import OptionError
from checkmate.jax.scan.policy import ScanPolicy

MAXTEXT_NAMES: Final = (
    "context",
    "mlpwi",
    "mlpwi_0",
    "mlpwi_1",
    "mlpwo",
    "query_proj",
    "key_proj",
    "value_proj",
    "qkv_proj",
    "out_proj",
    "mla_q",
    "mla_kv",
    "moe_mlpwi",
    "moe_mlpwi_0",
    "moe_mlpwi_1",
    "moe_mlpwo",
    "query_wa_proj",
    "kv_wa_proj",
)
"""Values that MaxText's configuration can save, of ``configs/base.yml`` in 2026."""

_INPUT: Final = "decoder_layer_input"


def maxtext_config(found: ScanPolicy) -> str:
    """A policy as lines of a configuration of MaxText: ``remat_policy: 'custom'`` and a line for each name.

    A name is on the ``device`` if it is saved, else it is computed again (``remat``). Only names that the body has are
    written, because an older MaxText refuses names that it does not know.

    Args:
        found: A policy that was chosen among the body's own names: ``policy(block, ..., names="own")``.

    Returns:
        Lines of YAML for a configuration file, to be given to MaxText in place of ``remat_policy``.

    Raises:
        OptionError: A name is not one of MaxText's.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> from checkmate.jax import policy
        >>> def block(x, w):
        ...     hidden = checkpoint_name(x @ w["up"], "mlpwi")
        ...     return checkpoint_name(jnp.tanh(hidden) @ w["down"], "mlpwo"), None
        >>> x = jax.ShapeDtypeStruct((64, 8), jnp.float32)
        >>> w = {"up": jax.ShapeDtypeStruct((8, 32), jnp.float32), "down": jax.ShapeDtypeStruct((32, 8), jnp.float32)}
        >>> print(maxtext_config(policy(block, x, w, length=4, budget="1MiB", costs="estimated", names="own")))
        remat_policy: 'custom'
        decoder_layer_input: 'device'
        mlpwi: 'device'
        mlpwo: 'remat'
        <BLANKLINE>
    """
    offered = [name for name in found.offered if name != _INPUT]
    if unknown := sorted(set(offered).difference(MAXTEXT_NAMES)):
        raise OptionError(
            f"MaxText's configuration has no value {', '.join(unknown)}",
            hint="plan the body among MaxText's own names: checkmate.jax.policy(block, ..., names='own')",
        )
    lines = {_INPUT: "device"} | {name: "device" if name in found.names else "remat" for name in offered}
    return "".join([f"{key}: '{value}'\n" for key, value in {"remat_policy": "custom", **lines}.items()])
