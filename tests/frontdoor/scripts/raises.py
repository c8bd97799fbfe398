"""Raises inside the loop, below a loader and a backward pass."""

import torch
from torch.utils.data import DataLoader, Dataset


class Broken(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 5:
            raise KeyError("sample 5 is missing")
        return torch.randn(4)


model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(Broken()):
    model(x).sum().backward()
    optimizer.step()
