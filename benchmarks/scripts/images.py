"""Training scripts with images as outputs or unusual layers, in the shape of their sources; models are small and random."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .loop import STEPS, compiled, log, script, steps


class UNet(nn.Module):
    """Two levels, with double convolutions."""

    def __init__(self, classes: int = 2, width: int = 12) -> None:
        super().__init__()

        def double(inner: int, outer: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(inner, outer, 3, padding=1, bias=False),
                nn.BatchNorm2d(outer),
                nn.ReLU(inplace=True),
                nn.Conv2d(outer, outer, 3, padding=1, bias=False),
                nn.BatchNorm2d(outer),
                nn.ReLU(inplace=True),
            )

        self.inc, self.down1, self.down2 = double(3, width), double(width, 2 * width), double(2 * width, 4 * width)
        self.up1, self.conv1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), double(4 * width, 2 * width)
        self.up2, self.conv2 = nn.ConvTranspose2d(2 * width, width, 2, 2), double(2 * width, width)
        self.outc = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x1 = self.inc(x)
        x2 = self.down1(F.max_pool2d(x1, 2))
        x3 = self.down2(F.max_pool2d(x2, 2))
        x = self.conv1(torch.cat([x2, self.up1(x3)], dim=1))
        return self.outc(self.conv2(torch.cat([x1, self.up2(x)], dim=1)))


@script("milesial/Pytorch-UNet", "autocast, GradScaler, clipping, loss outside, validation in between, RMSprop")
def unet() -> None:
    def dice_loss(pred: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        inter = 2 * (pred * target).sum(dim=(-1, -2))
        sets_sum = pred.sum(dim=(-1, -2)) + target.sum(dim=(-1, -2))
        return 1 - ((inter + 1e-6) / (sets_sum + 1e-6)).mean()

    @torch.inference_mode()
    def evaluate() -> torch.Tensor:
        net.eval()
        with torch.autocast("cpu", torch.bfloat16, enabled=True):
            mask_pred = net(torch.rand(4, 3, 64, 64))
        net.train()
        return mask_pred.float().softmax(1).square().mean()

    model = UNet()
    net = compiled(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-5, weight_decay=1e-8, momentum=0.999, foreach=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    grad_scaler = torch.amp.GradScaler("cpu", enabled=True)
    criterion = nn.CrossEntropyLoss()
    batches = ((torch.rand(4, 3, 64, 64), torch.randint(2, (4, 64, 64))) for _ in range(STEPS))
    for global_step, (images, true_masks) in enumerate(steps(batches), 1):
        images = images.to(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16, enabled=True):
            masks_pred = net(images)
            loss = criterion(masks_pred, true_masks)
            loss += dice_loss(F.softmax(masks_pred, dim=1).float(), F.one_hot(true_masks, 2).permute(0, 3, 1, 2).float())
        optimizer.zero_grad(set_to_none=True)
        grad_scaler.scale(loss).backward()
        grad_scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        log(loss)
        if global_step % 3 == 0:
            val_score = evaluate()
            scheduler.step(val_score)
            log(val_score)


@script("pytorch/examples: fast_neural_style", "trained network, and a frozen one in the loss")
def fast_neural_style() -> None:
    class ResidualBlock(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.conv1, self.in1 = nn.Conv2d(channels, channels, 3, padding=1), nn.InstanceNorm2d(channels, affine=True)
            self.conv2, self.in2 = nn.Conv2d(channels, channels, 3, padding=1), nn.InstanceNorm2d(channels, affine=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.in2(self.conv2(F.relu(self.in1(self.conv1(x))))) + x

    class Vgg(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slice1 = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
            self.slice2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU())
            self.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.slice1(x)
            return h, self.slice2(h)

    def gram_matrix(y: torch.Tensor) -> torch.Tensor:
        b, ch, h, w = y.size()
        features = y.view(b, ch, w * h)
        return features.bmm(features.transpose(1, 2)) / (ch * h * w)

    transformer = compiled(
        nn.Sequential(
            nn.Conv2d(3, 16, 9, padding=4),
            nn.InstanceNorm2d(16, affine=True),
            nn.ReLU(),
            ResidualBlock(16),
            ResidualBlock(16),
            nn.Upsample(scale_factor=1),
            nn.Conv2d(16, 3, 9, padding=4),
        )
    )
    vgg = compiled(Vgg())
    optimizer = torch.optim.Adam(transformer.parameters(), 1e-3)
    mse_loss = nn.MSELoss()
    gram_style = [gram_matrix(y) for y in vgg(torch.rand(4, 3, 48, 48))]
    for x in steps(torch.rand(4, 3, 48, 48) for _ in range(STEPS)):
        optimizer.zero_grad()
        y = transformer(x)
        features_y, features_x = vgg(y), vgg(x)
        content_loss = 1e5 * mse_loss(features_y[1], features_x[1])
        style_loss = 0.0
        for ft_y, gm_s in zip(features_y, gram_style, strict=True):
            style_loss += mse_loss(gram_matrix(ft_y), gm_s)
        style_loss *= 1e10
        total_loss = content_loss + style_loss
        total_loss.backward()
        optimizer.step()
        log(content_loss, style_loss)


@script("pytorch/examples: super_resolution", "loss outside, test in between")
def super_resolution() -> None:
    model = compiled(
        nn.Sequential(
            nn.Conv2d(1, 32, 5, 1, 2),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, 1, 1),
            nn.ReLU(),
            nn.Conv2d(32, 16, 3, 1, 1),
            nn.ReLU(),
            nn.Conv2d(16, 9, 3, 1, 1),
            nn.PixelShuffle(3),
        )
    )
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        for low, target in steps((torch.rand(8, 1, 64, 64), torch.rand(8, 1, 192, 192)) for _ in range(STEPS // 2)):
            optimizer.zero_grad()
            loss = criterion(model(low), target)
            log(loss)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            mse = criterion(model(torch.rand(8, 1, 64, 64)), torch.rand(8, 1, 192, 192))
            log(10 * torch.log10(1 / mse))


@script("pytorch/examples: mnist_forward_forward", "a loss and an optimizer in each layer, no backward between layers")
def forward_forward() -> None:
    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x_direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
            return F.relu(torch.mm(x_direction, self.weight.T) + self.bias.unsqueeze(0))

    def train_layer(layer: nn.Module, opt: torch.optim.Optimizer, x_pos: torch.Tensor, x_neg: torch.Tensor) -> list[torch.Tensor]:
        g_pos = layer(x_pos).pow(2).mean(1)
        g_neg = layer(x_neg).pow(2).mean(1)
        loss = torch.log(1 + torch.exp(torch.cat([-g_pos + 2.0, g_neg - 2.0]))).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        log(loss)
        return [layer(x_pos).detach(), layer(x_neg).detach()]

    layers = [compiled(Layer(128, 256)), compiled(Layer(256, 256))]
    opts = [torch.optim.Adam(layer.parameters(), lr=0.03) for layer in layers]
    for x_pos, x_neg in steps((torch.rand(2048, 128), torch.rand(2048, 128)) for _ in range(STEPS)):
        h_pos, h_neg = x_pos, x_neg
        for layer, opt in zip(layers, opts, strict=True):
            h_pos, h_neg = train_layer(layer, opt, h_pos, h_neg)


@script("pytorch/ao: quantization-aware training", "fake quantization with observers in buffers, straight-through gradients")
def quantization_aware() -> None:
    class FakeQuant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("min_val", torch.tensor(0.0))
            self.register_buffer("max_val", torch.tensor(0.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                low, high = x.detach().aminmax()
                self.min_val.lerp_(low, 0.01)
                self.max_val.lerp_(high, 0.01)
            scale = ((self.max_val - self.min_val) / 255).clamp(min=1e-6)
            zero_point = (-self.min_val / scale).round()
            quantized = ((x / scale + zero_point).round().clamp(0, 255) - zero_point) * scale
            return x + (quantized - x).detach()

    class QConv(nn.Module):
        def __init__(self, inner: int, outer: int, stride: int) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
            self.weight_quant, self.activation_quant = FakeQuant(), FakeQuant()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.weight_quant(self.conv.weight)
            out = F.conv2d(x, weight, None, self.conv.stride, self.conv.padding)
            return self.activation_quant(F.relu(self.bn(out)))

    model = compiled(
        nn.Sequential(
            QConv(3, 16, 1), QConv(16, 32, 2), QConv(32, 32, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
        )
    )
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=1e-4)
    model.train()
    for image, target in steps((torch.rand(32, 3, 32, 32), torch.randint(10, (32,))) for _ in range(STEPS)):
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss)
