"""Sparse gradients of an embedding, in an iterable dataset without a length."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Clicks(IterableDataset):
    def __iter__(self):
        random = torch.Generator().manual_seed(0)
        while True:
            yield torch.randint(0, 1000, (4,), generator=random), torch.rand(1, generator=random).round()


torch.manual_seed(0)
embedding = nn.EmbeddingBag(1000, 8, sparse=True)
top = nn.Linear(8, 1)
model = nn.Sequential(embedding, top)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, (ids, click) in enumerate(DataLoader(Clicks(), batch_size=16)):
    loss = nn.functional.binary_cross_entropy_with_logits(model(ids), click)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.7f}", flush=True)
    if number == 96:
        break
