"""Training scripts of generative models, in the shape of their sources; models are small, weights and data random."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from .loop import STEPS, compiled, log, script, steps


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


@script("pytorch/examples: vae", "loss outside, Adam, reconstructions after the epoch")
def vae() -> None:
    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc21, self.fc22 = nn.Linear(784, 400), nn.Linear(400, 20), nn.Linear(400, 20)
            self.fc3, self.fc4 = nn.Linear(20, 400), nn.Linear(400, 784)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            h1 = F.relu(self.fc1(x.view(-1, 784)))
            mu, logvar = self.fc21(h1), self.fc22(h1)
            z = mu + torch.randn_like(logvar) * torch.exp(0.5 * logvar)
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar

    def loss_function(recon_x: torch.Tensor, x: torch.Tensor, mu: torch.Tensor, logvar: torch.Tensor) -> torch.Tensor:
        bce = F.binary_cross_entropy(recon_x, x.view(-1, 784), reduction="sum")
        return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())

    model = compiled(VAE())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for data in steps(torch.rand(2048, 1, 28, 28) for _ in range(STEPS)):
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()
        log(loss)
    model.eval()
    with torch.no_grad():
        data = torch.rand(256, 1, 28, 28)
        recon_batch, mu, logvar = model(data)
        log(loss_function(recon_batch, data, mu, logvar))


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
