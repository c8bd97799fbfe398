"""Processes that update the same parameters, each when it likes."""

import torch
import torch.multiprocessing as mp
from torch import nn


def train(model):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(400):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    mp.set_start_method("spawn")
    model = nn.Linear(8, 8)
    model.share_memory()
    processes = [mp.Process(target=train, args=(model,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
