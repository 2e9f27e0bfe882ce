"""Training scripts of sequences, graphs, physics and control, in the shape of their sources; models are small and random."""

from __future__ import annotations

import torch
from torch import nn

from .loop import STEPS, compiled, log, script, steps


@script("pytorch/examples: time_sequence_prediction", "LBFGS with a closure, LSTM cells in a Python loop, prediction in between")
def time_sequence() -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 32), nn.LSTMCell(32, 32), nn.Linear(32, 1)

        def forward(self, input: torch.Tensor, future: int = 0) -> torch.Tensor:
            outputs = []
            h_t, c_t, h_t2, c_t2 = (torch.zeros(input.size(0), 32, dtype=torch.double) for _ in range(4))
            for input_t in input.split(1, dim=1):
                h_t, c_t = self.lstm1(input_t, (h_t, c_t))
                h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
                output = self.linear(h_t2)
                outputs += [output]
            for _ in range(future):
                h_t, c_t = self.lstm1(output, (h_t, c_t))
                h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
                output = self.linear(h_t2)
                outputs += [output]
            return torch.cat(outputs, dim=1)

    shift = torch.randint(-80, 80, (97, 1))
    data = torch.sin((torch.arange(33)[None] + shift) / 20.0).double()
    input, target = data[3:, :-1], data[3:, 1:]
    test_input, test_target = data[:3, :-1], data[:3, 1:]
    seq = compiled(Sequence().double())
    criterion = nn.MSELoss()
    optimizer = torch.optim.LBFGS(seq.parameters(), lr=0.8, max_iter=4)
    for _ in steps(range(STEPS)):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            out = seq(input)
            loss = criterion(out, target)
            log(loss)
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            future = 8
            pred = seq(test_input, future=future)
            log(criterion(pred[:, :-future], test_target))


@script("maziarraissi/PINNs: Burgers", "derivatives of the network with create_graph in the loss")
def pinn() -> None:
    net = compiled(nn.Sequential(nn.Linear(2, 64), *(m for _ in range(5) for m in (nn.Tanh(), nn.Linear(64, 64))), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    nu = 0.01 / torch.pi

    def residual(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        u = net(torch.cat([x, t], dim=1))
        ones = torch.ones_like(u)
        u_t = torch.autograd.grad(u, t, ones, create_graph=True)[0]
        u_x = torch.autograd.grad(u, x, ones, create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, ones, create_graph=True)[0]
        return u_t + u * u_x - nu * u_xx

    for x, t in steps((torch.rand(1024, 1) * 2 - 1, torch.rand(1024, 1)) for _ in range(STEPS)):
        optimizer.zero_grad()
        x0 = torch.rand(256, 1) * 2 - 1
        u0 = net(torch.cat([x0, torch.zeros_like(x0)], dim=1))
        loss_u = (u0 + torch.sin(torch.pi * x0)).square().mean()
        loss_f = residual(x.requires_grad_(), t.requires_grad_()).square().mean()
        loss = loss_u + loss_f
        loss.backward()
        optimizer.step()
        log(loss)
