"""Networks in the shape of public JAX programs, small. Each is `loss(parameters, *batch)` with its arguments.

Blocks of some programs are run by `wrap`, for policies of `jax.checkpoint`.
"""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from jax_registry import Wrap, cross_entropy, integers, matrices, normal, program


class _Block(nn.Module):
    """A block of a transformer, as in nanodo: norm before, GELU."""

    heads: int = 4
    rate: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, mask: Any = None, memory: Any = None) -> jax.Array:
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, dropout_rate=self.rate, deterministic=self.rate == 0)(y, mask=mask)
        if memory is not None:
            x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), memory)
        y = nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))
        return x + nn.Dropout(self.rate, deterministic=self.rate == 0)(y)


@program("google-deepmind/nanodo", blocks=True)
def nanodo(wrap: Wrap) -> Any:
    """A decoder of 6 blocks; its parameters are a list, so that each block is a function."""
    block, mask = _Block(), nn.make_causal_mask(jnp.ones((8, 128)))
    layers = [block.init(jax.random.key(i), jnp.ones((8, 128, 64))) for i in range(6)]
    p = {"layers": layers, **matrices(0, embed=(256, 64), position=(128, 64), head=(64, 256))}

    def loss(p: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        x = p["embed"][tokens] + p["position"]
        for layer in p["layers"]:
            x = wrap(lambda q, x: block.apply(q, x, mask))(layer, x)
        return cross_entropy(x @ p["head"], labels)

    return loss, (p, integers(256, 8, 128), integers(256, 8, 128))


@program("google/flax examples/wmt")
def wmt() -> Any:
    """Encoder and decoder with dropout; loss of weighted tokens."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
            embed = nn.Embed(200, 64)
            x, y = embed(source), embed(target)
            for _ in range(2):
                x = _Block(rate=0.1)(x)
            for _ in range(2):
                y = _Block(rate=0.1)(y, nn.make_causal_mask(target), x)
            return embed.attend(nn.LayerNorm()(y))

    model: Any
    model, tokens = Model(), integers(200, 8, 64)

    def loss(p: Any, source: jax.Array, target: jax.Array, key: jax.Array) -> jax.Array:
        logits = model.apply(p, source, target, rngs={"dropout": key})
        weights = target > 0
        return (optax.softmax_cross_entropy_with_integer_labels(logits, target) * weights).sum() / weights.sum()

    p = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, tokens, tokens)
    return loss, (p, tokens, tokens, jax.random.key(2))


@program("google/flax examples/mnist")
def mnist() -> Any:
    """A convolutional network of NNX; the loss takes the module."""

    class CNN(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.conv1, self.conv2 = nnx.Conv(1, 32, (3, 3), rngs=rngs), nnx.Conv(32, 64, (3, 3), rngs=rngs)
            self.linear1, self.linear2 = nnx.Linear(3136, 256, rngs=rngs), nnx.Linear(256, 10, rngs=rngs)
            self.norm = nnx.BatchNorm(32, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            pool = functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
            x = pool(nnx.relu(self.norm(self.conv1(x))))
            return self.linear2(nnx.relu(self.linear1(pool(nnx.relu(self.conv2(x))).reshape(len(x), -1))))

    definition, parameters, rest = nnx.split(CNN(nnx.Rngs(0)), nnx.Param, ...)

    def loss(p: Any, rest: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(nnx.merge(definition, p, rest, copy=True)(x), y)

    return loss, (parameters, rest, normal(16, 28, 28, 1), integers(10, 16))


@program("google/flax examples/imagenet")
def resnet() -> Any:
    """Bottleneck blocks with BatchNorm, whose statistics are an auxiliary result."""

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            norm = functools.partial(nn.BatchNorm, use_running_average=False)
            x = nn.relu(norm()(nn.Conv(16, (3, 3), use_bias=False)(x)))
            for i, width in enumerate((16, 16, 32, 32)):
                strides, kept = (2 if i == 2 else 1,) * 2, x
                y = nn.relu(norm()(nn.Conv(width, (1, 1), use_bias=False)(x)))
                y = nn.relu(norm()(nn.Conv(width, (3, 3), strides, use_bias=False)(y)))
                y = norm()(nn.Conv(2 * width, (1, 1), use_bias=False)(y))
                if kept.shape != y.shape:
                    kept = norm()(nn.Conv(2 * width, (1, 1), strides, use_bias=False)(kept))
                x = nn.relu(kept + y)
            return nn.Dense(10)(x.mean((1, 2)))

    model: Any
    model, images = ResNet(), normal(8, 32, 32, 3)
    variables = model.init(jax.random.key(0), images)

    def loss(p: Any, statistics: Any, x: jax.Array, y: jax.Array) -> Any:
        logits, changed = model.apply({"params": p, "batch_stats": statistics}, x, mutable=["batch_stats"])
        return cross_entropy(logits, y) + 1e-4 * sum((w**2).sum() for w in jax.tree.leaves(p)), changed

    return loss, (variables["params"], variables["batch_stats"], images, integers(10, 8))


@program("google/flax examples/vae")
def vae() -> Any:
    """Dense encoder and decoder with a random latent."""
    p = matrices(0, e1=(784, 500), e2=(500, 40), d1=(20, 500), d2=(500, 784))

    def loss(p: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        mean, logvar = jnp.split(nn.relu(x @ p["e1"]) @ p["e2"], 2, -1)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(key, mean.shape)
        logits = nn.relu(z @ p["d1"]) @ p["d2"]
        divergence = -0.5 * (1 + logvar - mean**2 - jnp.exp(logvar)).sum(-1)
        return (optax.sigmoid_binary_cross_entropy(logits, x).sum(-1) + divergence).mean()

    return loss, (p, jax.nn.sigmoid(normal(512, 784)), jax.random.key(0))


@program("google/flax examples/seq2seq")
def seq2seq() -> Any:
    """Two LSTMs by `nn.RNN`."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
            state, _ = nn.RNN(nn.LSTMCell(64), return_carry=True)(x)
            return nn.Dense(32)(nn.RNN(nn.LSTMCell(64))(y, initial_carry=state))

    model: Any
    model, x = Model(), jax.nn.one_hot(integers(32, 16, 48), 32)
    return (lambda p, x, y: cross_entropy(model.apply(p, x, y), y.argmax(-1))), (model.init(jax.random.key(0), x, x), x, x)


@program("google/flax examples/ogbg_molpcba")
def molecules() -> Any:
    """Message passing by gathers and segment sums, as jraph does."""
    layers = [matrices(10 * i, e=(96, 64), n=(64, 32)) for i in range(4)]

    def loss(layers: Any, nodes: jax.Array, senders: jax.Array, receivers: jax.Array, labels: jax.Array) -> jax.Array:
        edges = nodes[senders] * 0.5
        for p in layers:
            messages = nn.relu(jnp.concatenate([nodes[senders], nodes[receivers], edges], -1) @ p["e"])
            total = jax.ops.segment_sum(messages, receivers, len(nodes))
            nodes, edges = nodes + nn.relu(total @ p["n"]), messages[:, :32]
        return optax.sigmoid_binary_cross_entropy(nodes.sum(-1), labels).mean()

    return loss, (layers, normal(600, 32), integers(600, 2400), integers(600, 2400)[::-1], 1.0 * integers(2, 600))


@program("google/flax examples/ppo")
def ppo() -> Any:
    """Actor and critic on stacked frames, clipped ratios."""

    class ActorCritic(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> Any:
            for width, size, stride in ((16, 8, 4), (32, 4, 2), (32, 3, 1)):
                x = nn.relu(nn.Conv(width, (size, size), (stride, stride))(x))
            x = nn.relu(nn.Dense(256)(x.reshape(len(x), -1)))
            return nn.log_softmax(nn.Dense(6)(x)), nn.Dense(1)(x)[:, 0]

    model: Any
    model, frames = ActorCritic(), normal(32, 64, 64, 4)

    def loss(p: Any, frames: jax.Array, actions: jax.Array, old: jax.Array, gain: jax.Array) -> jax.Array:
        logits, values = model.apply(p, frames)
        ratio = jnp.exp(jnp.take_along_axis(logits, actions[:, None], 1)[:, 0] - old)
        clipped = jnp.minimum(ratio * gain, jnp.clip(ratio, 0.9, 1.1) * gain)
        return -clipped.mean() + 0.5 * ((gain - values) ** 2).mean() + 0.01 * (jnp.exp(logits) * logits).sum(1).mean()

    return loss, (model.init(jax.random.key(0), frames), frames, integers(6, 32), normal(32), normal(32, seed=3))


@program("patrick-kidger/equinox examples/vision_transformer")
def vit() -> Any:
    """Modules of Equinox under `jax.vmap`, with dropout."""
    keys = jax.random.split(jax.random.key(0), 9)

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP
        norms: list[eqx.nn.LayerNorm]

        def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
            y = jax.vmap(self.norms[0])(x)
            x = x + self.attention(y, y, y)
            return x + eqx.nn.Dropout(0.1)(jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x)), key=key)

    def layer(key: jax.Array) -> Block:
        attention, mlp = eqx.nn.MultiheadAttention(4, 48, key=key), eqx.nn.MLP(48, 48, 192, 1, jax.nn.gelu, key=key)
        return Block(attention, mlp, [eqx.nn.LayerNorm(48)] * 2)

    model = (eqx.nn.Linear(48, 48, key=keys[8]), [layer(key) for key in keys[:4]], eqx.nn.Linear(48, 10, key=keys[7]))
    parameters, static = eqx.partition(model, eqx.is_array)

    def loss(p: Any, images: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
        embed, blocks, head = eqx.combine(p, static)

        def one(image: jax.Array, key: jax.Array) -> jax.Array:
            x = jax.vmap(embed)(image.reshape(8, 4, 8, 4, 3).swapaxes(1, 2).reshape(64, 48))
            for block, k in zip(blocks, jax.random.split(key, len(blocks)), strict=True):
                x = block(x, k)
            return head(x.mean(0))

        return cross_entropy(jax.vmap(one)(images, jax.random.split(key, len(images))), labels)

    return loss, (parameters, normal(16, 32, 32, 3), integers(10, 16), jax.random.key(1))


@program("patrick-kidger/equinox examples/unet")
def diffusion() -> Any:
    """Score matching by a U-Net of convolutions and group norms."""
    widths = ((3, 16), (16, 32), (32, 32), (64, 16), (32, 16))
    p = [{"w": normal(b, a, 3, 3, seed=i, scale=0.1), "t": normal(16, b, seed=i, scale=0.1)} for i, (a, b) in enumerate(widths)]
    p.append({"w": normal(3, 16, 3, 3, seed=9, scale=0.1), "t": normal(16, 3, seed=9, scale=0.1)})

    def conv(q: Any, x: jax.Array, t: jax.Array) -> jax.Array:
        y = jax.lax.conv(x, q["w"], (1, 1), "SAME") + (t @ q["t"])[:, :, None, None]
        return jax.nn.silu((y - y.mean((2, 3), keepdims=True)) / jnp.sqrt(y.var((2, 3), keepdims=True) + 1e-5))

    def loss(p: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        t, noise = jax.random.uniform(key, (len(x), 1)), jax.random.normal(key, x.shape)
        wave, scale = jnp.sin(t * jnp.arange(1, 17)), jnp.exp(-t)[:, :, None, None]
        a = conv(p[0], x * scale + noise, wave)
        b = conv(p[1], a[:, :, ::2, ::2], wave)
        c = conv(p[2], b[:, :, ::2, ::2], wave)
        d = conv(p[3], jnp.concatenate([b, jax.image.resize(c, b.shape, "nearest")], 1), wave)
        up = jax.image.resize(d, (*d.shape[:2], *a.shape[2:]), "bilinear")
        y = jax.lax.conv(conv(p[4], jnp.concatenate([a, up], 1), wave), p[5]["w"], (1, 1), "SAME")
        return ((y + noise) ** 2).mean()

    return loss, (p, normal(8, 3, 32, 32), jax.random.key(0))


def _llama(p: Any, x: jax.Array) -> jax.Array:
    """A block of Llama: RMS norms, SwiGLU."""

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + scale)

    b, s, d = x.shape
    q, k, v = ((norm(x, p["n1"]) @ p[n]).reshape(b, s, 4, d // 4) for n in "qkv")
    scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)), jnp.einsum("bqhd,bkhd->bhqk", q, k) * (d // 4) ** -0.5, -1e9)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(b, s, d) @ p["o"]
    y = norm(x, p["n2"])
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def _llama_layer(seed: int, d: int = 64) -> dict[str, jax.Array]:
    square = dict.fromkeys("qkvo", (d, d))
    return matrices(10 * seed, **square, gate=(d, 3 * d), up=(d, 3 * d), down=(3 * d, d), n1=(d,), n2=(d,))


@program("AI-Hypercomputer/maxtext (unscanned)", blocks=True)
def llama(wrap: Wrap) -> Any:
    """Eight layers one after the other."""
    p = {"layers": [_llama_layer(i) for i in range(8)], **matrices(99, embed=(256, 64), head=(64, 256))}

    def loss(p: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        x = p["embed"][tokens]
        for layer in p["layers"]:
            x = wrap(_llama)(layer, x)
        return cross_entropy(x @ p["head"], labels)

    return loss, (p, integers(256, 4, 128), integers(256, 4, 128))


@program("AI-Hypercomputer/maxtext (scan_layers)", blocks=True)
def scanned(wrap: Wrap) -> Any:
    """Eight stacked layers in one `scan`."""
    layers = jax.tree.map(lambda *a: jnp.stack(a), *[_llama_layer(i) for i in range(8)])
    p = {"layers": layers, **matrices(99, embed=(256, 64), head=(64, 256))}

    def loss(p: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, q: (wrap(_llama)(q, x), None), p["embed"][tokens], p["layers"])
        return cross_entropy(x @ p["head"], labels)

    return loss, (p, integers(256, 4, 128), integers(256, 4, 128))


@program("stanford-crfm/levanter GPT-2 (haliax.Stacked)")
def levanter() -> Any:
    """Named axes, blocks in `hax.fold` over stacked layers without checkpointing."""
    Layers, Batch, Position, Embed, Mlp, Vocabulary = hax.make_axes(Layers=6, B=8, P=64, E=64, M=256, V=128)
    Key = Position.alias("K")

    def draw(*axes: Any) -> Any:
        return hax.random.normal(jax.random.key(len(axes)), axes) * 0.1

    p = {"up": draw(Layers, Embed, Mlp), "down": draw(Layers, Mlp, Embed), "embed": draw(Vocabulary, Embed)}

    def loss(p: Any, tokens: jax.Array) -> jax.Array:
        named = hax.named(tokens, (Batch, Position))

        def block(x: Any, up: Any, down: Any) -> Any:
            weights = hax.nn.softmax(hax.dot(x, x.rename({"P": "K"}), axis=Embed) / 8.0, axis=Key)
            x = x + hax.dot(weights, x.rename({"P": "K"}), axis=Key)
            return x + hax.dot(hax.nn.gelu(hax.dot(x, up, axis=Embed)), down, axis=Mlp)

        x = hax.fold(block, Layers)(p["embed"].take(Vocabulary, named), p["up"], p["down"])
        logits = hax.dot(x, p["embed"], axis=Embed)
        losses: Any = hax.nn.cross_entropy_loss(logits, Vocabulary, hax.nn.one_hot(named, Vocabulary))
        return losses.mean().scalar()

    return loss, (p, integers(128, 8, 64))
