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


@script("caogang/wgan-gp", "gradient penalty (create_graph), critic trained twice for each generator step")
def wgan_gp() -> None:
    def mlp(inner: int, outer: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(inner, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, outer),
        )

    netG, netD = compiled(mlp(32, 32)), compiled(mlp(32, 1))
    optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-4, betas=(0.5, 0.9))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-4, betas=(0.5, 0.9))

    def calc_gradient_penalty(real_data: torch.Tensor, fake_data: torch.Tensor) -> torch.Tensor:
        alpha = torch.rand(real_data.size(0), 1)
        interpolates = (alpha * real_data + (1 - alpha) * fake_data).requires_grad_()
        disc_interpolates = netD(interpolates)
        gradients = torch.autograd.grad(
            disc_interpolates, interpolates, torch.ones_like(disc_interpolates), create_graph=True, retain_graph=True
        )[0]
        return ((gradients.norm(2, dim=1) - 1) ** 2).mean() * 0.1

    for real in steps(torch.randn(1024, 32) for _ in range(STEPS)):
        for p in netD.parameters():
            p.requires_grad = True
        for _ in range(2):
            netD.zero_grad()
            D_real = netD(real).mean()
            with torch.no_grad():
                fake = netG(torch.randn(1024, 32))
            D_fake = netD(fake).mean()
            gradient_penalty = calc_gradient_penalty(real, fake)
            D_cost = D_fake - D_real + gradient_penalty
            D_cost.backward()
            optimizerD.step()
        for p in netD.parameters():
            p.requires_grad = False
        netG.zero_grad()
        G_cost = -netD(netG(torch.randn(1024, 32))).mean()
        G_cost.backward()
        optimizerG.step()
        log(D_cost, G_cost)


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


@script("junyanz/pytorch-CycleGAN-and-pix2pix", "four networks, requires_grad switched, a buffer of old images, two optimizers")
def cyclegan() -> None:
    def generator(width: int = 12) -> nn.Sequential:
        def norm(c: int) -> list[nn.Module]:
            return [nn.InstanceNorm2d(c), nn.ReLU(True)]

        return nn.Sequential(
            nn.ReflectionPad2d(3),
            nn.Conv2d(3, width, 7),
            *norm(width),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            *norm(2 * width),
            nn.Conv2d(2 * width, 2 * width, 3, 1, 1),
            *norm(2 * width),
            nn.ConvTranspose2d(2 * width, width, 3, 2, 1, output_padding=1),
            *norm(width),
            nn.ReflectionPad2d(3),
            nn.Conv2d(width, 3, 7),
            nn.Tanh(),
        )

    def discriminator(width: int = 16) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1),
            nn.LeakyReLU(0.2, True),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.LeakyReLU(0.2, True),
            nn.Conv2d(2 * width, 1, 4, 1, 1),
        )

    netG_A, netG_B = compiled(generator()), compiled(generator())
    netD_A, netD_B = compiled(discriminator()), compiled(discriminator())
    optimizer_G = torch.optim.Adam([*netG_A.parameters(), *netG_B.parameters()], lr=2e-4, betas=(0.5, 0.999))
    optimizer_D = torch.optim.Adam([*netD_A.parameters(), *netD_B.parameters()], lr=2e-4, betas=(0.5, 0.999))
    pool: list[torch.Tensor] = []

    def gan(prediction: torch.Tensor, real: bool) -> torch.Tensor:
        return F.mse_loss(prediction, torch.full_like(prediction, float(real)))

    def backward_D(netD: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        loss_D = (gan(netD(real), True) + gan(netD(fake.detach()), False)) * 0.5
        loss_D.backward()
        return loss_D

    for real_A, real_B in steps((torch.rand(2, 3, 48, 48), torch.rand(2, 3, 48, 48)) for _ in range(STEPS)):
        fake_B, fake_A = netG_A(real_A), netG_B(real_B)
        rec_A, rec_B = netG_B(fake_B), netG_A(fake_A)
        for p in (*netD_A.parameters(), *netD_B.parameters()):
            p.requires_grad = False
        optimizer_G.zero_grad()
        idt = F.l1_loss(netG_A(real_B), real_B) + F.l1_loss(netG_B(real_A), real_A)
        cycle = F.l1_loss(rec_A, real_A) + F.l1_loss(rec_B, real_B)
        loss_G = gan(netD_A(fake_B), True) + gan(netD_B(fake_A), True) + 10.0 * cycle + 5.0 * idt
        loss_G.backward()
        optimizer_G.step()
        for p in (*netD_A.parameters(), *netD_B.parameters()):
            p.requires_grad = True
        optimizer_D.zero_grad()
        pool.append(fake_B.detach().clone())
        loss_D = backward_D(netD_A, real_B, pool[len(pool) // 2]) + backward_D(netD_B, real_A, fake_A)
        optimizer_D.step()
        log(loss_G, loss_D)


@script("yenchenlin/nerf-pytorch", "coarse and fine network, volume rendering in eager code, learning rate by hand")
def nerf() -> None:
    class NeRF(nn.Module):
        def __init__(self, W: int = 64) -> None:
            super().__init__()
            self.pts_linears = nn.ModuleList([nn.Linear(27, W), *(nn.Linear(W + 27 if i == 2 else W, W) for i in range(1, 5))])
            self.alpha_linear, self.rgb_linear = nn.Linear(W, 1), nn.Linear(W, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x
            for i, layer in enumerate(self.pts_linears):
                if i == 2:
                    h = torch.cat([x, h], -1)
                h = F.relu(layer(h))
            return torch.cat([self.rgb_linear(h), self.alpha_linear(h)], -1)

    def embed(pts: torch.Tensor) -> torch.Tensor:
        return torch.cat([pts, *(fn(pts * 2.0**k) for k in range(4) for fn in (torch.sin, torch.cos))], -1)

    def render(
        network: nn.Module, rays_o: torch.Tensor, rays_d: torch.Tensor, z: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pts = rays_o[:, None] + rays_d[:, None] * z[..., None]
        raw = network(embed(pts.reshape(-1, 3))).reshape(*z.shape, 4)
        dists = torch.cat([z[:, 1:] - z[:, :-1], torch.full_like(z[:, :1], 1e10)], -1)
        alpha = 1.0 - torch.exp(-F.relu(raw[..., 3]) * dists)
        weights = alpha * torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
        return torch.sum(weights[..., None] * torch.sigmoid(raw[..., :3]), -2), weights

    model, model_fine = compiled(NeRF()), compiled(NeRF())
    optimizer = torch.optim.Adam([*model.parameters(), *model_fine.parameters()], lr=5e-4, betas=(0.9, 0.999))
    batches = ((torch.randn(128, 3), torch.randn(128, 3), torch.rand(128, 3)) for _ in range(STEPS))
    for global_step, (rays_o, rays_d, target_s) in enumerate(steps(batches)):
        z_vals = torch.linspace(2.0, 6.0, 32).expand(128, 32) + torch.rand(128, 32) * 0.1
        rgb0, weights = render(model, rays_o, rays_d, z_vals)
        idx = torch.multinomial(weights.detach() + 1e-5, 32, replacement=True)
        z_fine = torch.cat([z_vals, torch.gather(z_vals, 1, idx) + 0.01], -1).sort(-1)[0]
        rgb, _ = render(model_fine, rays_o, rays_d, z_fine)
        optimizer.zero_grad()
        img_loss = torch.mean((rgb - target_s) ** 2)
        loss = img_loss + torch.mean((rgb0 - target_s) ** 2)
        psnr = -10.0 * torch.log10(img_loss)
        loss.backward()
        optimizer.step()
        for param_group in optimizer.param_groups:
            param_group["lr"] = 5e-4 * (0.1 ** (global_step / 250000))
        log(loss, psnr)
