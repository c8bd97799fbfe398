"""A task module that holds model and loss, an average of the weights, accumulation, and epochs with an evaluation."""

from copy import deepcopy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.criterion = model, nn.CrossEntropyLoss()
        self.averaged = deepcopy(model).requires_grad_(False)

    def forward(self, x, y):
        return self.criterion(self.model(x), y)

    @torch.no_grad()
    def average(self):
        for mean, value in zip(self.averaged.parameters(), self.model.parameters(), strict=True):
            mean.lerp_(value, 0.01)


def create_loader(dataset, batch_size, **options):
    return DataLoader(dataset, batch_size=batch_size, **options)


torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 3, 8, 8), torch.randint(0, 4, (256,)))
loader = create_loader(data, 4, shuffle=True, drop_last=True)
evaluation = create_loader(data, 64)
task = Task(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)))
task = task.to(memory_format=torch.channels_last)
decay = [p for p in task.model.parameters() if p.ndim > 1]
rest = [p for p in task.model.parameters() if p.ndim <= 1]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}])
for epoch in range(6):
    task.train()
    for number, (x, y) in enumerate(loader):
        loss = task(x.contiguous(memory_format=torch.channels_last), y) / 2
        loss.backward()
        if number % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
            task.average()
            print(f"loss {loss.item():.7f}", flush=True)
    task.eval()
    with torch.no_grad():
        correct = sum((task.averaged(x).argmax(1) == y).sum().item() for x, y in evaluation)
    print(f"epoch {epoch} correct {correct}", flush=True)
