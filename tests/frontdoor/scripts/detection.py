"""Targets that are lists of dictionaries, a loss that is read before backward, a warm-up schedule at first."""

import math
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Scenes(Dataset):
    def __len__(self):
        return 800

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(index)
        count = 1 + index % 3
        target = {"boxes": torch.rand(count, 4, generator=random), "labels": torch.ones(count, dtype=torch.int64)}
        return torch.rand(3, 8, 8 + index % 2, generator=random), target


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 4)

    def forward(self, images, targets):
        losses = [
            (self.head(self.backbone(image[None]).mean((2, 3))) - target["boxes"]).square().mean()
            for image, target in zip(images, targets, strict=True)
        ]
        return {"loss_box": torch.stack(losses).mean()}


def collate(batch):
    return tuple(zip(*batch, strict=True))


torch.manual_seed(0)
loader = DataLoader(Scenes(), batch_size=4, shuffle=True, collate_fn=collate)
model = Detector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-3, total_iters=100)
for images, targets in loader:
    loss = sum(model(list(images), [dict(target) for target in targets]).values())
    value = loss.item()
    if not math.isfinite(value):
        print(f"Loss is {value}, stopping training")
        sys.exit(1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    warm_up.step()
    print(f"loss {value:.7f}", flush=True)
