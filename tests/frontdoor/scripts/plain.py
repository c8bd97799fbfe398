"""A plain loop in a function, with clipping, a schedule and a checkpoint for every few steps."""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(model, loader, optimizer, scheduler):
    os.makedirs("out", exist_ok=True)
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        print(f"loss {loss.item():.7f}", flush=True)
        if number % 8 == 0:
            torch.save(model.state_dict(), "out/last.pt")
            with open("log.txt", "a") as log:
                log.write(f"{number}\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=96)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(arguments.steps * 8, 16), torch.randint(0, 4, (arguments.steps * 8,)))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.steps)
    train(model, loader, optimizer, scheduler)
    print("the end")


if __name__ == "__main__":
    main()
