"""Memory of a compiled step, counted in the code that Inductor generates, before any kernel of it is built.

Inductor generates a module as a list of lines: allocate, reuse, free, call a kernel. When the list is complete, what the module
takes is known, and building its kernels, which is most of a compilation, has not begun. Ops of other libraries allocate inside
as well: their workspace is what was measured for the op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import fx

from checkmate.frontend.step_memory import StepMemory
from checkmate.torch._compat.codegen.generated_code import (
    Alias,
    Allocate,
    Call,
    Free,
    GeneratedModule,
    Give,
    watch_generated_modules,
)
from checkmate.torch.graph.storages import CUDA_ALIGNMENT_BYTES, SCALAR_TANGENT_BYTES

Workspace = Callable[[fx.Node], int]
"""Maps a node to the bytes that its op allocates and frees inside."""


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """A storage; two of the same size are two storages."""

    size_bytes: int


class Heap:
    """The storages that exist while a module runs. A storage can have several names, and is freed with the last of them.

    Examples:
        >>> heap = Heap()
        >>> heap.bind("a", (Storage(100),))
        >>> heap.bind("b", heap["a"])
        >>> heap.free("a")
        >>> heap.bind("c", (Storage(10),))
        >>> heap.free("b")
        >>> heap.live_bytes, heap.peak_bytes
        (10, 110)
    """

    def __init__(self, names: Mapping[str, tuple[Storage, ...]] | None = None) -> None:
        self._names: dict[str, tuple[Storage, ...]] = {}
        self._references: Counter[Storage] = Counter()
        self.live_bytes = self.peak_bytes = 0
        for name, storages in (names or {}).items():
            self.bind(name, storages)

    def __getitem__(self, name: str) -> tuple[Storage, ...]:
        """The storages that a name keeps alive: one for a tensor, several for a tuple, none for what exists outside."""
        return self._names.get(name, ())

    def bind(self, name: str, storages: tuple[Storage, ...]) -> None:
        """Bind a name to storages, which are new unless another name is bound to them."""
        for storage in storages:
            self._references[storage] += 1
            if self._references[storage] == 1:
                self.live_bytes += storage.size_bytes
        self.free(name)
        self._names[name] = storages
        self.use(0)

    def free(self, name: str) -> None:
        """Delete a name."""
        for storage in self._names.pop(name, ()):
            self._references[storage] -= 1
            if not self._references[storage]:
                self.live_bytes -= storage.size_bytes

    def free_scope(self, scope: str) -> None:
        """Delete all names that begin with a text."""
        for name in [name for name in self._names if name.startswith(scope)]:
            self.free(name)

    def use(self, size_bytes: int) -> None:
        """Allocate workspace, and free it."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + size_bytes)

    def keep_only(self, names: Iterable[str]) -> None:
        """Delete all other names."""
        kept = set(names)
        for name in self._names.keys() - kept:
            self.free(name)


def run_on(heap: Heap, module: GeneratedModule, workspace: Workspace, *, scope: str = "") -> None:
    """Do what a generated module does to memory; its outputs are what is left."""
    given: dict[str, list[tuple[Storage, ...]]] = {}
    for event in module.events:
        match event:
            case Allocate():
                unit = CUDA_ALIGNMENT_BYTES if event.device == "cuda" else 1
                heap.bind(scope + event.name, tuple(Storage(-(-size // unit) * unit) for size in event.sizes_bytes))
            case Alias():
                of = heap[scope + event.of]
                heap.bind(scope + event.name, of if event.position is None or not of else (of[event.position],))
            case Free():
                heap.free(scope + event.name)
            case Give():
                given[event.call] = [heap[scope + name] for name in event.arguments]
                heap.bind(f"{scope}{event.call} arguments", tuple(s for storages in given[event.call] for s in storages))
            case Call():
                inside = f"{scope}{event.name}."
                for name, storages in zip(event.module.inputs, given.pop(event.name), strict=True):
                    heap.bind(inside + name, storages)
                heap.free(f"{scope}{event.name} arguments")
                run_on(heap, event.module, workspace, scope=inside)
                results = [heap["" if o is None else inside + o] or (Storage(0),) for o in event.module.outputs]
                heap.bind(scope + event.name, tuple(storages[0] for storages in results))
                heap.free_scope(inside)
            case _:
                heap.use(0 if event.node is None else workspace(event.node))


class Account:
    """The memory of a forward and a backward, counted while Inductor generates them."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._modules: list[GeneratedModule] = []

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the modules that this thread generates inside."""
        with watch_generated_modules(self._modules.append):
            yield

    def memory(self, *, num_outputs: int, hold_outputs: bool) -> StepMemory | None:
        """Memory of the step."""
        if [m.is_backward for m in self._modules] != [False, True] or any(m.uncounted for m in self._modules):
            return None
        forward, backward = self._modules
        heap = Heap()
        run_on(heap, forward, self._workspace)
        heap.keep_only(o for o in forward.outputs if o is not None)
        saved: dict[str, tuple[Storage, ...]] = {}
        for position, (node, output) in enumerate(zip(forward.output_nodes, forward.outputs, strict=True)):
            if node is not None and output is not None:
                if position >= num_outputs or node in backward.inputs:
                    saved[node] = heap[output]
                if position < num_outputs and hold_outputs:
                    saved[f"output {position}"] = heap[output]
        tangents = {name: (Storage(size),) for name, size in backward.inputs.items() if name not in forward.output_nodes}
        held = {f"held {name}": (s,) for name, (s,) in tangents.items() if s.size_bytes <= SCALAR_TANGENT_BYTES}
        later = Heap(saved | tangents | held)
        run_on(later, backward, self._workspace)
        peak_bytes = later.peak_bytes
        later.keep_only(o for o in backward.outputs if o is not None)
        return StepMemory(
            forward_peak_bytes=heap.peak_bytes,
            saved_bytes=heap.live_bytes,
            backward_peak_bytes=peak_bytes,
            gradient_bytes=later.live_bytes,
        )

    def memory_of_whole_step(self) -> StepMemory | None:
        """Memory of a step that is one module; None where it is not known, as for `memory`."""
        if [m.is_backward for m in self._modules] != [False] or self._modules[0].uncounted:
            return None
        heap = Heap()
        run_on(heap, self._modules[0], self._workspace)
        return StepMemory.of_whole_step(heap.peak_bytes)
