"""What has to be set before TensorFlow starts, for tests and for the examples in docstrings."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "1")  # or nothing is counted on a CPU
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
