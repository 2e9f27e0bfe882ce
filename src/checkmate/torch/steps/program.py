"""Compiled forwards and backwards of one captured graph, one pair for each plan."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from checkmate.core.budget import Budget, ResidentMemory, keep_all_bytes
from checkmate.core.errors import CheckmateError
from checkmate.core.graph import Graph
from checkmate.core.plan import Fetch, Plan
from checkmate.core.result import Result
from checkmate.frontend.options import PlanningOptions
from checkmate.frontend.planner import result_of_order
from checkmate.frontend.step_memory import StepMemory
from checkmate.torch._compat.aot import BoxedRun, boxed, gradient_positions, is_tangent, saved_symbols
from checkmate.torch.chunking.choose import Chunks
from checkmate.torch.distributed.consensus import Ranks
from checkmate.torch.graph.op_properties import BATCH_NORM, random_op, trains_batch_norm, used_arguments, without_update
from checkmate.torch.graph.rng import generators_restored
from checkmate.torch.graph.storages import is_scalar_tangent, storage_bytes
from checkmate.torch.graph.traced import results
from checkmate.torch.joint.capture import Capture
from checkmate.torch.measure.resident import within_room
from checkmate.torch.partition.copies import BUFFERS
from checkmate.torch.partition.split import CapturedJoint
from checkmate.torch.passes.gradients import accumulating, without_tangents


class LateGradientError(CheckmateError, RuntimeError):
    """A gradient came for an output that had none before, and cannot be computed any more."""


@dataclass(eq=False, slots=True)
class Program:
    """A compiled forward and backward that run one plan of a graph."""

    result: Result
    memory: StepMemory  # above resident memory
    undefined: frozenset[int] = frozenset()  # tangents that the backward does not read: no gradient flows into their outputs
    accumulated: frozenset[int] = frozenset()  # inputs whose gradients the backward adds to existing ones, by position
    in_pieces: bool = False  # whether regions of the graph run piece by piece
    num_symbols: int = 0  # how many symbolic sizes the forward saves for the backward
    forward: BoxedRun | None = None  # the forward, in AOTAutograd's boxed calling convention; None until it is compiled
    backward: BoxedRun | None = None

    @property
    def running(self) -> AbstractContextManager[None]:
        """Context of a run of the forward or the backward."""
        return nullcontext() if self.result.plan.host is None else BUFFERS.step()


class Tangent(NamedTuple):
    """The gradient of an output of a forward."""

    shape: tuple[int | torch.SymInt, ...]
    stride: tuple[int | torch.SymInt, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInterface:
    """A captured graph without its nodes, and how its forward and backward are called."""

    graph: Graph  # the graph that is planned
    whole: Graph  # the graph before ops that run regions piece by piece replaced the regions
    num_outputs: int  # how many results of the forward go to the caller
    tangents: tuple[Tangent, ...]  # gradients that the backward reads, in the order of its arguments

    @classmethod
    def of(cls, joint: CapturedJoint) -> GraphInterface:
        """The interface of a joint graph."""
        values = [n.meta["val"] for n in joint.whole.joint.graph.nodes if is_tangent(n)]
        return cls(
            graph=joint.capture.graph,
            whole=joint.whole.graph,
            num_outputs=joint.whole.num_fwd_outputs,
            tangents=tuple(Tangent(tuple(v.shape), tuple(v.stride()), v.dtype, v.device) for v in values),
        )


@dataclass(eq=False, kw_only=True)
class PlannedGraph:
    """A captured graph with its programs."""

    interface: GraphInterface
    joint: CapturedJoint | None  # None if the code came from a cache: nothing was traced
    own: Program  # of the plan that was made when the graph was compiled
    # Whether that plan was made for the budget, for a step of this graph alone. Otherwise it has nearly the smallest peak, and
    # the step is planned when it is known.
    alone: bool
    options: PlanningOptions
    resident: ResidentMemory  # memory besides the graph's inputs when it was compiled
    planned_gradient_bytes: int  # gradients that the own plan counts as resident
    ranks: Ranks | None  # ranks that plan together
    recompile: Callable[[], None]  # has Dynamo compile the graph again at its next call, if Dynamo compiled it
    # Resident bytes that are looked up again when a step begins: all tensors that are neither inputs nor gradients, and the
    # state that optimizers will make.
    outside_bytes: int = 0
    counted_bytes: int = 0  # bytes of the wrappers that a count of the device's tensors includes
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    replaceable: bool = True  # whether another program can take the place of the own one without compiling again
    num_symbols: int = 0  # how many symbolic sizes AOTAutograd takes over from the forward to the backward
    chunks: Chunks | None = None  # ops that may run piece by piece; None if none may
    pin: Callable[[Capture, Plan], None] = lambda capture, plan: None  # pins the weights that a plan fetches
    _joints: dict[tuple[frozenset[int], frozenset[int]], CapturedJoint] = field(default_factory=dict)
    _programs: dict[tuple[CapturedJoint, tuple[int | Fetch, ...]], Program] = field(default_factory=dict)

    @property
    def budget(self) -> Budget:
        """The budget as the user gave it."""
        assert self.options.budget is not None
        return self.options.budget

    @functools.cached_property
    def key(self) -> str:
        """Key of the graph and its budget: Dynamo may compile a frame again for a reason that does not change its graph."""
        return key_of(self.interface.whole, self.budget)

    @functools.cached_property
    def keep_all(self) -> StepMemory:
        """Memory of keeping everything; if there is a loss, with gradients into the loss alone.

        The first backward shows into which outputs gradients flow.
        """
        graph = self.interface.whole
        scalar = [] if graph.boundary is None else [is_scalar_tangent(graph.values[v]) for v in graph.ops[graph.boundary].outputs]
        if len(scalar) == len(self.interface.tangents) and any(scalar):
            others = frozenset(t for t, loss in enumerate(scalar) if not loss)
            graph = self.captured(others, self.own.accumulated).capture.graph if others else graph
        if graph.boundary is None:
            return StepMemory.of_whole_step(keep_all_bytes(graph) - graph.resident_bytes)
        return StepMemory.of(graph, Plan.from_order(graph, range(len(graph.ops))))

    def captured(self, undefined: frozenset[int], accumulated: frozenset[int]) -> CapturedJoint:
        """The joint graph as it is in a step. Ops that its other variants do not have are estimated; `measured` measures them."""
        key = undefined, accumulated
        if key not in self._joints:
            whole = not undefined and accumulated == self.own.accumulated
            with within_room(0):
                self._joints[key] = (
                    replace(self.traced, capture=self.traced.whole)
                    if whole
                    else self.traced.changed(
                        lambda module: accumulating(without_tangents(module, undefined), self.interface.num_outputs, accumulated)
                    )
                )
        return self._joints[key]

    def measured(self, undefined: frozenset[int], accumulated: frozenset[int]) -> CapturedJoint:
        """The joint graph of `captured`, with measurements of ops for which there was no room before and there is room now."""
        joint = self.captured(undefined, accumulated).measured()
        self._joints[undefined, accumulated] = joint
        return joint

    def program(
        self,
        undefined: frozenset[int],
        accumulated: frozenset[int],
        order: Sequence[int | Fetch],
        joint: CapturedJoint | None = None,
    ) -> Program:
        """The program of an order of the graph; compiled once."""
        joint = joint or self.captured(undefined, accumulated)
        key = joint, tuple(order)
        if key not in self._programs:
            result = result_of_order(joint.capture.graph, order, self.options.host)
            forward, backward = joint.split(result)
            self.pin(joint.capture, result.plan)
            self._programs[key] = Program(
                result,
                StepMemory.of(joint.capture.graph, result.plan),
                undefined,
                accumulated,
                joint.capture is not joint.whole,
                saved_symbols(forward, self.interface.num_outputs),
                boxed(forward),
                boxed(backward),
            )
        return self._programs[key]

    def without_gradient(self, undefined: frozenset[int]) -> list[int]:
        """Inputs that no gradient flows into: autograd has None for them, and not zeros."""
        joint = self.captured(undefined, self.own.accumulated).whole.joint
        gradients: Any = joint.graph.output_node().args[0]
        return [k for k, gradient in enumerate(gradients[self.interface.num_outputs :]) if gradient is None]

    @functools.cached_property
    def keeping_everything(self) -> Program:
        """The program that saves the same tensors as the plain step; the own program if no other can take its place."""
        if not self.replaceable or self.dynamic:
            return self.own
        joint = self.captured(frozenset(), frozenset())
        return self.program(frozenset(), frozenset(), range(len(joint.capture.graph.ops)), joint)

    @property
    def traced(self) -> CapturedJoint:
        """The captured joint graph."""
        if self.joint is None:
            raise RuntimeError("the code of this graph came from a cache, and its joint graph was not traced")
        return self.joint

    def materialized(self, tangents: Sequence[Any], undefined: frozenset[int] = frozenset()) -> list[Any]:
        """The tangents of a backward, with zeros for those that are None."""
        found = list(tangents)
        for t, (shape, stride, dtype, device) in enumerate(self.interface.tangents):
            if found[t] is None and t not in undefined:
                found[t] = torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
        return found

    @functools.cached_property
    def dynamic(self) -> bool:
        """Whether sizes of the graph are symbolic."""
        if self.joint is None:  # a cache has only code for sizes that do not change
            return False
        values = (n.meta.get("val") for n in self.joint.whole.joint.graph.nodes if n.op == "placeholder")
        return any(isinstance(v, torch.SymInt) for v in values)

    @functools.cached_property
    def gradients(self) -> list[int] | None:
        """The position of each input's gradient among the results of the backward; None if they are those of the inputs."""
        if self.joint is None:
            return None
        joint = self.joint.whole.joint
        return gradient_positions(joint, len(results(joint)) - self.interface.num_outputs)

    @functools.cached_property
    def input_bytes(self) -> tuple[int, ...]:
        """The most bytes that each input can have, if sizes are symbolic."""
        nodes = [n for n in self.traced.whole.joint.graph.nodes if n.op == "placeholder" and not is_tangent(n)]
        values = [n.meta.get("val") for n in nodes]
        return tuple(storage_bytes(v) if isinstance(v, torch.Tensor) else 0 for v in values)

    def forward_through_hooks(self, args: list[Any]) -> list[Any]:
        """Run a forward whose saved tensors go through hooks: only the hooks know the bytes that exist until its backward.

        It runs the same program each time: its saved tensors do not depend on the budget, and are the same if
        ``torch.utils.checkpoint`` runs the forward again. Its backward finds no forward, since the hooks may copy the token.
        """
        assert self.keeping_everything.forward is not None
        results = list(self.keeping_everything.forward(args))
        results.insert(self.interface.num_outputs, torch.empty(0, dtype=torch.uint8))
        return results

    def backward_through_hooks(self, args: list[Any]) -> Any:
        """Run the backward of `forward_through_hooks`."""
        first = len(args) - len(self.interface.tangents)
        assert self.keeping_everything.backward is not None
        args[first:] = self.materialized(args[first:])
        return self.keeping_everything.backward(args)

    def late_backward(self, arguments: ForwardArguments, tangents: Sequence[Any]) -> list[Any]:
        """The gradients of a forward whose program left out a gradient that came after all.

        The whole joint graph runs once more, from the arguments of the forward and the random state that it began with. This
        takes the memory of keeping everything.
        """
        run, inputs = self._gradients_alone
        values = arguments.unchanged(inputs)
        with generators_restored():
            if arguments.random_states is not None:
                cpu, cuda = arguments.random_states
                torch.set_rng_state(cpu)
                torch.cuda.set_rng_state_all(cuda)
            return list(run([*values, *self.materialized(tangents)]))

    @functools.cached_property
    def _gradients_alone(self) -> tuple[BoxedRun, list[int]]:
        """The joint graph without effects, which returns the gradients, and the tensor inputs that decide the gradients."""
        graph = accumulating(self.traced.whole.joint, self.interface.num_outputs, frozenset()).graph
        output = graph.output_node()
        output.args = (tuple(output.args[0][self.interface.num_outputs :]),)  # type: ignore[index]
        for node in graph.nodes:
            node.args = used_arguments(node)
        for node in reversed(list(graph.nodes)):
            # A random op advances the generator for those after it, whether or not its result is read.
            if node.op == "call_function" and not node.users and random_op(node) is None:
                graph.erase_node(node)
            elif trains_batch_norm(node) and (node.target is not BATCH_NORM or all(u.args[1] < 3 for u in node.users)):
                node.target, node.args = without_update(node.target, node.args)
        inputs = [n for n in graph.nodes if n.op == "placeholder" and not is_tangent(n)]
        read = [k for k, n in enumerate(inputs) if n.users and isinstance(n.meta.get("val"), torch.Tensor)]
        return boxed(fx.GraphModule(self.traced.whole.joint, graph)), read

    @functools.cached_property
    def random(self) -> bool:
        """Whether the graph draws random numbers."""
        return any(random_op(n) is not None for n in self.traced.whole.joint.graph.nodes)

    @property
    def random_state_bytes(self) -> int:
        """Bytes of the random state that a forward keeps for `late_backward`; the state of a CUDA device is in main memory."""
        on_cpu = all(device.type == "cpu" for *_, device in self.interface.tangents)
        return torch.get_rng_state().nbytes if self.random and on_cpu else 0


@dataclass(frozen=True, slots=True)
class StepAllotment:
    """The bytes that a graph may take in its step, for which it is compiled again."""

    order: tuple[int, ...] | None  # of its computations; None if it is the only graph of its step: any order will do
    limit: StepMemory  # above its resident memory: the planned bytes, and the rest of the budget
    eager_bytes: int | None = None  # bytes of eager code in addition to the plan; None for one of several graphs

    @classmethod
    def of_only_graph(cls, size_bytes: int, order: tuple[int, ...] | None = None, eager_bytes: int = 0) -> StepAllotment:
        """The allotment of the only graph of its step: ``size_bytes`` at any time, with eager code between the two runs."""
        limit = StepMemory(
            forward_peak_bytes=size_bytes,
            saved_bytes=max(0, size_bytes - eager_bytes),
            backward_peak_bytes=size_bytes,
            gradient_bytes=size_bytes,
        )
        return cls(order, limit, eager_bytes)


class ForwardArguments:
    """The arguments of a forward, tensors by weak references, and the states of the random generators when it began."""

    def __init__(self, planned: PlannedGraph, args: Sequence[Any]) -> None:
        self._arguments = [weakly(a) for a in args]
        self._versions = [version_of(a) for a in args]
        self.random_states: tuple[torch.Tensor, list[torch.Tensor]] | None = None  # of the CPU and of each CUDA device
        if planned.random:
            cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
            self.random_states = torch.get_rng_state(), cuda

    def unchanged(self, positions: Iterable[int]) -> list[Any]:
        """The arguments, if those at some positions are alive and were not overwritten."""
        found = [argument() for argument in self._arguments]
        if any(found[k] is None or version_of(found[k]) != self._versions[k] for k in positions):
            raise LateGradientError(
                "a gradient came for an output that had none in the steps before, and an input that it depends on has been freed "
                "or overwritten",
                hint="run the step again: the gradient is planned for from now on",
            )
        return found


def key_of(graph: Graph, budget: Budget) -> str:
    """Key of a graph and the budget that was asked for; resident bytes are ignored."""
    return f"{budget} {graph.digest}"


def weakly(argument: Any) -> Callable[[], Any]:
    """A function that returns an argument, or None after a tensor was freed."""
    return weakref.ref(argument) if isinstance(argument, torch.Tensor) else lambda: argument


def version_of(argument: Any) -> int:
    """How often a tensor has been overwritten; 0 for other arguments."""
    return argument._version if isinstance(argument, torch.Tensor) and not argument.is_inference() else 0
