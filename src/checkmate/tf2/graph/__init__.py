"""The graph of a step: traced, in an order that can be planned, with the bytes of its tensors."""
