"""A caching allocator that records what it does in the format of `torch.cuda.memory._snapshot`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

MIB = 1 << 20
TORCH = "/env/lib/python3.11/site-packages/torch"
BASE = 0x7F0000000000


def stack(*calls: tuple[str, str, int]) -> list[dict[str, Any]]:
    """Frames, innermost first, of (file, function, line)."""
    return [{"filename": file, "name": name, "line": line} for file, name, line in calls]


FORWARD = stack(
    (f"{TORCH}/nn/modules/linear.py", "forward", 134),
    (f"{TORCH}/nn/modules/module.py", "_call_impl", 1787),
    ("/home/me/gpt/model.py", "forward", 12),
    ("/home/me/gpt/train.py", "<module>", 40),
)
OPTIMIZER = stack(
    (f"{TORCH}/optim/adam.py", "_init_group", 190),
    (f"{TORCH}/optim/optimizer.py", "wrapper", 516),
    ("/home/me/gpt/train.py", "<module>", 44),
)
PARAMETERS = stack(
    (f"{TORCH}/nn/modules/module.py", "convert", 1343),
    (f"{TORCH}/nn/modules/module.py", "_apply", 942),
    (f"{TORCH}/nn/modules/module.py", "to", 1355),
    ("/home/me/gpt/train.py", "<module>", 9),
)


class Recording:
    """Segments of fixed size with blocks placed first-fit, and the events of all actions."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.segments: dict[int, int] = {}
        self.blocks: dict[int, tuple[int, list[dict[str, Any]]]] = {}
        self.next = BASE

    @property
    def allocated(self) -> int:
        return sum(size for size, _ in self.blocks.values())

    def note(self, action: str, size: int, frames: Any, **more: Any) -> None:
        event = {"action": action, "size": size, "stream": 0, "time_us": len(self.events), "compile_context": "N/A"}
        self.events.append({**event, "user_metadata": "", "pool_id": (0, 0), "frames": frames, **more})

    def grow(self, size: int) -> int:
        address = self.next
        self.next += 2 * size
        self.segments[address] = size
        self.note("segment_alloc", size, [], addr=address)
        return address

    def release(self, address: int) -> None:
        self.note("segment_free", self.segments.pop(address), [], addr=address)

    def allocate(self, size: int, frames: Any) -> int:
        for start, length in sorted(self.segments.items()):
            address = start
            for taken in sorted(a for a in self.blocks if start <= a < start + length):
                if address + size <= taken:
                    break
                address = taken + self.blocks[taken][0]
            if address + size <= start + length:
                break
        else:
            address = self.grow(max(size, 20 * MIB))
        self.blocks[address] = (size, frames)
        self.note("alloc", size, frames, addr=address)
        return address

    def free(self, address: int) -> None:
        size, frames = self.blocks.pop(address)
        self.note("free_requested", size, frames, addr=address)
        self.note("free_completed", size, frames, addr=address)

    def fail(self, size: int, device_free: int, frames: Any = FORWARD) -> None:
        self.note("oom", size, frames, device_free=device_free)

    def snapshot(self, last: int | None = None) -> dict[str, Any]:
        """As the allocator writes it, with the last so many events."""
        events = self.events if last is None else self.events[len(self.events) - last :]
        return {
            "segments": [self._segment(start, size) for start, size in sorted(self.segments.items())],
            "device_traces": [events],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0},
            "external_annotations": [],
        }

    def dump(self, path: Path, last: int | None = None) -> Path:
        path.write_bytes(pickle.dumps(self.snapshot(last)))
        return path

    def _segment(self, start: int, size: int) -> dict[str, Any]:
        blocks, address = [], start
        for taken in sorted(a for a in self.blocks if start <= a < start + size):
            if taken > address:
                blocks.append(_block(address, taken - address, "inactive", []))
            blocks.append(_block(taken, self.blocks[taken][0], "active_allocated", self.blocks[taken][1]))
            address = taken + self.blocks[taken][0]
        if address < start + size:
            blocks.append(_block(address, start + size - address, "inactive", []))
        used = sum(block["size"] for block in blocks if block["state"] != "inactive")
        return {
            "device": 0, "address": start, "total_size": size, "allocated_size": used, "active_size": used,
            "requested_size": used, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False,
            "frames": [], "blocks": blocks,
        }  # fmt: skip


def _block(address: int, size: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames}


def failed_run() -> Recording:
    """Parameters, optimizer state, activations with every second one freed, and a request that finds no range."""
    found = Recording()
    for _ in range(2):
        found.allocate(8 * MIB, PARAMETERS)
    found.allocate(16 * MIB, OPTIMIZER)
    blocks = [found.allocate(4 * MIB, FORWARD) for _ in range(10)]
    found.allocate(2 * MIB, [])
    for address in blocks[::2]:
        found.free(address)
    found.fail(12 * MIB, MIB)
    for address in blocks[1::2]:
        found.free(address)
    return found
