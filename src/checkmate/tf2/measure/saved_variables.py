"""Runs a step for a measurement: its variables are saved before and restored afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

import numpy as np
import tensorflow as tf


@contextlib.contextmanager
def restored(variables: Sequence[tf.Variable]) -> Generator[None]:
    """Save the values of variables, and restore them at the end of the block.

    Args:
        variables: All variables that the block changes.
    """
    # Copies: `numpy` can return the variable's buffer itself, and a second reference would make a step copy the variable.
    saved = [np.array(v.numpy()) for v in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, saved, strict=True):
            _restore(variable, value)


def _restore(variable: tf.Variable, value: np.ndarray) -> None:
    """Restore a variable in its current buffer, so that training runs with the free chunks that were measured.

    `assign` allocates a new buffer, and assigning to a slice makes the variable copy on every read. `assign_sub` works in
    place and is exact: x - x is 0, and 0 - (-v) is v. Values for which it is not exact (NaN, -0.0) are assigned.
    """
    if value.dtype.kind in "fiu" and value.size:
        variable.assign_sub(np.array(variable.numpy()))
        variable.assign_sub(np.negative(value))
        if np.array(variable.numpy()).tobytes() == value.tobytes():
            return
    variable.assign(value)
