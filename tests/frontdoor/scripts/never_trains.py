"""Uses a model without training it."""

import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(4, 1)
with torch.no_grad():
    for (x,) in DataLoader(TensorDataset(torch.randn(8, 4))):
        model(x)
