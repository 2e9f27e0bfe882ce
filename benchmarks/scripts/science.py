"""Training scripts of series, graphs and tables, in the shape of their sources; models are small and random."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .loop import STEPS, compiled, log, script, steps


@script("pytorch/examples: time_sequence_prediction", "LBFGS with a closure, LSTM cells in a Python loop, prediction in between")
def time_sequence() -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 51), nn.LSTMCell(51, 51), nn.Linear(51, 1)

        def forward(self, series: torch.Tensor, future: int = 0) -> torch.Tensor:
            outputs = []
            h_t, c_t, h_t2, c_t2 = (torch.zeros(series.size(0), 51, dtype=torch.double) for _ in range(4))
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
    data = torch.sin((torch.arange(17)[None] + shift) / 20.0).double()
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
            future = 4
            pred = seq(test_input, future=future)
            log(criterion(pred[:, :-future], test_target))


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
