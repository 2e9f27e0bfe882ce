"""Training scripts of self-supervised learning, in the shape of their sources; models are small and random."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from .loop import STEPS, compiled, log, script, steps
from .vision import VisionTransformer, resnet


@script("sthalles/SimCLR", "two views in one batch, GradScaler, loss outside, accuracy in the loop")
def simclr() -> None:
    batch_size, temperature = 24, 0.07
    criterion = nn.CrossEntropyLoss()

    def info_nce_loss(features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.cat([torch.arange(batch_size) for _ in range(2)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
        features = F.normalize(features, dim=1)
        similarity_matrix = torch.matmul(features, features.T)
        mask = torch.eye(labels.shape[0], dtype=torch.bool)
        labels = labels[~mask].view(labels.shape[0], -1)
        similarity_matrix = similarity_matrix[~mask].view(similarity_matrix.shape[0], -1)
        positives = similarity_matrix[labels.bool()].view(labels.shape[0], -1)
        negatives = similarity_matrix[~labels.bool()].view(similarity_matrix.shape[0], -1)
        logits = torch.cat([positives, negatives], dim=1)
        return logits / temperature, torch.zeros(logits.shape[0], dtype=torch.long)

    model = resnet(64)
    model[-1] = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), model[-1])
    model = compiled(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.0003, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for views in steps([torch.rand(batch_size, 3, 32, 32), torch.rand(batch_size, 3, 32, 32)] for _ in range(STEPS)):
        images = torch.cat(views, dim=0)
        features = model(images)
        logits, labels = info_nce_loss(features)
        loss = criterion(logits, labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        log(loss, (logits.argmax(1) == labels).float().mean())


@script("facebookresearch/moco", "momentum encoder under no_grad inside the forward, queue in a buffer, SGD")
def moco() -> None:
    class MoCo(nn.Module):
        def __init__(self, dim: int = 32, K: int = 256, m: float = 0.999, T: float = 0.07) -> None:
            super().__init__()
            self.K, self.m, self.T = K, m, T
            self.encoder_q = resnet(dim)
            self.encoder_k = copy.deepcopy(self.encoder_q).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
            self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def _dequeue_and_enqueue(self, keys: torch.Tensor) -> None:
            ptr = int(self.queue_ptr)
            self.queue[:, ptr : ptr + keys.shape[0]] = keys.T
            self.queue_ptr[0] = (ptr + keys.shape[0]) % self.K

        def forward(self, im_q: torch.Tensor, im_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            q = F.normalize(self.encoder_q(im_q), dim=1)
            with torch.no_grad():
                for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
                    param_k.data = param_k.data * self.m + param_q.data * (1.0 - self.m)
                k = F.normalize(self.encoder_k(im_k), dim=1)
            l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
            l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
            logits = torch.cat([l_pos, l_neg], dim=1) / self.T
            self._dequeue_and_enqueue(k)
            return logits, torch.zeros(logits.shape[0], dtype=torch.long)

    model = compiled(MoCo())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
    model.train()
    for im_q, im_k in steps((torch.rand(32, 3, 32, 32), torch.rand(32, 3, 32, 32)) for _ in range(STEPS)):
        output, target = model(im_q=im_q, im_k=im_k)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss)


@script("facebookresearch/dino", "crops of two sizes, EMA teacher, clipping of each parameter, centre in a buffer")
def dino() -> None:
    class Backbone(VisionTransformer):
        def forward(self, img: torch.Tensor) -> torch.Tensor:
            x = self.to_patch_embedding(img).flatten(2).transpose(1, 2)
            pos, side = self.pos_embedding[:, 1:], math.isqrt(x.size(1))
            pos = F.interpolate(pos.reshape(1, 8, 8, -1).permute(0, 3, 1, 2), size=(side, side), mode="bicubic")
            x = x + pos.flatten(2).transpose(1, 2)
            x = torch.cat((self.cls_token.expand(x.size(0), -1, -1), x), dim=1)
            return self.mlp_head(self.transformer(x)[:, 0])

    class DINOLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(1, 128))

        def forward(self, student_output: torch.Tensor, teacher_output: torch.Tensor) -> torch.Tensor:
            student_out = (student_output / 0.1).chunk(4)
            teacher_out = F.softmax((teacher_output - self.center) / 0.04, dim=-1).detach().chunk(2)
            total_loss, n_loss_terms = 0, 0
            for iq, q in enumerate(teacher_out):
                for v in range(len(student_out)):
                    if v == iq:
                        continue
                    total_loss += torch.sum(-q * F.log_softmax(student_out[v], dim=-1), dim=-1).mean()
                    n_loss_terms += 1
            with torch.no_grad():
                self.center = self.center * 0.9 + teacher_output.mean(dim=0, keepdim=True) * 0.1
            return total_loss / n_loss_terms

    student = Backbone(depth=2, classes=128)
    teacher = copy.deepcopy(student).requires_grad_(False)
    student, teacher = compiled(student), compiled(teacher)
    dino_loss = DINOLoss()
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4)
    for it, (large, small) in enumerate(
        steps((torch.rand(2 * 8, 3, 32, 32), torch.rand(2 * 8, 3, 16, 16)) for _ in range(STEPS))
    ):
        for param_group in optimizer.param_groups:
            param_group["weight_decay"] = 0.04 + 0.01 * it
        teacher_output = teacher(large)
        student_output = torch.cat([student(large), student(small)])
        loss = dino_loss(student_output, teacher_output)
        optimizer.zero_grad()
        loss.backward()
        for p in student.parameters():
            if p.grad is not None:
                clip_coef = 3.0 / (p.grad.data.norm(2) + 1e-6)
                if clip_coef < 1:
                    p.grad.data.mul_(clip_coef)
        optimizer.step()
        with torch.no_grad():
            for param_q, param_k in zip(student.parameters(), teacher.parameters(), strict=True):
                param_k.data.mul_(0.996).add_(0.004 * param_q.detach().data)
        log(loss)


@script("mlfoundations/open_clip", "two towers, a scale that is clamped after each step, loss outside")
def clip() -> None:
    class CLIP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.visual = VisionTransformer(depth=2, classes=64)
            self.token_embedding, self.positional = nn.Embedding(256, 64), nn.Parameter(torch.randn(24, 64) * 0.01)
            layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, F.gelu, batch_first=True, norm_first=True)
            self.transformer = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.ln_final, self.text_projection = nn.LayerNorm(64), nn.Parameter(torch.randn(64, 64) * 0.1)
            self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

        def forward(self, image: torch.Tensor, text: torch.Tensor) -> dict[str, torch.Tensor]:
            image_features = F.normalize(self.visual(image), dim=-1)
            mask = torch.full((24, 24), float("-inf")).triu_(1)
            x = self.ln_final(self.transformer(self.token_embedding(text) + self.positional, mask=mask))
            x = x[torch.arange(x.shape[0]), text.argmax(dim=-1)] @ self.text_projection
            return {
                "image_features": image_features,
                "text_features": F.normalize(x, dim=-1),
                "logit_scale": self.logit_scale.exp(),
            }

    model = compiled(CLIP())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)
    for images, texts in steps((torch.rand(32, 3, 32, 32), torch.randint(256, (32, 24))) for _ in range(STEPS)):
        optimizer.zero_grad()
        out = model(images, texts)
        logits = out["logit_scale"] * out["image_features"] @ out["text_features"].T
        labels = torch.arange(len(images))
        total_loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        total_loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=2.0)
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        log(total_loss)
