"""AOTAutograd's cache of compiled graphs, in which an entry also has what a plan says of its code.

AOTAutograd looks into its cache before it traces a graph, and saves an entry as soon as it has compiled one. Here what it would
save is held until it is known which of several compilations runs, and a loaded forward and backward are handed out before
AOTAutograd wraps them. Nothing of that has a public name; where PyTorch is without the private ones, nothing is cached.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch._functorch.config as functorch_config
from torch._functorch._aot_autograd import autograd_cache
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

__all__ = ["CacheEntry", "CachedCompilation", "aot_cache_disabled", "cached_attributes", "inductor_cache_folder"]

_Cache: Any = getattr(autograd_cache, "AOTAutogradCache", None)
_HAS_NAMES = all(hasattr(_Cache, name) for name in ("save", "_lookup"))

_NOTE = "_checkmate_note"
"""Attribute of an entry with the bytes that were saved with it."""

_KEYS = ("_fx_graph_cache_key", "_fx_graph_cache_debug_lines", "guards_expr", "_time_taken_ns")
"""Attributes of compiled code by which an entry refers to it."""

Run = Callable[..., Any]


def inductor_cache_folder() -> Path:
    """Where Inductor and AOTAutograd keep what they build: ``TORCHINDUCTOR_CACHE_DIR``, else a folder of temporary files."""
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())


def aot_cache_disabled() -> Any:
    """Context in which AOTAutograd neither looks into its cache nor saves anything there."""
    return functorch_config.patch(enable_autograd_cache=False)


def cached_attributes(run: Run) -> dict[str, Any]:
    """Attributes that a callable needs to stand for compiled code in an entry."""
    return {name: getattr(run, name) for name in _KEYS if hasattr(run, name)}


@dataclasses.dataclass(frozen=True, slots=True)
class CacheEntry:
    """An entry that has not been saved."""

    key: str
    content: Any  # what AOTAutograd would save
    remote: bool  # whether it goes to a remote cache as well

    def save(self, note: bytes) -> None:
        """Save the entry; a failure is logged by AOTAutograd."""
        setattr(self.content, _NOTE, note)
        _Cache.save(self.key, self.content, self.remote)


class CachedCompilation:
    """A compilation that AOTAutograd's cache may answer."""

    def __init__(self) -> None:
        self.note: bytes | None = None
        self.entries: list[CacheEntry] = []

    @contextmanager
    def looking_up(self, replace: Callable[[str, Run], Run]) -> Iterator[None]:
        """Context in which one graph is compiled, or taken from the cache."""
        if not _HAS_NAMES or functorch_config.bundled_autograd_cache:
            with aot_cache_disabled():
                yield
            return
        thread = threading.get_ident()  # backwards of other models may be compiled on other threads meanwhile
        save, look_up = _Cache.save, _Cache._lookup

        def hold(key: str, content: Any, remote: bool) -> None:
            if threading.get_ident() != thread:
                save(key, content, remote)
            else:
                self.entries.append(CacheEntry(key, content, remote))

        def found(*args: Any, **kwargs: Any) -> Any:
            result = look_up(*args, **kwargs)
            if result is None or threading.get_ident() != thread:
                return result
            entry, content = result
            self.note = getattr(entry, _NOTE, None)
            if self.note is None or entry.compiled_bw is None:
                return None
            entry.compiled_fw = _Loaded(entry.compiled_fw, lambda run: replace("forward", run))
            entry.compiled_bw = _Loaded(entry.compiled_bw, lambda run: replace("backward", run))
            return entry, content

        with patch.object(_Cache, "save", staticmethod(hold)), patch.object(_Cache, "_lookup", staticmethod(found)):
            yield


class _Loaded:
    """The forward or the backward of an entry, in the place of the one that was saved."""

    def __init__(self, saved: Any, replace: Callable[[Run], Run]) -> None:
        self._saved, self._replace = saved, replace

    def __getattr__(self, name: str) -> Any:
        """Everything else that AOTAutograd saved."""
        return getattr(self._saved, name)

    def post_compile(self, result: Any, fx_config: Any) -> Run:
        """The last that AOTAutograd does with the code when it has loaded it."""
        return self._replace(self._saved.post_compile(result, fx_config))
