"""Training scripts of adversarial networks, in the shape of their sources; models are small and random."""

from __future__ import annotations

import torch
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
