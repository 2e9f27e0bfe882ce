"""Features of real training steps, each as a model and a loss that can be compiled as one function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.torch.networks import mlp

Forward = Callable[[torch.Tensor], torch.Tensor]
Feature = Callable[[], tuple[nn.Module, Forward]]
FEATURES: dict[str, Feature] = {}
"""Name -> builder of a model with parameters, and of what it computes from a batch of [128, 64]."""

OPEN = {"batch_norm_cumulative"}
"""Features that break the graph by themselves."""


def feature(build: Feature) -> Feature:
    FEATURES[build.__name__] = build
    return build


class Wrapped(nn.Module):
    """Two dense layers around what is to be tested, so that something can be forgotten before and after."""

    def __init__(self, inner: Callable[[torch.Tensor], torch.Tensor], module: nn.Module | None = None) -> None:
        super().__init__()
        self.before, self.after = mlp(2, dropout=0.0), mlp(2, dropout=0.1)
        self.inner, self.held = inner, module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.inner(self.before(x)).reshape(128, 64))


def around(inner: Callable[[torch.Tensor], torch.Tensor], module: nn.Module | None = None) -> tuple[nn.Module, Forward]:
    model = Wrapped(inner, module)
    return model, model.forward


# Random numbers.


@feature
def sdpa_dropout() -> tuple[nn.Module, Forward]:
    def attend(x: torch.Tensor) -> torch.Tensor:
        q = x.view(8, 16, 4, 16).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q.tanh(), q, dropout_p=0.2, is_causal=True).transpose(1, 2)

    return around(attend)


@feature
def noise() -> tuple[nn.Module, Forward]:
    return around(lambda x: x + torch.randn_like(x) * torch.rand(64) + torch.randint(0, 3, (64,)))


@feature
def random_permutation() -> tuple[nn.Module, Forward]:
    return around(lambda x: x[torch.randperm(128)] + x.relu())


@feature
def bernoulli_and_gumbel() -> tuple[nn.Module, Forward]:
    return around(lambda x: x * torch.bernoulli(x.sigmoid()) + F.gumbel_softmax(x, 0.5, hard=True))


@feature
def odd_dropouts() -> tuple[nn.Module, Forward]:
    def drop(x: torch.Tensor) -> torch.Tensor:
        y = F.dropout2d(x.view(8, 16, 8, 8), 0.3).reshape(128, 64)
        return F.rrelu(F.alpha_dropout(y, 0.2) + F.feature_alpha_dropout(x, 0.2), training=True)

    return around(drop)


@feature
def dropout_in_place() -> tuple[nn.Module, Forward]:
    return around(lambda x: F.relu(F.dropout(x * 2, 0.3, inplace=True), inplace=True))


# Statistics and buffers.


def _norm(norm: nn.Module) -> tuple[nn.Module, Forward]:
    return around(lambda x: norm(x.view(8, 8, 16, 8).sigmoid()), norm)


@feature
def batch_norm_cumulative() -> tuple[nn.Module, Forward]:
    return _norm(nn.BatchNorm2d(8, momentum=None))


@feature
def batch_norm_without_weights() -> tuple[nn.Module, Forward]:
    return _norm(nn.BatchNorm2d(8, affine=False))


@feature
def batch_norm_untracked() -> tuple[nn.Module, Forward]:
    return _norm(nn.BatchNorm2d(8, track_running_stats=False))


@feature
def batch_norm_frozen() -> tuple[nn.Module, Forward]:
    return _norm(nn.BatchNorm2d(8).eval())


@feature
def batch_norm_twice() -> tuple[nn.Module, Forward]:
    norm = nn.BatchNorm2d(8)
    return around(lambda x: norm(norm(x.view(8, 8, 16, 8).sigmoid()).tanh()), norm)


@feature
def sync_batch_norm() -> tuple[nn.Module, Forward]:
    return _norm(nn.SyncBatchNorm(8))


@feature
def instance_norm() -> tuple[nn.Module, Forward]:
    return _norm(nn.InstanceNorm2d(8, affine=True, track_running_stats=True))


@feature
def group_norm() -> tuple[nn.Module, Forward]:
    return _norm(nn.GroupNorm(4, 8))


class _Cache(nn.Module):
    seen: torch.Tensor
    mean: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(256, 64))
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.seen[:128].cos() - self.mean
        self.seen[64:192] = x.detach()
        self.mean.lerp_(x.detach().mean(0), 0.1)
        self.count += 1
        return y + self.seen[64:192] * self.mean.sin() / self.count


@feature
def mutated_buffers() -> tuple[nn.Module, Forward]:
    cache = _Cache()
    return around(cache, cache)


@feature
def mutated_input() -> tuple[nn.Module, Forward]:
    model = mlp(3)

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        y = model(x.sin())
        x.mul_(0.5).clamp_(-1, 1)
        return model(x) + y

    return model, forward


@feature
def spectral_norm() -> tuple[nn.Module, Forward]:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64))
    return around(lambda x: layer(x).tanh(), layer)


@feature
def weight_norm() -> tuple[nn.Module, Forward]:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
    return around(lambda x: layer(x).tanh(), layer)


# Parameters.


@feature
def tied_embedding() -> tuple[nn.Module, Forward]:
    table = nn.Embedding(100, 64)
    model = nn.ModuleList([table, mlp(3)])

    def forward(x: torch.Tensor) -> torch.Tensor:
        ids = (x[:, :8].abs() * 30).long() % 100
        logits = model[1](table(ids)) @ table.weight.t()
        return F.cross_entropy(logits.view(-1, 100), ids.view(-1), reduction="none")

    return model, forward


@feature
def lora() -> tuple[nn.Module, Forward]:
    base = mlp(3).requires_grad_(False)
    down, up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
    return nn.ModuleList([base, down, up]), lambda x: base(x + up(down(x)).tanh())


@feature
def none_gradients() -> tuple[nn.Module, Forward]:
    model, unused = mlp(3), nn.Linear(64, 64)
    return nn.ModuleList([model, unused]), lambda x: model(x) + unused(x).detach()


@feature
def integer_and_bool_tensors() -> tuple[nn.Module, Forward]:
    def mask(x: torch.Tensor) -> torch.Tensor:
        order = x.argsort(-1)
        top, where = x.topk(8, -1)
        return x.gather(-1, order).masked_fill(x > 1, 0.0).scatter_add(-1, where, top)

    return around(mask)


@feature
def complex_tensors() -> tuple[nn.Module, Forward]:
    weight = nn.Parameter(torch.randn(33, dtype=torch.complex64))
    model = nn.ModuleList([mlp(2), nn.ParameterList([weight]), mlp(2)])
    return model, lambda x: model[2](torch.fft.irfft(torch.fft.rfft(model[0](x)).tanh() * weight, n=64))


@feature
def double_precision() -> tuple[nn.Module, Forward]:
    model = mlp(3).double()
    return model, lambda x: model(x.double())


@feature
def half_parameters() -> tuple[nn.Module, Forward]:
    model = mlp(3).bfloat16()
    return model, lambda x: model(x.bfloat16()).float()


@feature
def channels_last() -> tuple[nn.Module, Forward]:
    conv = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    conv = conv.to(memory_format=torch.channels_last)
    return around(lambda x: conv(x.view(8, 8, 16, 8).contiguous(memory_format=torch.channels_last)), conv)


@feature
def convolution_family() -> tuple[nn.Module, Forward]:
    layers = nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ConvTranspose2d(8, 4, 2, stride=2), nn.GELU(), nn.AvgPool2d(2),
        nn.Conv2d(4, 8, 1), nn.Upsample(scale_factor=2), nn.MaxPool2d(2),
    )  # fmt: skip
    return around(lambda x: layers(x.view(8, 8, 16, 8)), layers)


@feature
def lstm_cell() -> tuple[nn.Module, Forward]:
    cell = nn.LSTMCell(64, 64)

    def unroll(x: torch.Tensor) -> torch.Tensor:
        h, c = x.tanh(), x.sigmoid()
        for _ in range(3):
            h, c = cell(x, (h, c))
        return h

    return around(unroll, cell)


@feature
def embedding_bag() -> tuple[nn.Module, Forward]:
    bag = nn.EmbeddingBag(50, 64, mode="mean")
    return around(lambda x: bag((x.detach()[:, :4].abs() * 30).long() % 50) + x, bag)


# What users write themselves.


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp()
        ctx.save_for_backward(x, y)
        ctx.scale = 2.0
        return y, x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        x, y = ctx.saved_tensors
        return gradients[0] * y + ctx.scale * gradients[1] * x.cos()


@feature
def autograd_function() -> tuple[nn.Module, Forward]:
    return around(lambda x: sum(_Straight.apply(x * 0.1)))


@functools.cache
def square() -> Any:
    """A custom op with a backward of its own."""

    @torch.library.custom_op("checkmate_tests::square", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return x * x

    op.register_fake(torch.empty_like)
    op.register_autograd(
        lambda ctx, g: 2 * g * ctx.saved_tensors[0], setup_context=lambda ctx, inputs, output: _save(ctx, inputs)
    )
    return op


def _save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    ctx.save_for_backward(inputs[0])


@feature
def custom_op() -> tuple[nn.Module, Forward]:
    op = square()
    return around(lambda x: op(op(x).tanh()))


@functools.cache
def count_calls() -> Any:
    """A custom op that overwrites a tensor it is given."""

    @torch.library.custom_op("checkmate_tests::count_calls", mutates_args=("calls",))
    def op(x: torch.Tensor, calls: torch.Tensor) -> None:
        calls += 1

    return op


@feature
def custom_op_that_mutates() -> tuple[nn.Module, Forward]:
    op, holder = count_calls(), nn.Module()
    holder.register_buffer("calls", torch.zeros(3))

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * (1 + holder.calls.sum())
        op(x.detach(), holder.calls)
        return y + holder.calls.sum()

    return around(forward, holder)


@feature
def user_checkpoint() -> tuple[nn.Module, Forward]:
    part = mlp(2)
    return around(lambda x: checkpoint(part, x, use_reentrant=False), part)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


@feature
def selective_checkpoint() -> tuple[nn.Module, Forward]:
    part = mlp(2)
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    return around(lambda x: checkpoint(part, x, use_reentrant=False, context_fn=contexts), part)


@feature
def functional_transforms() -> tuple[nn.Module, Forward]:
    def field(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row.softmax(-1) * row.sum())(x) + torch.func.grad(lambda z: z.cos().sum())(x)

    return around(field)


@feature
def conditional() -> tuple[nn.Module, Forward]:
    def choose(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))

    return around(choose)


@feature
def random_inside_a_higher_order_op() -> tuple[nn.Module, Forward]:
    def choose(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: F.dropout(y, 0.3), lambda y: F.dropout(y, 0.2), (x.sin(),))

    return around(choose)


@feature
def nested_compile_region() -> tuple[nn.Module, Forward]:
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    @torch.compiler.nested_compile_region
    def block(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.gelu(layer(x)).sin(), 0.1)

    return around(lambda x: functools.reduce(lambda y, layer: block(layer, y), layers, x), layers)


@feature
def overlapping_views() -> tuple[nn.Module, Forward]:
    def views(x: torch.Tensor) -> torch.Tensor:
        windows = x.contiguous().as_strided((127, 64), (64, 1), 32).square()
        y = x.clone()
        y[:, ::2].mul_(2.0)
        y.t()[3].add_(1.0)
        return y + F.pad(windows, (0, 0, 0, 1)) + torch.cat([x.unfold(1, 4, 4)[..., 0]] * 4, 1)

    return around(views)


@feature
def losses() -> tuple[nn.Module, Forward]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x.detach().sigmoid()
        smooth = F.cross_entropy(x, y.argmax(-1), label_smoothing=0.1, ignore_index=3)
        return x * (smooth + F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean") + F.huber_loss(x, y))

    return around(forward)
