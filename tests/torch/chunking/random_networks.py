"""Random small networks of the ops that real ones are made of, for the tests of regions.

A network is a list of steps on a growing list of tensors. It is written while it runs: a step that PyTorch refuses for the
tensors at hand is dropped. All choices are those of one `random.Random`, so that Hypothesis can make and shrink them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

MOST_ELEMENTS = 1 << 15
CLASSES = 12
Function = Callable[..., Any]


@dataclass
class Network:
    """A function of leaves: inputs, parameters and buffers.

    Attributes:
        leaves: Their values. Those that are floating-point and no buffer require gradients.
        steps: Functions with the places of their arguments among the tensors so far.
        losses: Places of scalars, whose sum is the loss.
        names: What each step is, for a report.
    """

    leaves: list[torch.Tensor] = field(default_factory=list)
    steps: list[tuple[Function, tuple[int, ...]]] = field(default_factory=list)
    losses: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def __call__(self, *leaves: torch.Tensor) -> torch.Tensor:
        made = [*leaves]
        for function, places in self.steps:
            result = function(*(made[place] for place in places))
            made.extend(result if isinstance(result, (tuple, list)) else (result,))
        return sum(made[place].float().sum() for place in self.losses)  # type: ignore[return-value]


class _Writer:
    """Writes a network; ``sample`` holds the values that its tensors have, leaves first."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.dtype = rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
        self.leaves: list[torch.Tensor] = []
        self.steps: list[tuple[Function, tuple[Any, ...], str, int]] = []
        self.made: list[tuple[torch.Tensor, Any]] = []
        """Tensors that steps may read, each with its address: a leaf's number, or that of a step and its result."""

    def leaf(self, value: torch.Tensor) -> tuple[torch.Tensor, Any]:
        self.leaves.append(value)
        return value, ("leaf", len(self.leaves) - 1)

    def parameter(self, *shape: int) -> tuple[torch.Tensor, Any]:
        value = torch.empty(shape, dtype=self.dtype).normal_(0, 1 / math.sqrt(max(1, math.prod(shape[1:]))))
        same = [(t, a) for t, a in map(self._leaf, range(len(self.leaves))) if _parameter(t) and t.shape == value.shape]
        if same and self.rng.random() < 0.3:  # tied
            return self.rng.choice(same)
        if len(shape) == 2 and self.rng.random() < 0.3:  # a transposed layout
            value = value.t().contiguous().t()
        return self.leaf(value.requires_grad_())

    def _leaf(self, index: int) -> tuple[torch.Tensor, Any]:
        return self.leaves[index], ("leaf", index)

    def step(self, function: Function, *args: tuple[torch.Tensor, Any], name: str) -> list[tuple[torch.Tensor, Any]]:
        """Add a step if it runs; returns its results."""
        try:
            with torch.no_grad():
                result = function(*(value.clone() if value.is_leaf and not value.requires_grad else value for value, _ in args))
        except (RuntimeError, IndexError, ValueError, NotImplementedError):
            return []
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if not results or any(not 0 < t.numel() <= MOST_ELEMENTS or t.dim() > 6 for t in results):
            return []
        self.steps.append((function, tuple(address for _, address in args), name, len(results)))
        made = [(t, (len(self.steps) - 1, i)) for i, t in enumerate(results)]
        self.made += [(t, a) for t, a in made if t.is_floating_point()]
        return made

    def network(self) -> Network:
        """The network, with places instead of addresses."""
        place: dict[Any, int] = {("leaf", i): i for i in range(len(self.leaves))}
        net = Network(self.leaves)
        count = len(place)
        reached: set[Any] = set()
        for number, (function, args, name, results) in enumerate(self.steps):
            net.steps.append((function, tuple(place[a] for a in args)))
            net.names.append(f"{name}({', '.join(str(place[a]) for a in args)})")
            reached.update(args)
            place.update(((number, i), count + i) for i in range(results))
            count += results
        net.losses = [place[a] for t, a in self.made if t.dim() == 0 and a not in reached and a[0] != "leaf"]
        return net


def _parameter(value: torch.Tensor) -> bool:
    return value.requires_grad and value.dim() > 0


def random_network(rng: random.Random, steps: int = 10) -> Network:
    """A network of some random steps.

    Args:
        rng: Makes all choices.
        steps: Most steps before the loss.
    """
    torch.manual_seed(rng.randrange(1 << 16))
    writer = _Writer(rng)
    _begin(writer)
    for _ in range(rng.randint(1, steps)):
        # Mostly the newest tensor, so that networks are deep; at times an older one, so that they have skips.
        x = writer.made[-1] if rng.random() < 0.75 else rng.choice(writer.made)
        rng.choice(STEPS)(writer, x)
    _end(writer)
    if not any(leaf.requires_grad for leaf in writer.leaves):
        next(leaf for leaf in writer.leaves if leaf.is_floating_point()).requires_grad_()
    return writer.network()


def _begin(w: _Writer) -> None:
    kind = w.rng.choice(["tokens", "sequences", "rows", "images"])
    n, length, width = w.rng.choice([1, 2, 3, 4, 6]), w.rng.choice([4, 6, 8, 12, 16]), w.rng.choice([4, 6, 8, 16])
    if kind == "tokens":
        table = w.parameter(CLASSES, width)
        ids = w.leaf(torch.randint(CLASSES, (n, length)))
        w.step(lambda ids, table: F.embedding(ids, table), ids, table, name="embedding")
        return
    shape = {"sequences": (n, length, width), "rows": (n * length, width), "images": (n, width, length, 8)}[kind]
    x = torch.randn(shape, dtype=w.dtype)
    channels_last = kind == "images" and w.rng.random() < 0.4
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    elif w.rng.random() < 0.4:
        order = [*range(x.dim())]
        w.rng.shuffle(order)
        x = x.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])
    # The backward of a group norm of images in this layout ends the process where they need no gradient (torch 2.13.0).
    value, address = w.leaf(x.requires_grad_(channels_last or w.rng.random() < 0.5))
    w.made.append((value, address))
    w.step(lambda x: x * 1.5, (value, address), name="scale")


def _end(w: _Writer) -> None:
    """A loss of the newest tensor, and perhaps of another."""
    for x in [w.made[-1], *([w.rng.choice(w.made)] if w.rng.random() < 0.2 else [])]:
        value = x[0]
        kind = w.rng.choice(["square", "sum", "cross entropy", "mse", "logits"])
        if kind == "cross entropy" and value.dim() >= 2 and value.shape[-1] > 1:
            head = w.parameter(CLASSES, value.shape[-1])
            labels = torch.randint(CLASSES, (math.prod(value.shape[:-1]),))
            if w.rng.random() < 0.5:
                labels[::3] = -100
                labels[0] = 1
            smoothing, reduction = w.rng.choice([0.0, 0.0, 0.1]), w.rng.choice(["mean", "mean", "sum"])

            def entropy(x: Any, head: Any, labels: Any, smoothing: float = smoothing, reduction: str = reduction) -> Any:
                scores = F.linear(x, head.to(x.dtype)).flatten(0, -2).float()
                return F.cross_entropy(scores, labels, label_smoothing=smoothing, reduction=reduction)

            w.step(entropy, x, head, w.leaf(labels), name=f"cross_entropy {reduction} {smoothing}")
        elif kind == "mse":
            target = w.leaf(torch.randn(value.shape, dtype=value.dtype))
            w.step(lambda x, y: F.mse_loss(x, y), x, target, name="mse_loss")
        elif kind == "logits":
            target = w.leaf(torch.rand(value.shape, dtype=value.dtype))
            w.step(lambda x, y: F.binary_cross_entropy_with_logits(x, y), x, target, name="bce")
        elif kind == "sum":
            w.step(lambda x: x.tanh().sum(), x, name="tanh sum")
        if w.made[-1][0].dim():
            w.step(lambda x: x.float().square().mean(), x, name="square mean")


Maker = Callable[[_Writer, tuple[torch.Tensor, Any]], Any]
STEPS: list[Maker] = []


def _maker(weight: int = 1) -> Callable[[Maker], Maker]:
    """Have a step chosen as often as ``weight`` says."""

    def add(make: Maker) -> Maker:
        STEPS.extend([make] * weight)
        return make

    return add


@_maker(4)
def _linear(w: _Writer, x: Any) -> None:
    if x[0].dim() < 2:
        return
    weight = w.parameter(w.rng.choice([4, 8, 16, 24]), x[0].shape[-1])
    if w.rng.random() < 0.5:
        w.step(
            lambda x, a, b: F.linear(x, a.to(x.dtype), b.to(x.dtype)), x, weight, w.parameter(len(weight[0])), name="linear+bias"
        )
    else:
        w.step(lambda x, a: F.linear(x, a.to(x.dtype)), x, weight, name="linear")


@_maker()
def _mlp(w: _Writer, x: Any) -> None:
    width = x[0].shape[-1] if x[0].dim() > 1 else 0
    if width < 2:
        return
    up, down = w.parameter(4 * width, width), w.parameter(width, 4 * width)

    def mlp(x: Any, up: Any, down: Any) -> Any:
        return x + F.linear(F.gelu(F.linear(x, up.to(x.dtype))), down.to(x.dtype))

    w.step(mlp, x, up, down, name="mlp")


@_maker(3)
def _pointwise(w: _Writer, x: Any) -> None:
    name = w.rng.choice(["gelu", "relu", "silu", "tanh", "sigmoid", "softplus", "leaky_relu", "hardswish", "elu", "glu", "relu6"])
    function = getattr(F, name) if hasattr(F, name) else getattr(torch, name)
    w.step(lambda x: function(x), x, name=name)


@_maker(2)
def _norm(w: _Writer, x: Any) -> None:
    last = w.rng.choice([1, 1, 1, 2])
    shape = x[0].shape[-last:]
    if len(shape) < last or math.prod(shape) < 2:
        return
    if w.rng.random() < 0.3:
        w.step(lambda x: F.layer_norm(x, shape), x, name="layer_norm")
    elif w.rng.random() < 0.4:
        w.step(lambda x, a: F.rms_norm(x, shape, a.to(x.dtype)), x, w.parameter(*shape), name="rms_norm")
    else:
        a, b = w.parameter(*shape), w.parameter(*shape)
        w.step(lambda x, a, b: F.layer_norm(x, shape, a.to(x.dtype), b.to(x.dtype)), x, a, b, name="layer_norm+affine")


@_maker(2)
def _softmax(w: _Writer, x: Any) -> None:
    dim = w.rng.randrange(-1, x[0].dim()) if x[0].dim() else 0
    name = w.rng.choice(["softmax", "log_softmax", "logsumexp", "cumsum"])
    function = getattr(torch, name)
    w.step(lambda x: function(x, dim), x, name=f"{name} {dim}")


@_maker(2)
def _residual(w: _Writer, x: Any) -> None:
    others = [y for y in w.made if y[0].shape == x[0].shape]
    if w.rng.random() < 0.2:
        others = [y for y in w.made if y[0].dim() <= x[0].dim()]  # perhaps broadcast
    y = w.rng.choice(others)
    function = w.rng.choice([torch.add, torch.mul, torch.sub, torch.maximum])
    w.step(lambda x, y: function(x, y), x, y, name=function.__name__)


@_maker(3)
def _permute(w: _Writer, x: Any) -> None:
    order = [*range(x[0].dim())]
    w.rng.shuffle(order)
    if w.rng.random() < 0.5:
        w.step(lambda x: x.permute(order), x, name=f"permute {order}")
    else:
        w.step(lambda x: x.permute(order).contiguous(), x, name=f"permuted copy {order}")


@_maker(3)
def _reshape(w: _Writer, x: Any) -> None:
    shape = list(x[0].shape)
    if len(shape) > 1 and w.rng.random() < 0.5:
        d = w.rng.randrange(len(shape) - 1)
        shape[d : d + 2] = [shape[d] * shape[d + 1]]
    else:
        d = w.rng.randrange(len(shape)) if shape else 0
        halves = [n for n in (2, 3, 4) if shape and shape[d] % n == 0]
        if not halves:
            return
        n = w.rng.choice(halves)
        shape[d : d + 1] = w.rng.choice([[n, shape[d] // n], [shape[d] // n, n]])
    w.step(lambda x: x.reshape(shape), x, name=f"reshape {shape}")


@_maker(2)
def _part(w: _Writer, x: Any) -> None:
    """A part of a tensor, or several."""
    if not x[0].dim():
        return
    d = w.rng.randrange(x[0].dim())
    n = x[0].shape[d]
    kind = w.rng.choice(["slice", "select", "chunk", "split", "unbind", "narrow"])
    if kind == "slice":
        step, start = w.rng.choice([1, 1, 2]), w.rng.randrange(n)
        w.step(lambda x: x[(slice(None),) * d + (slice(start, None, step),)], x, name=f"slice {d} {start} {step}")
    elif kind == "select":
        i = w.rng.randrange(-1, n)
        w.step(lambda x: x.select(d, i), x, name=f"select {d} {i}")
    elif kind == "chunk":
        w.step(lambda x: x.chunk(2, d), x, name=f"chunk {d}")
    elif kind == "split" and n > 1:
        size = w.rng.randrange(1, n)
        w.step(lambda x: x.split([size, n - size], d), x, name=f"split {d} {size}")
    elif kind == "unbind" and n <= 4:
        w.step(lambda x: x.unbind(d), x, name=f"unbind {d}")


@_maker(2)
def _cat(w: _Writer, x: Any) -> None:
    if not x[0].dim():
        return
    d, function = w.rng.randrange(x[0].dim()), w.rng.choice([torch.cat, torch.cat, torch.stack])
    fits = [y for y in w.made if y[0].dim() == x[0].dim() and y[0].dtype == x[0].dtype]
    y = w.rng.choice(
        [y for y in fits if all(a == b or i == d for i, (a, b) in enumerate(zip(y[0].shape, x[0].shape, strict=True)))]
    )
    w.step(lambda x, y: function([x, y], d), x, y, name=f"{function.__name__} {d}")


@_maker(2)
def _reduce(w: _Writer, x: Any) -> None:
    if not x[0].dim():
        return
    d, keep = w.rng.randrange(x[0].dim()), w.rng.random() < 0.6
    name = w.rng.choice(["sum", "mean", "amax", "logsumexp", "std", "var", "norm"])
    function = getattr(torch, name)
    if w.rng.random() < 0.5:
        w.step(lambda x: x - function(x, dim=d, keepdim=True), x, name=f"minus {name} {d}")
    else:
        w.step(lambda x: function(x, dim=d, keepdim=keep), x, name=f"{name} {d} {keep}")


@_maker(2)
def _attention(w: _Writer, x: Any) -> None:
    if x[0].dim() < 3 or x[0].shape[-1] % 2:
        return
    heads = w.rng.choice([1, 2])
    width = x[0].shape[-1]
    weight = w.parameter(3 * width, width)
    fused, causal, masked = w.rng.random() < 0.5, w.rng.random() < 0.4, w.rng.random() < 0.3

    def attend(x: Any, weight: Any) -> Any:
        x = x.flatten(0, -3)
        n, length, width = x.shape
        q, k, v = F.linear(x, weight.to(x.dtype)).view(n, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind(0)
        if fused:
            mask = torch.ones(length, length, dtype=torch.bool).tril() if masked and not causal else None
            mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        else:
            scores = q @ k.transpose(-1, -2) / 8**0.5
            if causal:
                scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -1e9)
            mixed = scores.softmax(-1) @ v
        return mixed.transpose(1, 2).reshape(n, length, width)

    w.step(attend, x, weight, name=f"attention fused={fused} causal={causal} masked={masked} heads={heads}")


@_maker()
def _product(w: _Writer, x: Any) -> None:
    """A product with another tensor of the network."""
    if x[0].dim() < 2:
        return
    y = w.rng.choice([y for y in w.made if y[0].dim() >= 2 and y[0].dtype == x[0].dtype])
    w.step(lambda x, y: x @ y.transpose(-1, -2) / 4, x, y, name="x @ y.T")


@_maker(2)
def _dropout(w: _Writer, x: Any) -> None:
    w.step(lambda x: F.dropout(x, 0.3), x, name="dropout")


@_maker()
def _cast(w: _Writer, x: Any) -> None:
    dtype = w.rng.choice([torch.bfloat16, torch.float32])
    w.step(lambda x: x.to(dtype), x, name=str(dtype))


@_maker(2)
def _indexed(w: _Writer, x: Any) -> None:
    if not x[0].dim():
        return
    d = w.rng.randrange(x[0].dim())
    n = x[0].shape[d]
    kind = w.rng.choice(
        ["index_select", "gather", "flip", "roll", "repeat", "pad", "sort", "topk", "expand", "index_add", "scatter_add"]
    )
    if kind == "index_select":
        w.step(lambda x, i: x.index_select(d, i), x, w.leaf(torch.randint(n, (w.rng.randint(1, 6),))), name=f"index_select {d}")
    elif kind == "gather":
        w.step(lambda x, i: x.gather(d, i), x, w.leaf(torch.randint(n, x[0].shape)), name=f"gather {d}")
    elif kind == "scatter_add":
        w.step(
            lambda x, i: torch.zeros_like(x).scatter_add(d, i, x),
            x,
            w.leaf(torch.randint(n, x[0].shape)),
            name=f"scatter_add {d}",
        )
    elif kind == "index_add":
        index = w.leaf(torch.randint(3, (n,)))
        shape = [*x[0].shape[:d], 3, *x[0].shape[d + 1 :]]
        w.step(lambda x, i: x.new_zeros(shape).index_add(d, i, x), x, index, name=f"index_add {d}")
    elif kind in ("flip", "roll"):
        w.step(lambda x: x.flip(d) if kind == "flip" else x.roll(1, d), x, name=f"{kind} {d}")
    elif kind == "repeat":
        w.step(lambda x: x.repeat_interleave(2, d), x, name=f"repeat {d}")
    elif kind == "pad":
        w.step(lambda x: F.pad(x, (1, 2)), x, name="pad")
    elif kind == "sort":
        w.step(lambda x: x.sort(d).values, x, name=f"sort {d}")
    elif kind == "topk" and n > 1:
        w.step(lambda x: x.topk(n // 2, d).values, x, name=f"topk {d}")
    elif kind == "expand":
        w.step(lambda x: x.unsqueeze(d).expand(*x.shape[:d], 3, *x.shape[d:]), x, name=f"expand {d}")


@_maker(2)
def _masked(w: _Writer, x: Any) -> None:
    if not x[0].dim():
        return
    shape = [n if w.rng.random() < 0.6 else 1 for n in x[0].shape]
    mask = w.leaf(torch.rand(shape) < 0.3)
    if w.rng.random() < 0.5:
        w.step(lambda x, mask: x.masked_fill(mask, 0.5), x, mask, name="masked_fill")
    else:
        w.step(lambda x, mask: torch.where(mask, x, -x), x, mask, name="where")


def _image(w: _Writer, x: Any) -> Any:
    """A tensor as images: itself, or another with four dimensions."""
    if x[0].dim() == 4:
        return x
    images = [y for y in w.made if y[0].dim() == 4]
    return w.rng.choice(images) if images else None


@_maker(4)
def _convolution(w: _Writer, x: Any) -> None:
    x = _image(w, x)
    if x is None:
        return
    channels, outgoing = x[0].shape[1], w.rng.choice([4, 6, 8])
    kind = w.rng.choice(["plain", "plain", "one", "depthwise", "groups", "transposed", "strided"])
    if kind == "depthwise":
        weight, options = w.parameter(channels, 1, 3, 3), {"groups": channels, "padding": 1}
    elif kind == "groups" and channels % 2 == 0:
        weight, options = w.parameter(outgoing, channels // 2, 3, 3), {"groups": 2, "padding": 1}
    elif kind == "transposed":
        weight, options = w.parameter(channels, outgoing, 2, 2), {"stride": 2}
    elif kind == "one":
        weight, options = w.parameter(outgoing, channels, 1, 1), {}
    else:
        weight, options = w.parameter(outgoing, channels, 3, 3), {"padding": 1, "stride": 2 if kind == "strided" else 1}
    function = F.conv_transpose2d if kind == "transposed" else F.conv2d
    count = weight[0].shape[1 if kind == "transposed" else 0]
    if w.rng.random() < 0.5:
        bias = w.parameter(count)
        w.step(lambda x, a, b: function(x, a.to(x.dtype), b.to(x.dtype), **options), x, weight, bias, name=f"conv+bias {kind}")
    else:
        w.step(lambda x, a: function(x, a.to(x.dtype), **options), x, weight, name=f"conv {kind}")


@_maker(2)
def _image_norm(w: _Writer, x: Any) -> None:
    x = _image(w, x)
    if x is None:
        return
    channels = x[0].shape[1]
    a, b = w.parameter(channels), w.parameter(channels)
    if w.rng.random() < 0.3 and channels % 2 == 0:
        w.step(lambda x, a, b: F.group_norm(x, 2, a.to(x.dtype), b.to(x.dtype)), x, a, b, name="group_norm")
        return
    train, dtype = w.rng.random() < 0.7, w.dtype
    mean, var = w.leaf(torch.zeros(channels, dtype=dtype)), w.leaf(torch.ones(channels, dtype=dtype))

    def norm(x: Any, a: Any, b: Any, mean: Any, var: Any) -> Any:
        return F.batch_norm(x.to(dtype), mean, var, a, b, training=train)

    w.step(norm, x, a, b, mean, var, name=f"batch_norm train={train}")


@_maker(2)
def _resample(w: _Writer, x: Any) -> None:
    x = _image(w, x)
    if x is None:
        return
    kind = w.rng.choice(["max_pool", "avg_pool", "adaptive", "nearest", "bilinear", "shuffle"])
    function: Function = {
        "max_pool": lambda x: F.max_pool2d(x, 2),
        "avg_pool": lambda x: F.avg_pool2d(x, 2),
        "adaptive": lambda x: F.adaptive_avg_pool2d(x, 2),
        "nearest": lambda x: F.interpolate(x, scale_factor=2.0),
        "bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        "shuffle": lambda x: F.pixel_shuffle(x, 2),
    }[kind]
    w.step(function, x, name=kind)
