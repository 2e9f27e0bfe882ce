"""Where Inductor keeps what it builds; apart from the rest of Inductor, which takes a second to import."""

from __future__ import annotations

import os
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import default_cache_dir

__all__ = ["inductor_cache_folder"]


def inductor_cache_folder() -> Path:
    """The folder of this user: ``TORCHINDUCTOR_CACHE_DIR`` if set, else one among the temporary files."""
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())
