"""A loop over layers: what `jax.checkpoint` saves of each layer within a budget, chosen by integer programs."""
