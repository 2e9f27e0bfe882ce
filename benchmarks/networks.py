"""The networks of the papers, layer by layer, in the cost and memory model of Jain et al. (2020).

One node a layer, one tensor a node. Costs are multiply-accumulates: of a convolution, its outputs times the inputs of each;
four an element of batch normalisation, one an element of an activation, an upsampling and each summand of an addition;
pooling, padding, concatenation, reshaping and dropout are free, and so is an activation inside its layer. A gradient costs
twice its layer and is as large as the layer's output. It reads what its layer and the readers of its layer made, and the
gradients of those readers. Resident are the parameters and their gradients, in four bytes each. Layers have the names that
Keras gives them.

The same arguments give the same graph on every machine: the files in `benchmarks/graphs`, which a test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

from benchmarks.generate import chain
from checkmate import Graph

CLASSES = 1000
SEGMENTS = 19
PHOTO, STREET = (224, 224, 3), (416, 608, 3)


@dataclass(frozen=True, slots=True)
class Tensor:
    """Output of a layer: its node, or None for the input, and its shape without the batch."""

    node: int | None
    shape: tuple[int, ...]


@dataclass(slots=True)
class Network:
    """Layers in the order in which they run."""

    names: list[str] = field(default_factory=list)
    costs: list[int] = field(default_factory=list)
    elements: list[int] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    parameters: int = 0

    def layer(self, name: str, inputs: Sequence[Tensor], shape: tuple[int, ...], cost: int = 0, parameters: int = 0) -> Tensor:
        node = len(self.names)
        self.names.append(name)
        self.costs.append(cost)
        self.elements.append(prod(shape))
        self.edges += [(x.node, node) for x in inputs if x.node is not None]
        self.parameters += parameters
        return Tensor(node, shape)

    def conv(
        self, name: str, x: Tensor, channels: int, kernel: int = 3, stride: int = 1, same: bool = True, bias: bool = True
    ) -> Tensor:
        high, wide, given = x.shape
        lost = 0 if same else kernel - 1
        shape = (-(-(high - lost) // stride), -(-(wide - lost) // stride), channels)
        weights = kernel * kernel * given
        return self.layer(name, [x], shape, prod(shape) * weights, weights * channels + bias * channels)

    def depthwise(self, name: str, x: Tensor, stride: int = 1, same: bool = True) -> Tensor:
        high, wide, channels = x.shape
        lost = 0 if same else 2
        shape = (-(-(high - lost) // stride), -(-(wide - lost) // stride), channels)
        return self.layer(name, [x], shape, 9 * prod(shape), 9 * channels)

    def transposed(self, name: str, x: Tensor, kernel: int, stride: int) -> Tensor:
        high, wide, channels = x.shape
        shape = ((high - 1) * stride + kernel, (wide - 1) * stride + kernel, channels)
        return self.layer(name, [x], shape, prod(shape) * channels, (kernel * channels) ** 2)

    def dense(self, name: str, x: Tensor, units: int) -> Tensor:
        given = prod(x.shape)
        return self.layer(name, [x], (units,), given * units, (given + 1) * units)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return self.layer(name, [x], x.shape, 4 * prod(x.shape), 4 * x.shape[-1])

    def activation(self, name: str, x: Tensor) -> Tensor:
        return self.layer(name, [x], x.shape, prod(x.shape))

    def add(self, name: str, *inputs: Tensor) -> Tensor:
        return self.layer(name, inputs, inputs[0].shape, len(inputs) * prod(inputs[0].shape))

    def concat(self, name: str, *inputs: Tensor) -> Tensor:
        return self.layer(name, inputs, (*inputs[0].shape[:-1], sum(x.shape[-1] for x in inputs)))

    def pad(self, name: str, x: Tensor, high: int, wide: int | None = None) -> Tensor:
        rise = high if wide is None else wide
        return self.layer(name, [x], (x.shape[0] + high, x.shape[1] + rise, x.shape[2]))

    def crop(self, name: str, x: Tensor, high: int, wide: int) -> Tensor:
        return self.layer(name, [x], (high, wide, x.shape[2]))

    def pool(self, name: str, x: Tensor, kernel: int = 2) -> Tensor:
        return self.layer(name, [x], ((x.shape[0] - kernel) // 2 + 1, (x.shape[1] - kernel) // 2 + 1, x.shape[2]))

    def upsample(self, name: str, x: Tensor) -> Tensor:
        shape = (2 * x.shape[0], 2 * x.shape[1], x.shape[2])
        return self.layer(name, [x], shape, prod(shape))

    def free(self, name: str, x: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
        """What costs nothing: dropout, reshaping, global pooling."""
        return self.layer(name, [x], x.shape if shape is None else shape)

    def training_step(self, name: str, batch: int) -> Graph:
        """Forward, loss and backward, in bytes and operations of a batch."""
        loss = len(self.names)
        edges = [*self.edges, (loss - 1, loss)]
        backward = [(2 * loss - v, 2 * loss - u) for u, v in edges]
        reads = [(v, 2 * loss - u) for u, v in edges] + [(u, 2 * loss - u) for u in range(loss)]
        names = [*self.names, "Loss", *(f"Grad<{name}>" for name in reversed(self.names))]
        costs = [*self.costs, 0, *(2 * cost for cost in reversed(self.costs))]
        elements = [*self.elements, 1, *reversed(self.elements)]
        return Graph.from_dag(
            cost=[batch * cost for cost in costs],
            size_bytes=[4 * batch * count for count in elements],
            edges=[*edges, *backward, *reads],
            backward=[node > loss for node in range(len(names))],
            resident_bytes=8 * self.parameters,
            names=names,
            name=name,
        )


def _vgg_encoder(net: Network, x: Tensor, depths: Sequence[int]) -> list[Tensor]:
    """Blocks of VGG; gives what each one's pooling makes."""
    pools: list[Tensor] = []
    for block, (depth, channels) in enumerate(zip(depths, (64, 128, 256, 512, 512), strict=False), start=1):
        for k in range(depth):
            x = net.conv(f"block{block}_conv{k + 1}", x, channels)
        x = net.pool(f"block{block}_pool", x)
        pools.append(x)
    return pools


def vgg(depths: Sequence[int]) -> Network:
    net = Network()
    x = _vgg_encoder(net, Tensor(None, PHOTO), depths)[-1]
    x = net.free("flatten", x, (prod(x.shape),))
    for name, units in (("fc1", 4096), ("fc2", 4096), ("predictions", CLASSES)):
        x = net.dense(name, x, units)
    return net


def mobilenet() -> Network:
    net = Network()

    def settled(name: str, x: Tensor) -> Tensor:
        return net.activation(f"{name}_relu", net.norm(f"{name}_bn", x))

    x = net.pad("conv1_pad", Tensor(None, PHOTO), 1)
    x = settled("conv1", net.conv("conv1", x, 32, stride=2, same=False, bias=False))
    channels = (64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024)
    for block, width in enumerate(channels, start=1):
        halved = block in (2, 4, 6, 12)
        if halved:
            x = net.pad(f"conv_pad_{block}", x, 1)
        x = settled(f"conv_dw_{block}", net.depthwise(f"conv_dw_{block}", x, 2 if halved else 1, same=not halved))
        x = settled(f"conv_pw_{block}", net.conv(f"conv_pw_{block}", x, width, 1, bias=False))
    x = net.free("global_average_pooling2d", x, (1024,))
    x = net.free("reshape_1", x, (1, 1, 1024))
    x = net.free("dropout", x)
    x = net.conv("conv_preds", x, CLASSES, 1)
    net.activation("act_softmax", net.free("reshape_2", x, (CLASSES,)))
    return net


def resnet(depths: Sequence[int]) -> Network:
    net = Network()
    x = net.pad("conv1_pad", Tensor(None, PHOTO), 6)
    x = net.conv("conv1_conv", x, 64, 7, 2, same=False)
    x = net.activation("conv1_relu", net.norm("conv1_bn", x))
    x = net.pool("pool1_pool", net.pad("pool1_pad", x, 2), 3)
    for stage, (blocks, width) in enumerate(zip(depths, (64, 128, 256, 512), strict=True), start=2):
        for block in range(1, blocks + 1):
            x = _bottleneck(net, f"conv{stage}_block{block}", x, width, 2 if stage > 2 and block == 1 else 1, block == 1)
    net.dense("probs", net.free("avg_pool", x, (2048,)), CLASSES)
    return net


def _bottleneck(net: Network, name: str, x: Tensor, width: int, stride: int, projected: bool) -> Tensor:
    y = x
    for k, (kernel, step) in enumerate(((1, stride), (3, 1)), start=1):
        y = net.conv(f"{name}_{k}_conv", y, width, kernel, step)
        y = net.activation(f"{name}_{k}_relu", net.norm(f"{name}_{k}_bn", y))
    shortcut = net.conv(f"{name}_0_conv", x, 4 * width, 1, stride) if projected else x
    y = net.conv(f"{name}_3_conv", y, 4 * width, 1)
    shortcut = net.norm(f"{name}_0_bn", shortcut) if projected else shortcut
    y = net.norm(f"{name}_3_bn", y)
    return net.activation(f"{name}_out", net.add(f"{name}_add", shortcut, y))


def densenet(depths: Sequence[int]) -> Network:
    net = Network()
    x = net.pad("zero_padding2d", Tensor(None, PHOTO), 6)
    x = net.conv("conv1_conv", x, 64, 7, 2, same=False, bias=False)
    x = net.activation("conv1_relu", net.norm("conv1_bn", x))
    x = net.pool("pool1", net.pad("zero_padding2d_1", x, 2), 3)
    for stage, blocks in enumerate(depths, start=2):
        for block in range(1, blocks + 1):
            name = f"conv{stage}_block{block}"
            y = net.activation(f"{name}_0_relu", net.norm(f"{name}_0_bn", x))
            y = net.conv(f"{name}_1_conv", y, 128, 1, bias=False)
            y = net.activation(f"{name}_1_relu", net.norm(f"{name}_1_bn", y))
            y = net.conv(f"{name}_2_conv", y, 32, bias=False)
            x = net.concat(f"{name}_concat", x, y)
        if stage < 5:
            x = net.activation(f"pool{stage}_relu", net.norm(f"pool{stage}_bn", x))
            x = net.pool(f"pool{stage}_pool", net.conv(f"pool{stage}_conv", x, x.shape[-1] // 2, 1, bias=False))
    x = net.activation("relu", net.norm("bn", x))
    net.dense("fc1000", net.free("avg_pool", x, (x.shape[-1],)), CLASSES)
    return net


def _numbered(name: str, k: int) -> str:
    """Keras numbers the second layer of a kind 1."""
    return name if k == 0 else f"{name}_{k}"


def _labelled(net: Network, x: Tensor, last: str) -> Tensor:
    """Classes of every pixel, flat."""
    return net.activation(last, net.free("reshape", x, (x.shape[0] * x.shape[1], SEGMENTS)))


def vgg_unet() -> Network:
    net = Network()
    pools = _vgg_encoder(net, Tensor(None, STREET), (2, 2, 3, 3))
    x = pools[3]
    for k, width in enumerate((512, 256, 128, 64)):
        x = net.conv(_numbered("conv2d", k), net.pad(_numbered("zero_padding2d", k), x, 2), width, same=False)
        x = net.norm(_numbered("batch_normalization", k), x)
        if k < 3:
            x = net.concat(_numbered("concatenate", k), net.upsample(_numbered("up_sampling2d", k), x), pools[2 - k])
    _labelled(net, net.conv("conv2d_4", x, SEGMENTS), "activation")
    return net


def fcn_8_vgg() -> Network:
    net = Network()
    pools = _vgg_encoder(net, Tensor(None, STREET), (2, 2, 3, 3, 3))
    x = net.free("dropout", net.conv("conv2d", pools[4], 4096, 7))
    x = net.free("dropout_1", net.conv("conv2d_1", x, 4096, 1))
    x = net.conv("conv2d_2", x, SEGMENTS, 1)
    x = net.transposed("conv2d_transpose", x, 4, 2)
    (high, wide, _), (higher, wider, _) = pools[3].shape, pools[2].shape
    x = net.crop("cropping2d_1", net.crop("cropping2d", x, x.shape[0], wide), high, wide)
    x = net.add("add", x, net.conv("conv2d_3", pools[3], SEGMENTS, 1))
    x = net.transposed("conv2d_transpose_1", x, 4, 2)
    x = net.crop("cropping2d_2", x, x.shape[0], wider)
    score = net.conv("conv2d_4", pools[2], SEGMENTS, 1)
    x = net.add("add_1", score, net.crop("cropping2d_3", x, higher, wider))
    _labelled(net, net.transposed("conv2d_transpose_2", x, 16, 8), "activation")
    return net


def segnet() -> Network:
    net = Network()
    x = Tensor(None, STREET)

    def convolved(k: int, x: Tensor, width: int) -> Tensor:
        x = net.conv(_numbered("conv2d", k), net.pad(_numbered("zero_padding2d", k), x, 2), width, same=False)
        return net.norm(_numbered("batch_normalization", k), x)

    for k, width in enumerate((64, 128, 256, 256)):
        x = net.activation(_numbered("activation", k), convolved(k, x, width))
        x = net.pool(_numbered("max_pooling2d", k), x)
    for k, width in enumerate((512, 256, 128, 64)):
        x = convolved(k + 5, x, width)
        if k < 3:
            x = net.upsample(_numbered("up_sampling2d", k), x)
    _labelled(net, net.conv("conv2d_9", x, SEGMENTS), "activation_5")
    return net


def tiny() -> Network:
    net = Network()
    x = net.conv("conv2d", Tensor(None, PHOTO), 64, same=False)
    x = net.add("add", net.conv("conv2d_1", x, 128, 1), net.conv("conv2d_2", x, 128, 1))
    net.dense("dense", net.free("global_average_pooling2d", x, (128,)), CLASSES)
    return net


NETWORKS: dict[str, Callable[[], Network]] = {
    "VGG16": lambda: vgg((2, 2, 3, 3, 3)),
    "VGG19": lambda: vgg((2, 2, 4, 4, 4)),
    "MobileNet": mobilenet,
    "ResNet50": lambda: resnet((3, 4, 6, 3)),
    "DenseNet121": lambda: densenet((6, 12, 24, 16)),
    "vgg_unet": vgg_unet,
    "fcn_8_vgg": fcn_8_vgg,
    "segnet": segnet,
    "test": tiny,
}
OTHER_DEPTHS: dict[str, Callable[[], Network]] = {
    "VGG11": lambda: vgg((1, 1, 2, 2, 2)),
    "VGG13": lambda: vgg((2, 2, 2, 2, 2)),
    "ResNet101": lambda: resnet((3, 4, 23, 3)),
    "ResNet152": lambda: resnet((3, 8, 36, 3)),
    "DenseNet169": lambda: densenet((6, 12, 32, 32)),
    "DenseNet201": lambda: densenet((6, 12, 48, 32)),
}
"""Networks of the same kinds that the papers do not have."""


def training_step(name: str, batch: int = 1) -> Graph:
    """Graph of a network's training step; ``linear<n>`` are unit chains."""
    if name.startswith("linear"):
        return chain(int(name.removeprefix("linear")))
    return {**NETWORKS, **OTHER_DEPTHS}[name]().training_step(name, batch)
