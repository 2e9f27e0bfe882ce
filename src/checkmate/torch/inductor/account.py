"""Memory of a compiled step, counted in the code that Inductor generates, before any kernel of it is built.

Inductor generates a module as a list of lines: allocate, reuse, free, call a kernel. Building kernels is most of a compilation.
Ops of other libraries allocate inside as well: their workspace is the measured workspace of the op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from torch import fx

from checkmate.cost.store import OpCost
from checkmate.frontend.step_memory import StepMemory
from checkmate.torch._compat.generated_code import (
    Alias,
    Allocate,
    Free,
    GeneratedModule,
    LibraryCall,
    Loop,
    watch_generated_modules,
)
from checkmate.torch.graph.storages import CUDA_ALIGNMENT_BYTES, SCALAR_TANGENT_BYTES

Costs = Callable[[fx.Node], OpCost]
"""Maps a node to the cost and the workspace of its op."""


class Heap:
    """The storages that exist while a module runs. A storage can have several names, and is freed with the last of them.

    Examples:
        >>> heap = Heap()
        >>> heap.bind("a", heap.new(100))
        >>> heap.bind("b", heap["a"])
        >>> heap.free("a")
        >>> heap.bind("c", heap.new(10))
        >>> heap.free("b")
        >>> heap.live_bytes, heap.peak_bytes
        (10, 110)
    """

    def __init__(self) -> None:
        self._names: dict[str, tuple[int, ...]] = {}
        self._sizes: list[int] = []  # of every storage so far
        self._references: Counter[int] = Counter()
        self.live_bytes = self.peak_bytes = 0

    def __getitem__(self, name: str) -> tuple[int, ...]:
        """The storages that a name keeps alive: one for a tensor, several for a tuple, none for a tensor from outside."""
        return self._names.get(name, ())

    def new(self, *sizes_bytes: int) -> tuple[int, ...]:
        """New storages, which exist as soon as a name is bound to them."""
        self._sizes += sizes_bytes
        return tuple(range(len(self._sizes) - len(sizes_bytes), len(self._sizes)))

    def bind(self, name: str, storages: tuple[int, ...]) -> None:
        """Bind a name to storages."""
        for storage in storages:
            self._references[storage] += 1
            if self._references[storage] == 1:
                self.live_bytes += self._sizes[storage]
        self.free(name)
        self._names[name] = storages
        self.use(0)

    def free(self, name: str) -> None:
        """Delete a name."""
        for storage in self._names.pop(name, ()):
            self._references[storage] -= 1
            if not self._references[storage]:
                self.live_bytes -= self._sizes[storage]

    def use(self, size_bytes: int) -> None:
        """Allocate workspace, and free it."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + size_bytes)

    def keep_only(self, names: Iterable[str | None]) -> None:
        """Delete all other names."""
        for name in self._names.keys() - set(names):
            self.free(name)

    def run(self, module: GeneratedModule, costs: Costs) -> None:
        """Apply the effect of a module on memory. Inputs that it can free exist before; its outputs are among the rest."""
        for event in module.events:
            match event:
                case Allocate():
                    unit = CUDA_ALIGNMENT_BYTES if event.device == "cuda" else 1
                    self.bind(event.name, self.new(*(-(-size // unit) * unit for size in event.sizes_bytes)))
                case Alias(name, (only,), position):
                    of = self[only]
                    self.bind(name, of if position is None or not of else (of[position],))
                case Alias():
                    self.bind(event.name, tuple((self[name] or self.new(0))[0] for name in event.of))
                case Free():
                    self.free(event.name)
                case LibraryCall():
                    self.use(0 if event.node is None else costs(event.node).workspace_bytes)


class Account:
    """The memory of a forward and a backward, counted while Inductor generates them."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._modules: list[GeneratedModule] = []

    def counting(self) -> AbstractContextManager[None]:
        """Context that counts the modules that this thread generates inside."""
        return watch_generated_modules(self._modules.append)

    def cost_ns(self, ns_per_byte: float) -> int:
        """Cost of the step: the ops of other libraries, and the bytes that all other kernels read and write."""
        events = [event for module in self._modules for event in module.events]
        moved = sum(event.size_bytes for event in events if isinstance(event, Loop))
        library = [event.node for event in events if isinstance(event, LibraryCall) and event.node is not None]
        return round(ns_per_byte * moved) + sum(self._costs(node).cost_ns for node in library)

    def memory(self, *, num_outputs: int, hold_outputs: bool) -> StepMemory | None:
        """Memory of the step; None if it is not known: Inductor had the modules in its cache, or lines are not understood.

        The first outputs of the forward go to the caller, who may hold them until the backward is over; the others are saved.
        """
        if [m.is_backward for m in self._modules] != [False, True] or not all(m.counted for m in self._modules):
            return None
        (forward, backward), heap = self._modules, Heap()
        heap.run(forward, self._costs)
        heap.keep_only(forward.outputs)
        forward_peak_bytes, saved_bytes = heap.peak_bytes, heap.live_bytes
        saved: dict[str, tuple[int, ...]] = {}
        for position, (node, output) in enumerate(zip(forward.output_nodes, forward.outputs, strict=True)):
            if node is not None and output is not None:
                if position >= num_outputs or node in backward.inputs:
                    saved[node] = heap[output]
                if position < num_outputs and hold_outputs:
                    saved[f"output {position}"] = heap[output]
        heap.keep_only(())
        heap.peak_bytes = 0
        for name, storages in saved.items():
            heap.bind(name, storages)
        for name, size_bytes in backward.inputs.items():
            if name not in forward.output_nodes:
                heap.bind(name, heap.new(size_bytes))
                if size_bytes <= SCALAR_TANGENT_BYTES:
                    heap.bind(f"held {name}", heap[name])
        heap.run(backward, self._costs)
        backward_peak_bytes = heap.peak_bytes
        heap.keep_only(backward.outputs)
        return StepMemory(
            forward_peak_bytes=forward_peak_bytes,
            saved_bytes=saved_bytes,
            backward_peak_bytes=backward_peak_bytes,
            gradient_bytes=heap.live_bytes,
        )

    def memory_of_whole_step(self) -> StepMemory | None:
        """Memory of a step that is one module; None if it is not known, as for `memory`."""
        if [m.is_backward for m in self._modules] != [False] or not self._modules[0].counted:
            return None
        heap = Heap()
        heap.run(self._modules[0], self._costs)
        return StepMemory.of_whole_step(heap.peak_bytes)
