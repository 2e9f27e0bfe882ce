"""Bounds from events, first computations of ops, at which memory is limited."""
