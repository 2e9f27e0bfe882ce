"""What tests and the examples in docstrings share: what is set before TensorFlow starts, and objects of other tests."""

from __future__ import annotations

import gc
import os

import pytest

os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "1")  # or nothing is counted on a CPU
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@pytest.fixture(autouse=True)
def _freeze_what_stays() -> None:
    """No test looks at objects that others left: tensors of other models, caches of compilers, what was imported by a call.

    A step counts all tensors that exist besides it, and those of earlier tests are none of its business. `measure_peak` and its
    like collect each time, which takes 0.5 s at the end of a run that never freezes, and 0.03 s of one that does.
    """
    gc.collect()
    gc.freeze()
