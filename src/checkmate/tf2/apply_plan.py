"""Writes a plan as a TensorFlow function: one node for every computation, executed in exactly the plan's order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from checkmate.core.plan import Plan
from checkmate.tf2.capture import Capture, base_tensor
from checkmate.tf2.op_properties import IDENTITIES, LOOPS, static_shape_values, tensor_bytes

REMAT = "__remat"
"""Suffix of the node of a recomputation, followed by its number: ``dense/Relu__remat1``."""

IMPORTED = "plan"
"""Scope of the nodes of a plan in its function: ``plan/dense/Relu``."""

_COPIED = frozenset({tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.int32, tf.int64, tf.uint8, tf.uint64})
"""Types for which `AssignAddVariableOp`, `InplaceUpdate` and `DeepCopy` have kernels on all devices (TensorFlow 2.21)."""

Runner = Callable[..., Sequence[tf.Tensor]]
"""Runs a step: takes the flat tensors of a batch, gives the flat outputs."""


def build_function(capture: Capture, plan: Plan) -> Runner:
    """A function of the flat batch that runs a plan and gives the flat outputs.

    A control edge leads from every computation to the next. TensorFlow's executor runs each op as soon as its inputs are
    available (tensorflow/core/common_runtime/executor.cc), so without these edges a recomputation would run immediately after
    the first computation and save no memory. A buffer is freed when its last reader has run, so frees need no nodes.

    The function is to be run inside `grappler_off`.
    """
    writer = _Writer(capture)
    for o in plan.order:
        writer.compute(o)
    outputs, effects = writer.finish()
    copied = _copied_outputs(capture)
    trace = capture.trace
    inputs = list(trace.function.inputs)
    arguments = trace.arguments
    outside = list(trace.captured.values())

    def body(*batch: Any) -> list[tf.Tensor]:
        graph: Any = tf.compat.v1.get_default_graph()
        given = [*batch, *(graph.capture(tensor) for tensor in outside)]
        bound = {t.name: v for t, v in zip(inputs, given, strict=True) if t.op.name in writer.inputs}
        imported = tf.import_graph_def(writer.graph_def, input_map=bound, return_elements=outputs + effects, name=IMPORTED)
        with tf.control_dependencies(imported[len(outputs) :]):
            return [tf.raw_ops.DeepCopy(x=t) if i in copied else tf.identity(t) for i, t in enumerate(imported[: len(outputs)])]

    signature = [tf.TensorSpec(t.shape, t.dtype) for t in arguments]
    return tf.function(body, input_signature=signature, autograph=False).get_concrete_function()


def _copied_outputs(capture: Capture) -> set[int]:
    """Positions of the outputs that are copied when everything else of the step is freed.

    An output such as the loss exists until the next step has replaced it. Allocated in the middle of a step, it leaves other free
    chunks to each next step: the same plan of a transformer took 36.1 to 39.9 MB in 60 steps. The copies are allocated where
    the copies of the step before the last were.

    Both copies of an output exist at the end of the step. Outputs are copied, smallest first, as long as this takes no more than
    the op with the largest inputs and outputs, and so no more than the peak of any plan.
    """
    graph, outputs = capture.graph, capture.trace.function.graph.outputs
    size = [value.size_bytes for value in graph.values]
    room = max((sum(size[v] for v in {*op.inputs, *op.outputs}) for op in graph.ops), default=0)
    room -= sum(value.size_bytes for value in graph.values if value.kept)
    found: set[int] = set()
    for i in sorted(range(len(outputs)), key=lambda i: tensor_bytes(outputs[i])):
        room -= tensor_bytes(outputs[i])
        if room >= 0 and outputs[i].dtype in _COPIED:
            found.add(i)
    return found


class _Writer:
    """Builds the ``GraphDef`` of a plan, one computation at a time, each of which waits for the one before it."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        source = capture.trace.function.graph.as_graph_def()
        self.nodes = {node.name: node for node in source.node}
        self.graph_def: Any = tf.compat.v1.GraphDef()
        self.graph_def.versions.CopyFrom(source.versions)
        self.graph_def.library.CopyFrom(source.library)
        self.inputs: set[str] = set()
        self.latest: dict[str, str] = {}  # op of the graph -> node of its latest computation
        self.runs: Counter[str] = Counter()
        self.constants: set[str] = set()
        self.reads: set[str] = set()
        self.views: dict[tuple[str, tuple[str, ...]], str] = {}
        self.copies: Counter[str] = Counter()  # number of views with each name
        self.previous: str | None = None

    def compute(self, o: int) -> None:
        """Append a computation of an op of the graph."""
        op = self.capture.members[o]
        times = self.runs[op.name]
        name = op.name if not times else f"{op.name}{REMAT}{times}"
        self.runs[op.name] += 1
        if op.type == "AssignVariableOp" and op.inputs[1].dtype in _COPIED and op.inputs[1].shape.is_fully_defined():
            self._assign_in_place(op)
        else:
            self._add(op, name, chained=True)
        self.latest[op.name] = name
        self.previous = name

    def finish(self) -> tuple[list[str], list[str]]:
        """Names of the tensors to return, and of the ops to wait for: the last one and those with effects."""
        outputs = [self._tensor(t) for t in self.capture.trace.function.graph.outputs]
        effects = [self.latest[self.capture.members[o].name] for o in self.capture.effects]
        last = [] if self.previous is None else [self.previous]
        return [t if ":" in t else f"{t}:0" for t in outputs], [*effects, *last]

    def _add(self, op: tf.Operation, name: str, *, chained: bool = False) -> None:
        inputs = [self._tensor(t) for t in op.inputs]
        if inputs and self.capture.kinds[op.name] != "constant" and all(map(self._is_constant, op.inputs)):
            inputs[0] = self._unfolded(inputs[0], op.inputs[0])
        if chained:
            inputs.extend(self._waits())
        node = self.graph_def.node.add()
        node.CopyFrom(self.nodes[op.name])
        node.name = name
        del node.input[:]
        node.input.extend(inputs)
        node.attr.pop("_class", None)  # asks for colocation with a node whose name may have changed
        if op.type in LOOPS:
            # Up to ten iterations overlap by default, as threads happen to run: the bytes of one LSTM varied from 0.6 to 1.5 MB.
            node.attr["parallel_iterations"].i = 1

    def _assign_in_place(self, op: tf.Operation) -> None:
        """Assign a variable by overwriting its current buffer.

        `AssignVariableOp` adopts the buffer of the new value (tensorflow/core/kernels/resource_variable_ops.cc). Variables
        then move through the allocator's memory from step to step and the free chunks between them change every time: the
        same step of VGG19 took 160 to 251 MB in 40 steps (docs/decisions/0014). Instead,

        1. `AssignAddVariableOp` adds in place; it copies the variable first if another tensor references its buffer;
        2. `InplaceUpdate` (tensorflow/core/kernels/inplace_ops.cc) overwrites the sum with the new value;
        3. `AssignVariableOp` assigns the variable the buffer that it has already, or, if the variable is in copy-on-read
           mode, the copy.
        """
        value = op.inputs[1]
        handle, new = (self._tensor(t) for t in op.inputs)
        dtype, count = value.dtype, value.shape.num_elements()
        name = op.name
        unshared = self._node("AssignAddVariableOp", f"{name}__own", [handle, new, *self._waits()], dtype=dtype)
        read = self._node("ReadVariableOp", f"{name}__read", [handle, f"^{unshared}"], dtype=dtype)
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

    def _waits(self) -> list[str]:
        """Control input of a computation: the previous one."""
        return [] if self.previous is None else [f"^{self.previous}"]

    def _tensor(self, tensor: tf.Tensor) -> str:
        """Name of the tensor that stands for a traced tensor at this point of the plan."""
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
        elif kind == "view" and op.type in IDENTITIES:
            return self._tensor(op.inputs[tensor.value_index])
        elif kind == "view":
            name = self._view(op)
        elif kind == "read" and op.name not in self.capture.snapshot_reads:
            name = self._read(op)
        else:
            name = self.latest[op.name]
        return name if not tensor.value_index else f"{name}:{tensor.value_index}"

    def _constant(self, op: tf.Operation) -> bool:
        """Write a constant once; returns whether it became one ``Const`` node per output."""
        values = static_shape_values(op) or []
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
        """A constant that the runtime does not fold.

        Constant folding (tensorflow/core/common_runtime/constant_folding.cc) computes ops with constant inputs once,
        up to 10 MiB each, and keeps the results as long as the function exists: the plan's frees would release nothing, and
        the bytes would not be counted. This pass is not part of Grappler.
        """
        kept = f"{name.replace(':', '__')}__unfolded"
        if kept not in self.constants:
            self.constants.add(kept)
            self._node("GuaranteeConst", kept, [name], T=tensor.dtype)  # marked as not optimizable; forwards its input
        return kept

    def _read(self, op: tf.Operation) -> str:
        """Read a variable at its first use: no op changes it between then and its last use."""
        if op.name not in self.reads:
            self.reads.add(op.name)
            self._add(op, op.name, chained=True)
        return op.name

    def _view(self, op: tf.Operation) -> str:
        """A view of the latest computation of the tensor whose buffer it shares."""
        inputs = tuple(self._tensor(t) for t in op.inputs)
        key = (op.name, inputs)
        if key not in self.views:
            number = self.copies[op.name]
            self.copies[op.name] += 1
            self.views[key] = op.name if not number else f"{op.name}__view{number}"
            self._add(op, self.views[key])
        return self.views[key]
