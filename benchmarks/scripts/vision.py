"""Training scripts that classify, detect, or learn without labels, in the shape of their sources; models are small and random."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .loop import STEPS, compiled, log, script, steps


@script("pytorch/examples: mnist", "data set in memory, Adadelta, test after the epoch")
def mnist() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, 1), nn.Conv2d(16, 32, 3, 1)
            self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
            self.fc1, self.fc2 = nn.Linear(32 * 12 * 12, 64), nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.relu(self.conv2(F.relu(self.conv1(x))))
            x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
            return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)

    train_set = TensorDataset(torch.randn(64 * STEPS, 1, 28, 28), torch.randint(10, (64 * STEPS,)))
    test_set = TensorDataset(torch.randn(64, 1, 28, 28), torch.randint(10, (64,)))
    model = compiled(Net())
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    model.train()
    for data, target in steps(DataLoader(train_set, batch_size=64, shuffle=True)):
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        log(loss)
    scheduler.step()

    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in DataLoader(test_set, batch_size=64):
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1, keepdim=True).eq(target.view_as(output.argmax(dim=1, keepdim=True))).sum().item()
    log(test_loss / len(test_set))


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.bn2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.downsample = None
        if stride != 1 or inner != outer:
            self.downsample = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(out)) + identity, inplace=True)


def resnet(classes: int, width: int = 16) -> nn.Sequential:
    """A small ResNet."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        BasicBlock(width, width, 1),
        BasicBlock(width, width, 1),
        BasicBlock(width, 2 * width, 2),
        BasicBlock(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )


class VisionTransformer(nn.Module):
    """Patches, a class token and an encoder."""

    def __init__(self, image: int = 32, patch: int = 4, dim: int = 64, depth: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.to_patch_embedding = nn.Conv2d(3, dim, patch, patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.pos_embedding = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, 0.1, F.gelu, batch_first=True, norm_first=True)
        self.transformer = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.mlp_head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))

    def forward(self, img: torch.Tensor) -> torch.Tensor:
        x = self.to_patch_embedding(img).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.size(0), -1, -1), x), dim=1) + self.pos_embedding
        return self.mlp_head(self.transformer(x)[:, 0])


@script("pytorch/vision: references/detection", "a dictionary of losses, targets of other lengths, warm-up, SGD")
def detection() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = resnet(1, width=12)[:7]
            self.cls_head, self.box_head = nn.Conv2d(48, 5, 3, padding=1), nn.Conv2d(48, 4, 3, padding=1)

        def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
            features = self.body(torch.stack(images))
            logits = self.cls_head(features).flatten(2).transpose(1, 2)
            boxes = self.box_head(features).flatten(2).transpose(1, 2).sigmoid()
            classes, regressions = [], []
            for logit, box, target in zip(logits, boxes, targets, strict=True):
                matched = torch.cdist(target["boxes"], box.detach()).argmin(dim=1)
                wanted = torch.zeros(len(box), dtype=torch.long).index_put((matched,), target["labels"])
                classes.append(F.cross_entropy(logit, wanted))
                regressions.append(F.smooth_l1_loss(box[matched], target["boxes"]))
            return {"loss_classifier": torch.stack(classes).mean(), "loss_box_reg": torch.stack(regressions).mean()}

    def make_batch() -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
        counts = torch.randint(1, 4, (8,)).tolist()
        return [torch.rand(3, 48, 48) for _ in counts], [
            {"boxes": torch.rand(n, 4), "labels": torch.randint(1, 5, (n,))} for n in counts
        ]

    model = compiled(Detector())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02, momentum=0.9, weight_decay=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.001, total_iters=STEPS)
    model.train()
    for images, targets in steps(make_batch() for _ in range(STEPS)):
        loss_dict = model(images, targets)
        losses = sum(loss_dict.values())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        lr_scheduler.step()
        log(losses)


@script(
    "pytorch/vision: references/classification", "averaged model (EMA), label smoothing, mixup, clipping, evaluation of the EMA"
)
def classification_ema() -> None:
    model = resnet(10)
    model_ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    model = compiled(model)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 2e-5}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for i, (image, target) in enumerate(steps((torch.rand(32, 3, 32, 32), torch.randint(10, (32,))) for _ in range(STEPS))):
        model.train()
        lam = torch.distributions.Beta(0.2, 0.2).sample()
        image = lam * image + (1 - lam) * image.roll(1, 0)
        mixed = lam * F.one_hot(target, 10) + (1 - lam) * F.one_hot(target.roll(1, 0), 10)
        output = model(image)
        loss = criterion(output, mixed)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model_ema.update_parameters(model)
        log(loss)
        if i % 3 == 2:
            model_ema.eval()
            with torch.inference_mode():
                log(criterion(model_ema(torch.rand(16, 3, 32, 32)), torch.randint(10, (16,))))


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
