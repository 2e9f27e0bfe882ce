"""Training scripts of series, physics, graphs and other functions, in the shape of their sources; models are small and random."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

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
