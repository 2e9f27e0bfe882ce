"""Training scripts of sequences, graphs, physics and control, in the shape of their sources; models are small and random."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, TensorDataset

from .loop import STEPS, compiled, log, script, steps


@script("pytorch/examples: time_sequence_prediction", "LBFGS with a closure, LSTM cells in a Python loop, prediction in between")
def time_sequence() -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 32), nn.LSTMCell(32, 32), nn.Linear(32, 1)

        def forward(self, series: torch.Tensor, future: int = 0) -> torch.Tensor:
            outputs = []
            h_t, c_t, h_t2, c_t2 = (torch.zeros(series.size(0), 32, dtype=torch.double) for _ in range(4))
            for input_t in series.split(1, dim=1):
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
    inputs, target = data[3:, :-1], data[3:, 1:]
    test_input, test_target = data[:3, :-1], data[:3, 1:]
    seq = compiled(Sequence().double())
    criterion = nn.MSELoss()
    optimizer = torch.optim.LBFGS(seq.parameters(), lr=0.8, max_iter=4)
    for _ in steps(range(STEPS)):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            out = seq(inputs)
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
    net = compiled(
        nn.Sequential(
            nn.Linear(2, 64), *(m for _ in range(5) for m in (nn.Tanh(), nn.Linear(64, 64))), nn.Tanh(), nn.Linear(64, 1)
        )
    )
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


@script("pytorch/examples: reinforce", "many forwards before one backward, sampling, Adam")
def reinforce() -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.affine1, self.dropout, self.affine2 = nn.Linear(64, 256), nn.Dropout(p=0.6), nn.Linear(256, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.relu(self.dropout(self.affine1(x)))
            return F.softmax(self.affine2(x), dim=1)

    policy = compiled(Policy())
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in steps(range(STEPS)):
        saved_log_probs, rewards = [], []
        for _ in range(10):
            state = torch.randn(512, 64)  # of many environments
            m = Categorical(policy(state))
            action = m.sample()
            saved_log_probs.append(m.log_prob(action))
            rewards.append(torch.rand(512))
        R, policy_loss, returns = torch.zeros(512), [], []
        for r in rewards[::-1]:
            R = r + 0.99 * R
            returns.insert(0, R)
        scaled = torch.stack(returns)
        scaled = (scaled - scaled.mean()) / (scaled.std() + 1e-6)
        for log_prob, ret in zip(saved_log_probs, scaled, strict=True):
            policy_loss.append(-log_prob * ret)
        optimizer.zero_grad()
        loss = torch.cat(policy_loss).sum()
        loss.backward()
        optimizer.step()
        log(loss)


@script("pytorch/examples: actor_critic", "episodes of other lengths, many forwards before one backward")
def actor_critic() -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.affine1, self.affine2 = nn.Linear(64, 256), nn.Linear(256, 256)
            self.action_head, self.value_head = nn.Linear(256, 4), nn.Linear(256, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = torch.tanh(self.affine2(torch.tanh(self.affine1(x))))
            return F.softmax(self.action_head(x), dim=-1), self.value_head(x)

    model = compiled(Policy())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    for length in steps((8, 10, 8, 6, 10, 8)):
        saved_actions, returns = [], torch.rand(length, 512)
        for _ in range(length):
            probs, state_value = model(torch.randn(512, 64))
            m = Categorical(probs)
            saved_actions.append((m.log_prob(m.sample()), state_value))
        policy_losses, value_losses = [], []
        for (log_prob, value), R in zip(saved_actions, returns, strict=True):
            advantage = R - value.detach().squeeze(1)
            policy_losses.append(-log_prob * advantage)
            value_losses.append(F.smooth_l1_loss(value.squeeze(1), R))
        optimizer.zero_grad()
        loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
        loss.backward()
        optimizer.step()
        log(loss)


@script("PyTorch tutorial: DQN", "target network updated softly, gradients of chosen actions, clipping by value")
def dqn() -> None:
    def net() -> nn.Sequential:
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))

    policy_net, target_net = net(), net()
    target_net.load_state_dict(policy_net.state_dict())
    policy_net, target_net = compiled(policy_net), compiled(target_net)
    optimizer = torch.optim.AdamW(policy_net.parameters(), lr=3e-4, amsgrad=True)
    criterion = nn.SmoothL1Loss()
    for state in steps(torch.randn(4096, 64) for _ in range(STEPS)):
        with torch.no_grad():
            policy_net(state[:1]).max(1).indices.view(1, 1)
        action, reward, next_state = torch.randint(4, (4096, 1)), torch.rand(4096), torch.randn(4096, 64)
        non_final_mask = torch.rand(4096) > 0.1
        state_action_values = policy_net(state).gather(1, action)
        next_state_values = torch.zeros(4096)
        with torch.no_grad():
            next_state_values[non_final_mask] = target_net(next_state).max(1).values[non_final_mask]
        loss = criterion(state_action_values, (next_state_values * 0.99 + reward).unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy_net.parameters(), 100)
        optimizer.step()
        target_state, policy_state = target_net.state_dict(), policy_net.state_dict()
        for key in policy_state:
            target_state[key] = policy_state[key] * 0.005 + target_state[key] * 0.995
        target_net.load_state_dict(target_state)
        log(loss)


@script("pytorch/examples: gcn", "sparse adjacency matrix, the whole graph in each step, evaluation in between")
def gcn() -> None:
    class GraphConv(nn.Module):
        def __init__(self, inner: int, outer: int) -> None:
            super().__init__()
            self.kernel, self.bias = nn.Parameter(torch.randn(inner, outer) * 0.1), nn.Parameter(torch.zeros(outer))

        def forward(self, x: torch.Tensor, adj: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(adj, x @ self.kernel) + self.bias

    class GCN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gc1, self.gc2, self.gc3 = GraphConv(64, 128), GraphConv(128, 128), GraphConv(128, 7)
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor, adj: torch.Tensor) -> torch.Tensor:
            x = self.dropout(F.relu(self.gc1(x, adj)))
            x = self.dropout(F.relu(self.gc2(x, adj)))
            return F.log_softmax(self.gc3(x, adj), dim=1)

    nodes = 2708
    edges = torch.randint(nodes, (2, 10000))
    adj = torch.sparse_coo_tensor(edges, torch.full((10000,), 0.2), (nodes, nodes)).coalesce()
    features, labels = torch.randn(nodes, 64), torch.randint(7, (nodes,))
    idx_train, idx_val = torch.arange(1200), torch.arange(1200, 1600)
    model = compiled(GCN())
    criterion, optimizer = nn.NLLLoss(), torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in steps(range(STEPS)):
        model.train()
        optimizer.zero_grad()
        output = model(features, adj)
        loss = criterion(output[idx_train], labels[idx_train])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            output = model(features, adj)
            log(loss, (output[idx_val].argmax(1) == labels[idx_val]).float().mean())


@script("pytorch/examples: gat", "attention masked by a dense adjacency matrix, the whole graph in each step")
def gat() -> None:
    class GraphAttention(nn.Module):
        def __init__(self, inner: int, outer: int, heads: int, concat: bool) -> None:
            super().__init__()
            self.heads, self.hidden, self.concat = heads, outer // heads if concat else outer, concat
            self.W = nn.Parameter(torch.randn(inner, self.hidden * heads) * 0.1)
            self.a = nn.Parameter(torch.randn(heads, 2 * self.hidden, 1) * 0.1)

        def forward(self, h: torch.Tensor, adj: torch.Tensor) -> torch.Tensor:
            n = h.shape[0]
            h = F.dropout(torch.mm(h, self.W).view(n, self.heads, self.hidden).permute(1, 0, 2), 0.4, self.training)
            source, target = h @ self.a[:, : self.hidden], h @ self.a[:, self.hidden :]
            e = F.leaky_relu(source + target.mT, 0.2)
            attention = F.softmax(torch.where(adj > 0, e, -9e16 * torch.ones_like(e)), dim=-1)
            h_prime = torch.matmul(F.dropout(attention, 0.4, self.training), h)
            return h_prime.permute(1, 0, 2).reshape(n, -1) if self.concat else h_prime.mean(dim=0)

    class GAT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gat1, self.gat2 = GraphAttention(64, 64, 4, True), GraphAttention(64, 7, 1, False)

        def forward(self, x: torch.Tensor, adj: torch.Tensor) -> torch.Tensor:
            return F.log_softmax(self.gat2(F.elu(self.gat1(x, adj)), adj), dim=1)

    nodes = 500
    adj = (torch.rand(nodes, nodes) < 0.02).float() + torch.eye(nodes)
    features, labels = torch.randn(nodes, 64), torch.randint(7, (nodes,))
    model = compiled(GAT())
    criterion, optimizer = nn.NLLLoss(), torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    for _ in steps(range(STEPS)):
        model.train()
        optimizer.zero_grad()
        loss = criterion(model(features, adj)[:140], labels[:140])
        loss.backward()
        optimizer.step()
        log(loss)


@script("pyg-team/pytorch_geometric: message passing", "scatter of messages, graphs of other sizes in each batch")
def message_passing() -> None:
    class Layer(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.message = nn.Sequential(nn.Linear(2 * dim, dim), nn.ReLU(), nn.Linear(dim, dim))
            self.update = nn.GRUCell(dim, dim)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            row, col = edge_index
            messages = self.message(torch.cat([x[row], x[col]], dim=-1))
            out = torch.zeros_like(x).index_add_(0, col, messages)
            return self.update(out, x)

    class Net(nn.Module):
        def __init__(self, dim: int = 48) -> None:
            super().__init__()
            self.embed, self.lin = nn.Linear(16, dim), nn.Linear(dim, 2)
            self.layers = nn.ModuleList([Layer(dim) for _ in range(3)])

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x, edge_index)
            pooled = torch.zeros(32, x.size(1)).index_add_(0, batch, x)
            return self.lin(F.dropout(pooled, p=0.5, training=self.training))

    model = compiled(Net())
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=0.01)
    model.train()
    for nodes in steps((1024, 960, 1024, 896, 960, 1024)):
        x, edge_index = torch.randn(nodes, 16), torch.randint(nodes, (2, 4 * nodes))
        out = model(x, edge_index, torch.arange(nodes) % 32)
        loss = criterion(out, torch.randint(2, (32,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log(loss)


@script("Blealtan/efficient-kan", "spline bases, scheduler, validation in between")
def kan() -> None:
    class KANLinear(nn.Module):
        def __init__(self, inner: int, outer: int, grid_size: int = 5, order: int = 3) -> None:
            super().__init__()
            self.order = order
            grid = torch.arange(-order, grid_size + order + 1) * (2 / grid_size) - 1
            self.register_buffer("grid", grid.expand(inner, -1).contiguous())
            self.base_weight = nn.Parameter(torch.randn(outer, inner) * 0.1)
            self.spline_weight = nn.Parameter(torch.randn(outer, inner, grid_size + order) * 0.1)

        def b_splines(self, x: torch.Tensor) -> torch.Tensor:
            grid, x = self.grid, x.unsqueeze(-1)
            bases = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
            for k in range(1, self.order + 1):
                left = (x - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)]) * bases[:, :, :-1]
                bases = left + (grid[:, k + 1 :] - x) / (grid[:, k + 1 :] - grid[:, 1:-k]) * bases[:, :, 1:]
            return bases.contiguous()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spline = F.linear(self.b_splines(x).view(x.size(0), -1), self.spline_weight.view(self.spline_weight.size(0), -1))
            return F.linear(F.silu(x), self.base_weight) + spline

    model = compiled(nn.Sequential(KANLinear(64, 32), KANLinear(32, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    criterion = nn.CrossEntropyLoss()
    for _ in range(2):
        model.train()
        for images, labels in steps((torch.rand(1024, 64) * 2 - 1, torch.randint(10, (1024,))) for _ in range(STEPS // 2)):
            optimizer.zero_grad()
            output = model(images)
            loss = criterion(output, labels)
            loss.backward()
            optimizer.step()
            log(loss, (output.argmax(dim=1) == labels).float().mean())
        model.eval()
        with torch.no_grad():
            log(criterion(model(torch.rand(1024, 64) * 2 - 1), torch.randint(10, (1024,))))
        scheduler.step()


@script("SeanNaren/deepspeech.pytorch", "convolutions and GRU, CTC loss on lengths, batches of other lengths, SGD with Nesterov")
def speech_ctc() -> None:
    class DeepSpeech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(1, 16, (11, 11), (2, 2), (5, 5)), nn.BatchNorm2d(16), nn.Hardtanh(0, 20, inplace=True)
            )
            self.rnn = nn.GRU(16 * 32, 64, 1, bidirectional=True)
            self.fc = nn.Linear(128, 29, bias=False)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.conv(x)
            x = x.view(x.size(0), -1, x.size(3)).permute(2, 0, 1)
            x, _ = self.rnn(x.contiguous())
            return self.fc(x).log_softmax(-1), (lengths + 1) // 2

    model = compiled(DeepSpeech())
    criterion = nn.CTCLoss(reduction="sum", zero_infinity=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True, weight_decay=1e-5)
    model.train()
    for frames in steps((160, 160, 128, 160, 128, 160)):
        inputs, input_lengths = torch.rand(8, 1, 64, frames), torch.full((8,), frames)
        targets, target_lengths = torch.randint(1, 29, (8, 10)), torch.randint(5, 10, (8,))
        out, output_lengths = model(inputs, input_lengths)
        loss = criterion(out, targets, output_lengths, target_lengths) / inputs.size(0)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 400)
        optimizer.step()
        log(loss)


@script(
    "fastai: tabular learner", "embeddings of categories, batch norm, one-cycle schedule, data set in memory, smaller last batch"
)
def tabular() -> None:
    class TabularModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeds = nn.ModuleList([nn.Embedding(n, d) for n, d in ((50, 16), (100, 20), (20, 8), (12, 6))])
            self.emb_drop, self.bn_cont = nn.Dropout(0.04), nn.BatchNorm1d(6)
            sizes = (56, 200, 100)
            layers = [
                nn.Sequential(nn.Linear(a, b, bias=False), nn.ReLU(inplace=True), nn.BatchNorm1d(b), nn.Dropout(0.1))
                for a, b in itertools.pairwise(sizes)
            ]
            self.layers = nn.Sequential(*layers, nn.Linear(100, 2))

        def forward(self, x_cat: torch.Tensor, x_cont: torch.Tensor) -> torch.Tensor:
            x = self.emb_drop(torch.cat([e(x_cat[:, i]) for i, e in enumerate(self.embeds)], 1))
            return self.layers(torch.cat([x, self.bn_cont(x_cont)], 1))

    rows = 3000 * 5 + 1200
    cats = torch.stack([torch.randint(n, (rows,)) for n in (50, 100, 20, 12)], 1)
    loader = DataLoader(TensorDataset(cats, torch.randn(rows, 6), torch.randint(2, (rows,))), batch_size=3000, shuffle=True)
    model = compiled(TabularModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=STEPS)
    model.train()
    for x_cat, x_cont, y in steps(loader):
        loss = F.cross_entropy(model(x_cat, x_cont), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        log(loss)


@script("Lightning: autoencoder", "LightningModule, clipping, accumulation, validation, automatic optimization")
def lightning_autoencoder() -> None:
    import lightning

    class LitAutoEncoder(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            encoder = [nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 8, 3, 1, 1)]
            decoder = [nn.Conv2d(8, 32, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(32, 1, 4, 2, 1)]
            self.network = compiled(nn.Sequential(*encoder, *decoder))

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            if batch_idx % 2 == 0:
                next(marks)
            loss = F.mse_loss(self.network(batch[0]), batch[0])
            log(loss)
            return loss

        def validation_step(self, batch: list[torch.Tensor], _batch_idx: int) -> None:
            log(F.mse_loss(self.network(batch[0]), batch[0]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    marks = iter(steps(range(STEPS)))
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train = DataLoader(TensorDataset(torch.rand(96 * STEPS, 1, 28, 28)), batch_size=96)
    trainer.fit(LitAutoEncoder(), train, DataLoader(TensorDataset(torch.rand(96, 1, 28, 28)), batch_size=96))


@script("facebookresearch/dlrm", "embedding bags with sparse gradients, two optimizers, interactions")
def dlrm() -> None:
    class DLRM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb_l = nn.ModuleList([nn.EmbeddingBag(1000, 32, mode="sum", sparse=True) for _ in range(6)])
            self.bot_l = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, 32), nn.ReLU())
            self.top_l = nn.Sequential(
                nn.Linear(53, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1), nn.Sigmoid()
            )

        def forward(self, dense_x: torch.Tensor, offsets: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
            x = self.bot_l(dense_x)
            ly = [emb(indices[k], offsets[k]) for k, emb in enumerate(self.emb_l)]
            T = torch.cat([x, *ly], dim=1).view(x.size(0), -1, 32)
            Z = torch.bmm(T, T.transpose(1, 2))
            li, lj = torch.tril_indices(7, 7, -1)
            return self.top_l(torch.cat([x, Z[:, li, lj]], dim=1))

    model = DLRM()
    sparse = torch.optim.SparseAdam([p for e in model.emb_l for p in e.parameters()], lr=1e-3)
    dense = torch.optim.AdamW([*model.bot_l.parameters(), *model.top_l.parameters()], lr=1e-3)
    model = compiled(model)
    loss_fn = nn.BCELoss()
    for X in steps(torch.rand(2048, 13) for _ in range(STEPS)):
        lS_o, lS_i = torch.arange(0, 4096, 2).repeat(6, 1), torch.randint(1000, (6, 4096))
        E = loss_fn(model(X, lS_o, lS_i), torch.randint(2, (2048, 1)).float())
        for optimizer in (sparse, dense):
            optimizer.zero_grad()
        E.backward()
        for optimizer in (sparse, dense):
            optimizer.step()
        log(E)
