"""Out-of-memory errors of PyTorch: read their text and memory snapshots, and list the contents of the memory."""

from checkmate.oom.answer import Holder, OutOfMemory, of_snapshot, of_text, read_oom
from checkmate.oom.snapshot import read_snapshot

__all__ = ["Holder", "OutOfMemory", "of_snapshot", "of_text", "read_oom", "read_snapshot"]
