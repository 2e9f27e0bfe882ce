"""Facts about TensorFlow ops: which compute, which only rename, which must run exactly once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import tensorflow as tf

Kind = Literal["input", "constant", "control", "view", "read", "effect", "op"]
"""What becomes of an op of the traced step.

``input``: an argument or a captured tensor; ``constant``: known before the step, runs outside the plan; ``control``:
carries control edges only; ``view``: shares its input's buffer; ``read``: reads a variable without copying;
``effect``: runs exactly once; ``op``: may be computed again.
"""

VIEWS = frozenset({"EnsureShape", "ExpandDims", "Identity", "IdentityN", "PreventGradient", "Reshape", "Squeeze", "StopGradient"})
"""Their kernels hand on the input's buffer."""

SAME = frozenset({"EnsureShape", "Identity", "IdentityN", "PreventGradient", "StopGradient"})
"""Views that do not even change the shape: the function that runs a plan has none."""

READERS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"})
"""Take a variable's handle and leave the variable as it is."""

CONTROL_FLOW = frozenset({"If", "While", "Case", "StatelessIf", "StatelessWhile", "StatelessCase"})
CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
KERNEL_RANDOM = frozenset(
    {
        "Multinomial",
        "RandomGamma",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
    }
    | {"ParameterizedTruncatedNormal", "TruncatedNormal"}
)
"""Draw from a stream that the kernel itself holds: no variable to save and restore."""

FORWARDS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Add", "AddV2", "Sub", "Mul", "RealDiv", "Div", "DivNoNan", "MulNoNan", "Maximum", "Minimum"), (0, 1)),
    **dict.fromkeys(("Pow", "SquaredDifference", "FloorDiv", "Xdivy", "Xlogy", "Atan2"), (0, 1)),
    **dict.fromkeys(("Abs", "Ceil", "Erf", "Erfc", "Exp", "Expm1", "Floor", "Log", "Log1p", "Neg", "Reciprocal", "Rint"), (0,)),
    **dict.fromkeys(("Round", "Rsqrt", "Sigmoid", "Sign", "Sqrt", "Square", "Tanh", "Sin", "Cos", "Softplus", "Softsign"), (0,)),
    **dict.fromkeys(("Relu", "Relu6", "Elu", "Selu", "LeakyRelu", "Softmax", "LogSoftmax", "BiasAdd"), (0,)),
    **dict.fromkeys(("ReluGrad", "Relu6Grad", "EluGrad", "SeluGrad", "LeakyReluGrad", "SoftplusGrad"), (0, 1)),
    **dict.fromkeys(("SigmoidGrad", "TanhGrad", "RsqrtGrad", "SqrtGrad", "ReciprocalGrad", "InvGrad"), (0, 1)),
    "LogicalAnd": (0, 1),
    "LogicalOr": (0, 1),
    "LogicalNot": (0,),
    "AddN": (0, 1, 2, 3, 4, 5, 6, 7),
    "SelectV2": (1, 2),
    "MaxPoolGrad": (0,),
}
"""Inputs whose buffer a kernel takes for its output if nobody else holds it. See ``tests/tf2/test_op_properties.py``."""

FORWARDS_TO_SECOND = frozenset({"SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"})
"""Take their first input's buffer for their second output, the gradient."""

BORROWS = {"MaxPoolGrad": 1}
"""Input whose buffer a kernel takes as workspace if nobody else holds it."""

_SHAPES = frozenset({"Rank", "Shape", "ShapeN", "Size"})
SMALL = 4096
"""What is computed from constants alone and no larger is kept for good: shapes, axes, scalars."""
_RESERVE = frozenset({"FusedBatchNormV3", "FusedBatchNormGradV3"})  # their untyped reserve space is empty on the CPU


def classify(ops: Sequence[tf.Operation]) -> dict[str, Kind]:
    """The kind of every op, by name. The ops are in the order in which they were traced."""
    kinds: dict[str, Kind] = {}
    for op in ops:
        kinds[op.name] = _kind(op, kinds)
    return kinds


def static_values(op: tf.Operation) -> list[np.ndarray] | None:
    """What a shape op gives, where the shapes that it asks for are static: its inputs need not be there for it."""
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

    A size that depends on data counts as much as the largest input of the op that makes it.
    """
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    count = tensor.shape.num_elements()
    if count is not None:
        return count * tensor.dtype.size
    if tensor.op.type in _RESERVE:
        return 0
    return max((tensor_bytes(t) for t in tensor.op.inputs), default=0)


def new_bytes(op: tf.Operation) -> int:
    """Bytes of all outputs of an op."""
    return sum(map(tensor_bytes, op.outputs))


def recomputable(op: tf.Operation) -> bool:
    """Whether an op of kind ``op`` may run again: lists of tensors have bytes that no shape tells."""
    return not any(t.dtype == tf.variant for t in (*op.inputs, *op.outputs))


def handles(op: tf.Operation) -> tuple[str, ...]:
    """Names of the resources that an op takes."""
    return tuple(t.op.name for t in op.inputs if t.dtype == tf.resource)


def estimate_ns(op: tf.Operation, bytes_per_s: float = 8e9) -> int:
    """Cost of what cannot be run alone, from its bytes."""
    moved = new_bytes(op) + sum(tensor_bytes(t) for t in op.inputs)
    return 1000 + math.ceil(moved * 1e9 / bytes_per_s)


def _kind(op: tf.Operation, kinds: dict[str, Kind]) -> Kind:
    if op.type == "Placeholder":
        return "input"
    if op.type == "NoOp":
        return "control"
    if op.type == "ReadVariableOp":
        return "read"
    if op.op_def.is_stateful:
        return "effect"
    if op.type == "Const" or static_values(op) is not None:
        return "constant"
    variant = any(t.dtype == tf.variant for t in op.outputs)
    if not variant and all(kinds[t.op.name] == "constant" for t in op.inputs) and new_bytes(op) <= SMALL:
        return "constant"
    return "view" if op.type in VIEWS and not variant else "op"
