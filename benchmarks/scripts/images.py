"""Training scripts with images as outputs or unusual layers, in the shape of their sources; models are small and random."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from models import UNet
from torch import nn

from .loop import STEPS, compiled, log, script, steps


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

    model = UNet(widths=(12, 24), classes=2)
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


@script("pytorch/examples: dcgan", "two networks, two optimizers, three backwards")
def dcgan() -> None:
    nz, ngf, ndf = 64, 32, 32

    def weights_init(m: nn.Module) -> None:
        if isinstance(m, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(m.weight, 0.0, 0.02)
        elif isinstance(m, nn.BatchNorm2d):
            nn.init.normal_(m.weight, 1.0, 0.02)
            nn.init.zeros_(m.bias)

    def up(inner: int, outer: int) -> list[nn.Module]:
        return [nn.ConvTranspose2d(inner, outer, 4, 2, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(True)]

    def down(inner: int, outer: int) -> list[nn.Module]:
        return [nn.Conv2d(inner, outer, 4, 2, 1, bias=False), nn.BatchNorm2d(outer), nn.LeakyReLU(0.2, inplace=True)]

    netG = nn.Sequential(
        nn.ConvTranspose2d(nz, ngf * 4, 4, 1, 0, bias=False),
        nn.BatchNorm2d(ngf * 4),
        nn.ReLU(True),
        *up(ngf * 4, ngf * 2),
        *up(ngf * 2, ngf),
        *up(ngf, ngf // 2),
        nn.ConvTranspose2d(ngf // 2, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    )
    netD = nn.Sequential(
        nn.Conv2d(3, ndf, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        *down(ndf, ndf * 2),
        *down(ndf * 2, ndf * 4),
        nn.Conv2d(ndf * 4, 1, 8, 1, 0, bias=False),
        nn.Sigmoid(),
    )
    netG.apply(weights_init)
    netD.apply(weights_init)
    netG, netD = compiled(netG), compiled(netD)
    criterion = nn.BCELoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=0.0002, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=0.0002, betas=(0.5, 0.999))
    for real in steps(torch.rand(16, 3, 64, 64) * 2 - 1 for _ in range(STEPS)):
        # Update D: maximize log(D(x)) + log(1 - D(G(z))).
        netD.zero_grad()
        label = torch.full((real.size(0),), 1.0)
        output = netD(real).view(-1)
        errD_real = criterion(output, label)
        errD_real.backward()
        noise = torch.randn(real.size(0), nz, 1, 1)
        fake = netG(noise)
        label.fill_(0.0)
        output = netD(fake.detach()).view(-1)
        errD_fake = criterion(output, label)
        errD_fake.backward()
        optimizerD.step()
        # Update G: maximize log(D(G(z))).
        netG.zero_grad()
        label.fill_(1.0)
        output = netD(fake).view(-1)
        errG = criterion(output, label)
        errG.backward()
        optimizerG.step()
        log(errD_real + errD_fake, errG)


class Denoiser(nn.Module):
    """A U-Net of one level with time embeddings."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, 2 * dim))
        self.dim = dim
        self.inc = nn.Conv2d(3, dim, 3, padding=1)
        self.block1 = nn.Sequential(nn.GroupNorm(4, dim), nn.SiLU(), nn.Conv2d(dim, dim, 3, padding=1))
        self.down = nn.Conv2d(dim, 2 * dim, 4, 2, 1)
        self.block2 = nn.Sequential(nn.GroupNorm(4, 2 * dim), nn.SiLU(), nn.Conv2d(2 * dim, 2 * dim, 3, padding=1))
        self.attention = nn.MultiheadAttention(2 * dim, 4, batch_first=True)
        self.up = nn.ConvTranspose2d(2 * dim, dim, 4, 2, 1)
        self.block3 = nn.Sequential(nn.GroupNorm(4, 2 * dim), nn.SiLU(), nn.Conv2d(2 * dim, dim, 3, padding=1))
        self.out = nn.Conv2d(dim, 3, 1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        half = self.dim // 2
        angles = t[:, None].float() * torch.exp(torch.arange(half) * -(math.log(10000) / (half - 1)))[None]
        time = self.time(torch.cat((angles.sin(), angles.cos()), dim=-1))
        skip = self.inc(x)
        skip = skip + self.block1(skip)
        h = self.down(skip) + time[:, :, None, None]
        h = h + self.block2(h)
        tokens = h.flatten(2).transpose(1, 2)
        h = h + self.attention(tokens, tokens, tokens, need_weights=False)[0].transpose(1, 2).reshape(h.shape)
        return self.out(self.block3(torch.cat((self.up(h), skip), dim=1)))


@script("lucidrains/denoising-diffusion-pytorch", "accumulation, clipping, EMA copy, sampling in between")
def ddpm() -> None:
    betas = torch.linspace(1e-4, 0.02, 100)
    alphas_cumprod = torch.cumprod(1 - betas, dim=0)
    accumulate = 2
    model = Denoiser()
    ema_model = copy.deepcopy(model).requires_grad_(False)
    model = compiled(model)
    opt = torch.optim.AdamW(model.parameters(), lr=8e-5, betas=(0.9, 0.99))

    def p_losses(x_start: torch.Tensor) -> torch.Tensor:
        t = torch.randint(0, 100, (x_start.shape[0],))
        noise = torch.randn_like(x_start)
        a = alphas_cumprod[t][:, None, None, None]
        return F.mse_loss(model(a.sqrt() * x_start + (1 - a).sqrt() * noise, t), noise)

    for step, images in enumerate(steps(torch.rand(2 * 16, 3, 32, 32) * 2 - 1 for _ in range(STEPS))):
        model.train()
        total_loss = 0.0
        for data in images.chunk(accumulate):
            loss = p_losses(data) / accumulate
            total_loss += loss.item()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for ours, theirs in zip(ema_model.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 1 - 0.995)
        log(total_loss)
        if step % 3 == 2:
            ema_model.eval()
            with torch.inference_mode():
                img = torch.randn(4, 3, 32, 32)
                for t in reversed(range(0, 100, 25)):
                    noise = ema_model(img, torch.full((4,), t))
                    img = (img - noise * betas[t] / (1 - alphas_cumprod[t]).sqrt()) / (1 - betas[t]).sqrt()
                log(img.square().mean())


@script("rosinality/vq-vae-2-pytorch", "codebook in buffers, updated in the forward by an EMA, straight-through")
def vqvae() -> None:
    class Quantize(nn.Module):
        def __init__(self, dim: int, n_embed: int, decay: float = 0.99) -> None:
            super().__init__()
            self.decay = decay
            embed = torch.randn(dim, n_embed)
            self.register_buffer("embed", embed)
            self.register_buffer("cluster_size", torch.zeros(n_embed))
            self.register_buffer("embed_avg", embed.clone())

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            flatten = x.reshape(-1, x.shape[-1])
            dist = flatten.pow(2).sum(1, keepdim=True) - 2 * flatten @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
            embed_ind = (-dist).max(1)[1]
            embed_onehot = F.one_hot(embed_ind, self.embed.shape[1]).type(flatten.dtype)
            quantize = F.embedding(embed_ind.view(*x.shape[:-1]), self.embed.transpose(0, 1))
            if self.training:
                self.cluster_size.data.mul_(self.decay).add_(embed_onehot.sum(0), alpha=1 - self.decay)
                self.embed_avg.data.mul_(self.decay).add_(flatten.transpose(0, 1).detach() @ embed_onehot, alpha=1 - self.decay)
                n = self.cluster_size.sum()
                cluster_size = (self.cluster_size + 1e-5) / (n + self.embed.shape[1] * 1e-5) * n
                self.embed.data.copy_(self.embed_avg / cluster_size.unsqueeze(0))
            diff = (quantize.detach() - x).pow(2).mean()
            return x + (quantize - x).detach(), diff

    class VQVAE(nn.Module):
        def __init__(self, ch: int = 32) -> None:
            super().__init__()
            self.enc = nn.Sequential(
                nn.Conv2d(3, ch, 4, 2, 1), nn.ReLU(), nn.Conv2d(ch, ch, 3, padding=1), nn.ReLU(), nn.Conv2d(ch, 16, 1)
            )
            self.quantize = Quantize(16, 64)
            self.dec = nn.Sequential(
                nn.Conv2d(16, ch, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(ch, ch, 3, padding=1),
                nn.ReLU(),
                nn.ConvTranspose2d(ch, 3, 4, 2, 1),
            )

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            quant, diff = self.quantize(self.enc(x).permute(0, 2, 3, 1))
            return self.dec(quant.permute(0, 3, 1, 2)), diff.unsqueeze(0)

    model = compiled(VQVAE())
    criterion, optimizer = nn.MSELoss(), torch.optim.Adam(model.parameters(), lr=3e-4)
    for img in steps(torch.rand(16, 3, 48, 48) for _ in range(STEPS)):
        model.zero_grad()
        out, latent_loss = model(img)
        recon_loss = criterion(out, img)
        loss = recon_loss + 0.25 * latent_loss.mean()
        loss.backward()
        optimizer.step()
        log(loss)
