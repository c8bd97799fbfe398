"""Samples that draw random numbers, in a model with convolutions; the script seeds nothing."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __len__(self):
        return 1600

    def __getitem__(self, index):
        return torch.rand(3, 8, 8) + index / 1600, index % 4


loader = DataLoader(Pictures(), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for images, labels in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.7f}", flush=True)
