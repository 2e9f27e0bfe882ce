"""Properties of TensorFlow ops: views, reads of variables, effects, buffer forwarding, bytes and estimated cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from checkmate.cost.store import OpCost
from checkmate.tf2._compat import stateful_kinds

Kind = Literal["input", "constant", "control", "view", "read", "effect", "op"]
"""Role of an op of the traced step.

``input``: an argument or a captured tensor; ``constant``: known before the step, computed outside the plan; ``control``:
carries control edges only; ``view``: its output shares its input's buffer; ``read``: reads a variable without copying;
``effect``: runs exactly once; ``op``: can be recomputed.
"""

VIEWS = frozenset({"EnsureShape", "ExpandDims", "Identity", "IdentityN", "PreventGradient", "Reshape", "Squeeze", "StopGradient"})
"""Ops whose kernels return the input's buffer as the output."""

IDENTITIES = frozenset({"EnsureShape", "Identity", "IdentityN", "PreventGradient", "StopGradient"})
"""Views that leave shape and type unchanged: the function of a plan omits them."""

READERS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"})
"""Ops that take a variable's handle and do not change the variable."""

EMPTY_LISTS = frozenset({"EmptyTensorList", "TensorListReserve"})
"""Ops that make tensor lists without tensors."""

MOVES = frozenset({"ReverseV2", "Transpose"})
"""Ops that move the elements of a tensor, as Keras does before it makes a list of the steps of a sequence."""

LOOPS = frozenset({"While", "StatelessWhile"})
"""Loops of TensorFlow 2."""

OPAQUE = LOOPS | {"If", "Case", "StatelessIf", "StatelessCase", "PartitionedCall", "StatefulPartitionedCall"}
"""Loops, branches and calls: each is one op of the graph, with everything inside."""

KERNEL_RANDOM = frozenset(
    {"Multinomial", "ParameterizedTruncatedNormal", "RandomGamma", "RandomPoissonV2", "RandomShuffle"}
    | {"RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal"}
)
"""Random ops whose generator state is in the kernel (GuardedPhiloxRandom) and cannot be saved and restored."""

FORWARDS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        ("Add", "AddV2", "Sub", "Mul", "RealDiv", "DivNoNan", "Maximum", "Minimum", "Pow", "SquaredDifference"), (0, 1)
    ),
    **dict.fromkeys(("EluGrad", "LeakyReluGrad", "ReluGrad", "Relu6Grad", "RsqrtGrad", "SeluGrad", "SigmoidGrad"), (0, 1)),
    **dict.fromkeys(("SoftplusGrad", "SoftsignGrad", "SqrtGrad", "TanhGrad", "Xdivy", "Xlogy"), (0, 1)),
    **dict.fromkeys(("Abs", "Cos", "Erf", "Exp", "Expm1", "Log", "Log1p", "Neg", "Reciprocal", "Rsqrt", "Sigmoid", "Sign"), (0,)),
    **dict.fromkeys(("Sin", "Sqrt", "Square", "Tanh", "Elu", "LeakyRelu", "Relu", "Relu6", "Selu", "Softplus", "Softsign"), (0,)),
    **dict.fromkeys(("BiasAdd", "ClipByValue", "LogSoftmax", "Softmax"), (0,)),
    "AddN": (0, 1, 2, 3, 4, 5, 6, 7),
    "Select": (1, 2),
    "SelectV2": (1, 2),
    "SparseSoftmaxCrossEntropyWithLogits": (0,),
    "SoftmaxCrossEntropyWithLogits": (0,),
}
"""Positions of the inputs whose buffer a kernel reuses for its output if nothing else references it.

Kernels do this with ``forward_input_or_allocate_output`` (tensorflow/core/framework/op_kernel.h).
``tests/tf2/test_op_properties.py`` checks entries against TensorFlow's trace of allocations.
"""

FORWARDED_TO = {"SoftmaxCrossEntropyWithLogits": 1, "SparseSoftmaxCrossEntropyWithLogits": 1}
"""Position of this output, if it is not the first."""

CONSTANT_BYTES = 4096
"""Results of an op on constants that are no larger are constants too (shapes, axes, scalars)."""

_SHAPES = frozenset({"Rank", "Shape", "ShapeN", "Size"})
_RESERVE = frozenset({"FusedBatchNormV3", "FusedBatchNormGradV3"})  # their untyped reserve space is empty on the CPU


def classify(ops: Sequence[tf.Operation]) -> dict[str, Kind]:
    """The kind of every op, by name, of ops in the order in which they were traced."""
    kinds: dict[str, Kind] = {}
    for op in ops:
        kinds[op.name] = _kind(op, kinds)
    return kinds


def static_shape_values(op: tf.Operation) -> list[np.ndarray] | None:
    """Outputs of a shape op, if the shapes of its inputs are static; None for other ops. Its inputs need not be computed."""
    if op.type not in _SHAPES or not all(t.shape.is_fully_defined() for t in op.inputs):
        return None
    if op.type == "Size":
        found = [op.inputs[0].shape.num_elements()]
    elif op.type == "Rank":
        found = [op.inputs[0].shape.rank]
    else:
        found = [t.shape.as_list() for t in op.inputs]
    return [np.array(f, out.dtype.as_numpy_dtype) for f, out in zip(found, op.outputs, strict=True)]


def tensor_bytes(tensor: tf.Tensor) -> int:
    """Bytes of a tensor by its static shape.

    Ops on strings lose the number of examples: an unknown first dimension is taken to be that of the batch. Another size that
    depends on data is taken to be the size of the producing op's largest input.
    """
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    shape = tensor.shape
    if shape.rank and shape[0] is None:
        shape = tf.TensorShape([_examples(tensor.graph), *shape[1:]])
    if (count := shape.num_elements()) is not None:
        return count * tensor.dtype.size
    if tensor.op.type in _RESERVE:
        return 0
    return max((tensor_bytes(t) for t in tensor.op.inputs), default=0)


def is_open(tensor: tf.Tensor) -> bool:
    """Whether the bytes of a tensor are known only when a step runs: a tensor list, or a size that depends on the data."""
    empty = tensor.dtype in (tf.resource, tf.string) or tensor.op.type in _RESERVE
    return tensor.dtype == tf.variant or not (empty or tensor.shape.is_fully_defined())


def _examples(graph: Any) -> int | None:
    """Number of examples in the batch of a traced step: the first dimension of its first input that has one."""
    shapes = (t.shape.as_list() for t in graph.inputs if t.dtype != tf.resource and t.shape.rank)
    return next((shape[0] for shape in shapes if shape[0] is not None), None)


def output_bytes(op: tf.Operation) -> int:
    """Bytes of all outputs of an op."""
    return sum(map(tensor_bytes, op.outputs))


def handles(op: tf.Operation) -> tuple[str, ...]:
    """Names of the resource handles (variables) among the inputs of an op."""
    return tuple(t.op.name for t in op.inputs if t.dtype == tf.resource)


def estimated(op: tf.Operation) -> OpCost:
    """Cost of an op, estimated from the bytes that it reads and writes; its workspace is taken as 0."""
    moved = output_bytes(op) + sum(tensor_bytes(t) for t in op.inputs)
    # 8 GB/s as one core of a CPU moves them, and a microsecond so that no op is free: ratios of costs decide a plan.
    return OpCost(1000 + math.ceil(moved * 1e9 / 8e9), 0)


def _kind(op: tf.Operation, kinds: dict[str, Kind]) -> Kind:
    if op.type == "Placeholder":
        return "input"
    if op.type == "NoOp":
        return "control"
    if op.type == "ReadVariableOp":
        return "read"
    if op.op_def.is_stateful and not (op.type in LOOPS and stateful_kinds(op) <= READERS):
        return "effect"
    if op.type == "Const" or static_shape_values(op) is not None:
        return "constant"
    variant = any(t.dtype == tf.variant for t in op.outputs)
    if not variant and all(kinds[t.op.name] == "constant" for t in op.inputs) and output_bytes(op) <= CONSTANT_BYTES:
        return "constant"
    return "view" if op.type in VIEWS and not variant else "op"
