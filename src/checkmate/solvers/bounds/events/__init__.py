"""Bounds from limits on memory at events: first computations of ops."""
