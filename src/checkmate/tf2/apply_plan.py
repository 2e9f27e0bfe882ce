"""Write a plan into a function: one node for every computation, run in exactly the plan's order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from checkmate.core.plan import Plan
from checkmate.tf2.capture import Capture, base_tensor
from checkmate.tf2.op_properties import SAME, static_values

REMAT = "__remat"
"""Ends the name of a computation that is not its op's first, with a number."""

Runner = Callable[..., Sequence[tf.Tensor]]


def build_function(capture: Capture, plan: Plan, *, chain: bool = True) -> Runner:
    """A function of the flat batch that runs a plan and gives the flat outputs.

    Every computation waits for the one before it by a control edge. Without that TensorFlow would run a
    recomputation as soon as its inputs are there, at once, and nothing would be saved. A buffer goes when its last
    reader has run, so that frees need no nodes.

    Args:
        capture: The step.
        plan: The plan.
        chain: False leaves the control edges out; only tests want that.
    """
    writer = _Writer(capture, chain)
    for o in plan.order:
        writer.compute(o)
    outputs, effects = writer.finish()
    trace = capture.trace
    inputs = list(trace.function.inputs)
    arguments = trace.arguments
    outside = list(trace.captured.values())

    def body(*batch: Any) -> list[tf.Tensor]:
        graph: Any = tf.compat.v1.get_default_graph()
        given = [*batch, *(graph.capture(tensor) for tensor in outside)]
        bound = {t.name: v for t, v in zip(inputs, given, strict=True) if t.op.name in writer.inputs}
        made = tf.import_graph_def(writer.graph_def, input_map=bound, return_elements=outputs + effects, name="plan")
        with tf.control_dependencies(made[len(outputs) :]):
            return [tf.identity(t) for t in made[: len(outputs)]]

    signature = [tf.TensorSpec(t.shape, t.dtype) for t in arguments]
    return tf.function(body, input_signature=signature, autograph=False).get_concrete_function()


class _Writer:
    """The new graph while it is written."""

    def __init__(self, capture: Capture, chain: bool) -> None:
        self.capture = capture
        self.chain = chain
        source = capture.trace.function.graph.as_graph_def()
        self.nodes = {node.name: node for node in source.node}
        self.graph_def: Any = tf.compat.v1.GraphDef()
        self.graph_def.versions.CopyFrom(source.versions)
        self.graph_def.library.CopyFrom(source.library)
        self.inputs: set[str] = set()
        self.newest: dict[str, str] = {}  # op of the graph -> node of its newest computation
        self.runs: Counter[str] = Counter()
        self.constants: set[str] = set()
        self.reads: set[str] = set()
        self.views: dict[tuple[str, tuple[str, ...]], str] = {}
        self.copies: Counter[str] = Counter()  # views of each name
        self.previous: str | None = None

    def compute(self, o: int) -> None:
        """Compute an op of the graph once more."""
        op = self.capture.members[o]
        times = self.runs[op.name]
        name = op.name if not times else f"{op.name}{REMAT}{times}"
        self.runs[op.name] += 1
        if op.type == "AssignVariableOp" and op.inputs[1].dtype.is_floating and op.inputs[1].shape.is_fully_defined():
            self._assign_in_place(op)
        else:
            self._add(op, name, chained=True)
        self.newest[op.name] = name
        self.previous = name

    def finish(self) -> tuple[list[str], list[str]]:
        """What to return, and the effects to wait for."""
        outputs = [self._tensor(t) for t in self.capture.trace.function.graph.outputs]
        effects = [self.newest[self.capture.members[o].name] for o in self.capture.effects]
        return [t if ":" in t else f"{t}:0" for t in outputs], effects

    def _add(self, op: tf.Operation, name: str, *, chained: bool = False) -> None:
        inputs = [self._tensor(t) for t in op.inputs]
        if inputs and self.capture.kinds[op.name] != "constant" and all(map(self._is_constant, op.inputs)):
            inputs[0] = self._unfolded(inputs[0], op.inputs[0])
        if chained and self.previous is not None:
            inputs.extend(self._waits(op))
        node = self.graph_def.node.add()
        node.CopyFrom(self.nodes[op.name])
        node.name = name
        del node.input[:]
        node.input.extend(inputs)
        node.attr.pop("_class", None)  # places it with a node that may have another name now

    def _assign_in_place(self, op: tf.Operation) -> None:
        """Assign by writing into the buffer that a variable has.

        TensorFlow's own assignment takes the value's buffer over, so that variables move through the allocator's memory
        from step to step, and the free chunks between them never are the same twice: a step that was measured would
        one day take half as much again. Adding in place gives the variable a buffer of its own if someone holds the one it has,
        `InplaceUpdate` overwrites the sum, and the variable is assigned what it holds already; one that copies
        whenever it is read is assigned that copy.
        """
        value = op.inputs[1]
        handle, new = (self._tensor(t) for t in op.inputs)
        dtype, count = value.dtype, value.shape.num_elements()
        name = op.name
        own = self._node("AssignAddVariableOp", f"{name}__own", [handle, new, *self._waits(op)], dtype=dtype)
        read = self._node("ReadVariableOp", f"{name}__read", [handle, f"^{own}"], dtype=dtype)
        row = self._const(f"{name}__row", np.array([1, count], np.int32))
        old = self._node("Reshape", f"{name}__old", [read, row], T=dtype, Tshape=tf.int32)
        new = self._node("Reshape", f"{name}__new", [new, row], T=dtype, Tshape=tf.int32)
        first = self._const(f"{name}__first", np.array([0], np.int32))
        written = self._node("InplaceUpdate", f"{name}__written", [old, first, new], T=dtype)
        shape = self._const(f"{name}__shape", np.array(value.shape.as_list(), np.int32))
        whole = self._node("Reshape", f"{name}__whole", [written, shape], T=dtype, Tshape=tf.int32)
        self._node("AssignVariableOp", name, [handle, whole], dtype=dtype)

    def _const(self, name: str, value: np.ndarray) -> str:
        node = self.graph_def.node.add()
        node.name, node.op = name, "Const"
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
        node.attr["dtype"].type = node.attr["value"].tensor.dtype
        return name

    def _node(self, kind: str, name: str, inputs: list[str], **types: tf.DType) -> str:
        node = self.graph_def.node.add()
        node.name, node.op = name, kind
        node.input.extend(inputs)
        for key, dtype in types.items():
            node.attr[key].type = dtype.as_datatype_enum
        return name

    def _waits(self, op: tf.Operation) -> list[str]:
        if self.chain:
            return [f"^{self.previous}"]
        return sorted({f"^{self.newest[c.name]}" for c in op.control_inputs if c.name in self.newest})

    def _tensor(self, tensor: tf.Tensor) -> str:
        op = tensor.op
        kind = self.capture.kinds[op.name]
        if kind == "input":
            self.inputs.add(op.name)
            name = op.name
        elif kind == "constant":
            values = self._constant(op)
            if values and tensor.value_index:
                return f"{op.name}__{tensor.value_index}"
            name = op.name
        elif kind == "view" and op.type in SAME:
            return self._tensor(op.inputs[tensor.value_index])
        elif kind == "view":
            name = self._view(op)
        elif kind == "read" and op.name not in self.capture.held:
            name = self._read(op)
        else:
            name = self.newest[op.name]
        return name if not tensor.value_index else f"{name}:{tensor.value_index}"

    def _constant(self, op: tf.Operation) -> bool:
        """Write a constant; whether it is one node an output."""
        values = static_values(op) or []
        if op.name not in self.constants:
            self.constants.add(op.name)
            for i, value in enumerate(values):
                self._const(f"{op.name}__{i}" if i else op.name, value)
            if not values:
                self._add(op, op.name)
        return bool(values)

    def _is_constant(self, tensor: tf.Tensor) -> bool:
        return self.capture.kinds[base_tensor(tensor, self.capture.kinds).op.name] == "constant"

    def _unfolded(self, name: str, tensor: tf.Tensor) -> str:
        """A constant that the runtime does not take for one.

        It would otherwise compute whatever has only constants as inputs before the first step, up to 10 MiB each, and keep
        it for good: what the plan frees would stay, uncounted.
        """
        kept = f"{name.replace(':', '__')}__unfolded"
        if kept not in self.constants:
            self.constants.add(kept)
            self._node("GuaranteeConst", kept, [name], T=tensor.dtype)  # not to be optimized away; hands its input on
        return kept

    def _read(self, op: tf.Operation) -> str:
        """Read a variable when it is first needed: nothing changes it between then and its last use."""
        if op.name not in self.reads:
            self.reads.add(op.name)
            self._add(op, op.name, chained=True)
        return op.name

    def _view(self, op: tf.Operation) -> str:
        """A view of the newest computation of what it shares its buffer with."""
        inputs = tuple(self._tensor(t) for t in op.inputs)
        key = (op.name, inputs)
        if key not in self.views:
            number = self.copies[op.name]
            self.copies[op.name] += 1
            self.views[key] = op.name if not number else f"{op.name}__view{number}"
            self._add(op, self.views[key])
        return self.views[key]
