"""Graphs, plans and the account of memory. Needs numpy and msgspec, and no framework."""
