"""A loop over layers: integer programs choose the values that `jax.checkpoint` saves in each layer within a budget."""
