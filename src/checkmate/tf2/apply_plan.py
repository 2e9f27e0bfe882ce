"""Writes a plan as a TensorFlow function: one node for every computation, executed in exactly the plan's order."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from checkmate.tf2.capture import Capture, base_tensor, behind
from checkmate.tf2.op_properties import EMPTY_LISTS, IDENTITIES, LOOPS, is_open, static_shape_values, tensor_bytes

REMAT = "__remat"
"""Suffix of the node of a recomputation, followed by its number: ``dense/Relu__remat1``."""

IMPORTED = "plan"
"""Scope of the nodes of a plan in its function: ``plan/dense/Relu``."""

_COPIED = frozenset({tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.int32, tf.int64, tf.uint8, tf.uint64})
"""Types for which `AssignAddVariableOp`, `InplaceUpdate` and `DeepCopy` have kernels on all devices (TensorFlow 2.21)."""

Runner = Callable[..., Sequence[tf.Tensor]]  # runs a step: takes the flat tensors of a batch, gives the flat outputs


def build_function(capture: Capture, order: Iterable[int], outputs: Sequence[tf.Tensor] | None = None) -> Runner:
    """A function of the flat batch that computes ops in an order and gives the flat outputs of the step, or other ones.

    A control edge leads from every computation to the next. TensorFlow's executor runs each op as soon as its inputs are
    available (tensorflow/core/common_runtime/executor.cc), so without these edges a recomputation would run immediately after
    the first computation and save no memory. A buffer is freed when its last reader has run, so frees need no nodes.

    The function is to be run inside `grappler_off`.
    """
    trace, copied = capture.trace, set[int]() if outputs is not None else _copied_outputs(capture)
    writer = _Writer(capture)
    for o in order:
        writer.compute(o)
    names = [writer.tensor(t) for t in (trace.function.graph.outputs if outputs is None else outputs)]

    def body(*batch: Any) -> list[tf.Tensor]:
        graph: Any = tf.compat.v1.get_default_graph()
        given = [*batch, *(graph.capture(tensor) for tensor in trace.captured.values())]
        inputs = {t.name: tensor for t, tensor in zip(trace.function.inputs, given, strict=True)}
        read = {name: tensor for name, tensor in inputs.items() if name in writer.inputs}
        wanted = [*(name for name in names if name not in inputs), *writer.waits]
        nodes = tf.compat.v1.GraphDef(node=writer.nodes)
        imported = dict(zip(wanted, tf.graph_util.import_graph_def(nodes, read, wanted, name=IMPORTED), strict=True))
        with tf.control_dependencies([imported[name] for name in writer.waits]):
            given = [inputs[name] if name in inputs else imported[name] for name in names]
            return [tf.raw_ops.DeepCopy(x=t) if i in copied else tf.identity(t) for i, t in enumerate(given)]

    # Not by `tf.function`, which adds further control edges, and looks at each op for them.
    return tf.compat.v1.wrap_function(body, [tf.TensorSpec(t.shape, t.dtype) for t in trace.arguments])


def data_sizes(capture: Capture) -> Callable[[Sequence[tf.Tensor]], tuple[int, ...]] | None:
    """A function that gives the sizes that depend on the data of a flat batch and decide on the bytes of a step; or None.

    They are the elements of tensors that only the batch determines, such as padded rows, and that the model reads.
    """
    alone: set[str] = set()
    for op in capture.trace.ops:
        pure = not op.op_def.is_stateful or op.type.startswith("LookupTableFind")
        if pure and all(t.op.name in alone for t in op.inputs):
            alone.add(op.name)
    inputs = [t for chain in capture.members for op in chain if op.name not in alone for t in op.inputs]
    read = [b for t in inputs for b in behind(t, capture.kinds)]
    found = {b.ref(): b for b in read if b.op.name in alone and b.dtype != tf.variant and is_open(b)}
    graph, names = capture.graph, {b.op.name for b in found.values()}
    needed = {o for o, chain in enumerate(capture.members) if any(op.name in names for op in chain)}
    for o in range(max(needed, default=-1), -1, -1):
        needed |= {graph.producer[v] for v in graph.ops[o].inputs} if o in needed else set()
    function = build_function(capture, sorted(needed), list(found.values()))
    return (lambda batch: tuple(t.shape.num_elements() or 0 for t in function(*batch))) if found else None


def _copied_outputs(capture: Capture) -> set[int]:
    """Positions of the outputs that are copied when everything else of the step is freed.

    An output such as the loss exists until the next step has replaced it. Allocated in the middle of a step, it leaves other free
    chunks to each next step (docs/decisions/0014). Copies are allocated at the addresses of those of the step before the last.

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
    """Writes the computations of a plan as the nodes of a graph, each of which waits for the one before it."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.nodes: list[Any] = []
        self.waits: list[str] = []  # the previous computation
        self.inputs: set[str] = set()  # names of the tensors of the batch, or captured from outside, that a node reads
        self.latest: dict[str, str] = {}  # op of the trace -> its latest computation; for a read, the only one
        self._traced = {node.name: node for node in capture.trace.function.graph.as_graph_def().node}
        self._runs: Counter[int] = Counter()
        self._names: set[str] = set()  # of the nodes
        self._views: dict[tuple[str, ...], str] = {}

    def compute(self, o: int) -> None:
        """Append a computation of an op of the graph."""
        times = self._runs[o]
        self._runs[o] += 1
        for op in self.capture.members[o]:
            if op.type == "AssignVariableOp" and op.inputs[1].dtype in _COPIED and op.inputs[1].shape.is_fully_defined():
                self._assign_in_place(op)
            else:
                self._add(op, op.name if not times else f"{op.name}{REMAT}{times}", chained=True)

    def tensor(self, tensor: tf.Tensor) -> str:
        """The name of the tensor that stands for a traced tensor at this point of the plan."""
        op, index = tensor.op, tensor.value_index
        kind = self.capture.kinds[op.name]
        if kind == "input":
            self.inputs.add(tensor.name)
            return tensor.name
        if kind == "constant":
            return self._constant(tensor)
        if kind == "view" and op.type in IDENTITIES:
            return self.tensor(op.inputs[index])
        if kind == "view":
            return f"{self._view(op)}:{index}"
        if kind == "read" and op.name not in self.latest and op.name not in self.capture.snapshot_reads:
            # A variable is read at its first use: no op changes it between then and its last use.
            self._add(op, op.name, chained=True)
        return f"{self.latest[op.name]}:{index}"

    def _add(self, op: tf.Operation, name: str, *, chained: bool = False) -> str:
        inputs = [self.tensor(t) for t in op.inputs]
        kinds = self.capture.kinds
        alone = all(kinds[base_tensor(t, kinds).op.name] == "constant" for t in op.inputs)
        if inputs and alone and kinds[op.name] != "constant" and op.type not in EMPTY_LISTS:  # whose shape must be known
            inputs[0] = self._not_folded(inputs[0], op.inputs[0].dtype)
        traced = self._traced[op.name]
        # `_class` asks for colocation with a node whose name may have changed.
        attributes = {key: value for key, value in traced.attr.items() if key != "_class"}
        if op.type in LOOPS:
            # Up to ten iterations overlap by default, as threads happen to run: the bytes of one LSTM varied from 0.6 to 1.5 MB.
            attributes["parallel_iterations"] = tf.compat.v1.AttrValue(i=1)
        if chained:
            self.latest[op.name] = name
        return self._node(op.type, name, inputs, attributes, chained=chained, device=traced.device)

    def _node(
        self, kind: str, name: str, inputs: Sequence[str], attributes: Any, *, chained: bool = False, device: str = ""
    ) -> str:
        """Append a node, unless it is there already; a chained one waits for the previous computation. Returns its name."""
        if name not in self._names:
            waits = [f"^{before}" for before in self.waits] if chained else []
            self.nodes.append(tf.compat.v1.NodeDef(op=kind, name=name, input=[*inputs, *waits], attr=attributes, device=device))
            self.waits = [name] if chained else self.waits
            self._names.add(name)
        return name

    def _assign_in_place(self, op: tf.Operation) -> None:
        """Assign a variable by overwriting its current buffer.

        `AssignVariableOp` adopts the buffer of the new value (tensorflow/core/kernels/resource_variable_ops.cc). Variables and
        the free chunks between them then move from step to step (docs/decisions/0014). Instead,

        1. `AssignAddVariableOp` adds in place; it copies the variable first if another tensor references its buffer;
        2. `InplaceUpdate` (tensorflow/core/kernels/inplace_ops.cc) overwrites the sum, as one row, with the new value;
        3. `AssignVariableOp` assigns the variable the buffer that it has already, or, if the variable is in copy-on-read
           mode, the copy.
        """
        handle, new = (self.tensor(t) for t in op.inputs)
        name, kind = op.name, tf.compat.v1.AttrValue(type=op.inputs[1].dtype.as_datatype_enum)
        axis, first = (self._written(f"{IMPORTED}_{i}", tf.constant(value)) for i, value in enumerate((0, [0])))
        add = functools.partial(self._node, device=self._traced[name].device)
        add("AssignAddVariableOp", f"{name}__own", [handle, new], {"dtype": kind}, chained=True)
        read = add("ReadVariableOp", f"{name}__read", [handle], {"dtype": kind}, chained=True)
        rows = [add("ExpandDims", f"{name}__row{i}", [t, axis], {"T": kind}) for i, t in enumerate((read, new))]
        row = add("InplaceUpdate", f"{name}__written", [rows[0], first, rows[1]], {"T": kind})
        dims = tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(i=[0]))
        written = add("Squeeze", f"{name}__whole", [row], {"T": kind, "squeeze_dims": dims})
        self.latest[name] = add("AssignVariableOp", name, [handle, written], {"dtype": kind}, chained=True)

    def _constant(self, tensor: tf.Tensor) -> str:
        """A constant, whose op is written once, as its values if shapes give them."""
        op, index = tensor.op, tensor.value_index
        if (values := static_shape_values(op)) is not None:
            return self._written(f"{op.name}__{index}", values[index])
        if op.name not in self.latest:
            self.latest[op.name] = self._add(op, op.name)
        return f"{op.name}:{index}"

    def _written(self, name: str, value: Any) -> str:
        """A node of a constant value."""
        proto = tf.make_tensor_proto(value)
        attributes = {"dtype": tf.compat.v1.AttrValue(type=proto.dtype), "value": tf.compat.v1.AttrValue(tensor=proto)}
        return f"{self._node('Const', name, (), attributes)}:0"

    def _not_folded(self, tensor: str, dtype: tf.DType) -> str:
        """A constant that the runtime does not fold.

        Constant folding (tensorflow/core/common_runtime/constant_folding.cc) computes ops with constant inputs once,
        up to 10 MiB each, and keeps the results as long as the function exists: the plan's frees would release nothing, and
        the bytes would not be counted. This pass is not part of Grappler.
        """
        kind, name = tf.compat.v1.AttrValue(type=dtype.as_datatype_enum), f"{tensor.replace(':', '__')}__kept"
        return f"{self._node('GuaranteeConst', name, [tensor], {'T': kind})}:0"  # not optimizable; forwards its input

    def _view(self, op: tf.Operation) -> str:
        """A view of the latest computation of the tensor whose buffer it shares."""
        key = (op.name, *map(self.tensor, op.inputs))
        if key not in self._views:
            self._views[key] = self._add(op, f"{op.name}__view{len(self._views)}")
        return self._views[key]
