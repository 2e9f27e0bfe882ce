"""Training scripts of tables, and one of Lightning, in the shape of their sources; models are small and random."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .loop import STEPS, compiled, log, script, steps


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
