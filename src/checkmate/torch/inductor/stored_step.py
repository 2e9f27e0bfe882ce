"""The plan of compiled code, stored with it: a later process runs the code without tracing, planning and measuring again."""

from __future__ import annotations

import msgspec
import torch

from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.frontend.step_memory import StepMemory
from checkmate.torch.steps.program import GraphInterface, Tangent


class _StoredTangent(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str


class StoredStep(msgspec.Struct, frozen=True):
    """A step of one graph with sizes that do not change, as it is stored with its code."""

    graph: Graph
    num_outputs: int  # how many results of its forward go to the caller
    tangents: tuple[_StoredTangent, ...]  # the gradients that its backward is given
    result: Result
    memory: StepMemory | None  # its memory as measured; None if it was compiled without a budget

    @classmethod
    def of(cls, interface: GraphInterface, result: Result, memory: StepMemory | None) -> StoredStep:
        """The step in the form in which it is stored."""
        tangents = tuple(
            _StoredTangent(
                tuple(map(int, t.shape)), tuple(map(int, t.stride)), str(t.dtype).removeprefix("torch."), str(t.device)
            )
            for t in interface.tangents
        )
        return cls(interface.graph, interface.num_outputs, tangents, result, memory)

    @property
    def interface(self) -> GraphInterface:
        """The graph, and how its forward and backward are called."""
        tangents = (Tangent(t.shape, t.stride, getattr(torch, t.dtype), torch.device(t.device)) for t in self.tangents)
        return GraphInterface(graph=self.graph, whole=self.graph, num_outputs=self.num_outputs, tangents=tuple(tangents))

    def encode(self) -> bytes:
        """The step as bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, content: bytes) -> StoredStep:
        """The step that `encode` wrote; the key that it is stored by names the sources that wrote it."""
        return msgspec.msgpack.decode(content, type=cls)
