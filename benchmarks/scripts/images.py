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
