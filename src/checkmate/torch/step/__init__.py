"""Whole training steps: `Step`, `compile` and `capture`."""
