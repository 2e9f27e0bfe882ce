"""Writes a plan as a TensorFlow function: one node for every computation, executed in exactly the plan's order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from checkmate.core.plan import Plan
from checkmate.tf2._compat import copied_op
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
    trace, copied = capture.trace, _copied_outputs(capture)

    def body(*batch: Any) -> list[tf.Tensor]:
        graph: Any = tf.compat.v1.get_default_graph()
        given = [*batch, *(graph.capture(tensor) for tensor in trace.captured.values())]
        inputs = {t.op.name: tensor for t, tensor in zip(trace.function.inputs, given, strict=True)}
        with graph.name_scope(IMPORTED):
            writer = _Writer(capture, inputs)
            for o in plan.order:
                writer.compute(o)
            outputs = [writer.tensor(t) for t in trace.function.graph.outputs]
        effects = [writer.latest[capture.members[o].name] for o in capture.effects]
        with tf.control_dependencies([*effects, *writer.waits]):
            return [tf.raw_ops.DeepCopy(x=t) if i in copied else tf.identity(t) for i, t in enumerate(outputs)]

    signature = [tf.TensorSpec(t.shape, t.dtype) for t in trace.arguments]
    return tf.function(body, input_signature=signature, autograph=False).get_concrete_function()


def _copied_outputs(capture: Capture) -> set[int]:
    """Positions of the outputs that are copied when everything else of the step is freed.

    An output such as the loss exists until the next step has replaced it. Allocated in the middle of a step, it leaves other free
    chunks to each next step: the same plan of a transformer took 36.1 to 39.9 MB in 60 steps. The copies are allocated at
    the addresses of the copies of the step before the last.

    Both copies of an output exist at the end of the step. Outputs are copied, smallest first, as long as this takes no more than
    the op with the largest inputs and outputs, and therefore no more than the peak of any plan.
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
    """Adds the computations of a plan to a graph, one at a time, each of which waits for the one before it."""

    def __init__(self, capture: Capture, inputs: Mapping[str, tf.Tensor]) -> None:
        self.capture, self.inputs = capture, inputs
        self.latest: dict[str, tf.Operation] = {}  # op of the trace -> its latest computation; for a read, the only one
        self.waits: list[tf.Operation] = []  # the previous computation
        self.runs: Counter[str] = Counter()
        self.constants: dict[str, Sequence[tf.Tensor]] = {}
        self.unfolded: dict[Any, tf.Tensor] = {}
        self.views: dict[tuple[Any, ...], tf.Operation] = {}

    def compute(self, o: int) -> None:
        """Append a computation of an op of the graph."""
        op = self.capture.members[o]
        times = self.runs[op.name]
        self.runs[op.name] += 1
        if op.type == "AssignVariableOp" and op.inputs[1].dtype in _COPIED and op.inputs[1].shape.is_fully_defined():
            made = self._assign_in_place(op)
        else:
            made = self._add(op, op.name if not times else f"{op.name}{REMAT}{times}", chained=True)
        self.latest[op.name] = made
        self.waits = [made]

    def tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor that stands for a traced tensor at this point of the plan."""
        op = tensor.op
        kind = self.capture.kinds[op.name]
        if kind == "input":
            return self.inputs[op.name]
        if kind == "constant":
            return self._constant(op)[tensor.value_index]
        if kind == "view" and op.type in IDENTITIES:
            return self.tensor(op.inputs[tensor.value_index])
        if kind == "view":
            return self._view(op).outputs[tensor.value_index]
        if kind == "read" and op.name not in self.latest and op.name not in self.capture.snapshot_reads:
            # A variable is read at its first use: no op changes it between then and its last use.
            self.latest[op.name] = self._add(op, op.name, chained=True)
        return self.latest[op.name].outputs[tensor.value_index]

    def _add(self, op: tf.Operation, name: str, *, chained: bool = False) -> tf.Operation:
        inputs = [self.tensor(t) for t in op.inputs]
        if inputs and self.capture.kinds[op.name] != "constant" and all(map(self._is_constant, op.inputs)):
            inputs[0] = self._not_folded(inputs[0])
        # `_class` asks for colocation with a node whose name may have changed.
        attributes = {key: value for key, value in op.node_def.attr.items() if key != "_class"}
        if op.type in LOOPS:
            # Up to ten iterations overlap by default, as threads happen to run: the bytes of one LSTM varied from 0.6 to 1.5 MB.
            attributes["parallel_iterations"] = tf.compat.v1.AttrValue(i=1)
        return copied_op(op, inputs, name, attributes, self.waits if chained else ())

    def _assign_in_place(self, op: tf.Operation) -> tf.Operation:
        """Assign a variable by overwriting its current buffer.

        `AssignVariableOp` adopts the buffer of the new value (tensorflow/core/kernels/resource_variable_ops.cc). Variables
        then move through the allocator's memory from step to step and the free chunks between them change every time: the
        same step of VGG19 took 160 to 251 MB in 40 steps (docs/decisions/0014). Instead,

        1. `AssignAddVariableOp` adds in place; it copies the variable first if another tensor references its buffer;
        2. `InplaceUpdate` (tensorflow/core/kernels/inplace_ops.cc) overwrites the sum with the new value;
        3. `AssignVariableOp` assigns the variable the buffer that it has already, or, if the variable is in copy-on-read
           mode, the copy.
        """
        handle, new = (self.tensor(t) for t in op.inputs)
        shape = op.inputs[1].shape
        row = [1, shape.num_elements()]
        with tf.device(op.device):
            with tf.control_dependencies(self.waits):
                unshared = tf.raw_ops.AssignAddVariableOp(resource=handle, value=new, name=f"{op.name}__own")
            with tf.control_dependencies([unshared]):
                read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=new.dtype, name=f"{op.name}__read")
            written = tf.raw_ops.InplaceUpdate(x=tf.reshape(read, row), i=[0], v=tf.reshape(new, row), name=f"{op.name}__written")
            return tf.raw_ops.AssignVariableOp(resource=handle, value=tf.reshape(written, shape.as_list()), name=op.name)

    def _constant(self, op: tf.Operation) -> Sequence[tf.Tensor]:
        """Outputs of an op that is a constant: written once, as its values if shapes give them."""
        if op.name not in self.constants:
            values = static_shape_values(op)
            made = None if values is None else [tf.constant(value, name=f"{op.name}__{i}") for i, value in enumerate(values)]
            self.constants[op.name] = self._add(op, op.name).outputs if made is None else made
        return self.constants[op.name]

    def _is_constant(self, tensor: tf.Tensor) -> bool:
        return self.capture.kinds[base_tensor(tensor, self.capture.kinds).op.name] == "constant"

    def _not_folded(self, tensor: tf.Tensor) -> tf.Tensor:
        """A constant that the runtime does not fold.

        Constant folding (tensorflow/core/common_runtime/constant_folding.cc) computes ops with constant inputs once,
        up to 10 MiB each, and keeps the results as long as the function exists: the plan's frees would release nothing, and
        the bytes would not be counted. This pass is not part of Grappler.
        """
        if tensor.ref() not in self.unfolded:  # marked as not optimizable; forwards its input
            self.unfolded[tensor.ref()] = tf.raw_ops.GuaranteeConst(input=tensor)
        return self.unfolded[tensor.ref()]

    def _view(self, op: tf.Operation) -> tf.Operation:
        """A view of the latest computation of the tensor whose buffer it shares."""
        key = (op.name, *(self.tensor(t).ref() for t in op.inputs))
        if key not in self.views:
            self.views[key] = self._add(op, f"{op.name}__view{len(self.views)}")
        return self.views[key]
