"""Rewrites of a joint FX graph before it is planned."""
