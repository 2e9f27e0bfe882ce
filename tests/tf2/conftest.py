"""What the TensorFlow tests share: one thread, and a store of costs of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import keras
import pytest
import tensorflow as tf

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _own_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("costs")
        patch.setenv("CHECKMATE_CACHE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")
    keras.utils.clear_session()
