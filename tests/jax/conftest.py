"""Two devices on the CPU, for `jax.shard_map`."""

from __future__ import annotations

import jax

jax.config.update("jax_num_cpu_devices", 2)
