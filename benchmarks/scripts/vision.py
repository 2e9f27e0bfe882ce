"""Training scripts of computer vision, in the shape of their sources; models are small, weights and data random."""

from __future__ import annotations

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


@script("pytorch/examples: imagenet", "ResNet, SGD with momentum, accuracy in the loop, validation in between")
def imagenet() -> None:
    def accuracy(output: torch.Tensor, target: torch.Tensor, topk: tuple[int, ...] = (1,)) -> list[torch.Tensor]:
        with torch.no_grad():
            _, pred = output.topk(max(topk), 1, True, True)
            correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
            return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]

    model = compiled(resnet(100))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    for _ in range(2):
        model.train()
        train_loader = [(torch.randn(32, 3, 32, 32), torch.randint(100, (32,))) for _ in range(STEPS // 2)]
        for images, target in steps(train_loader):
            output = model(images)
            loss = criterion(output, target)
            top1, top5 = accuracy(output, target, topk=(1, 5))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(loss, top1, top5)
        model.eval()
        with torch.no_grad():
            for images, target in [(torch.randn(32, 3, 32, 32), torch.randint(100, (32,)))]:
                output = model(images)
                log(criterion(output, target))
        scheduler.step()
