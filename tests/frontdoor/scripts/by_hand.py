"""Parameters updated by hand: there is no optimizer."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.LSTM(8, 8)
decoder = nn.Linear(8, 8)
data = torch.randn(600, 4, 8)


def repackage(hidden):
    return tuple(part.detach() for part in hidden)


def train():
    hidden = (torch.zeros(1, 4, 8), torch.zeros(1, 4, 8))
    for i in range(0, len(data) - 5, 5):
        model.zero_grad()
        decoder.zero_grad()
        hidden = repackage(hidden)
        output, hidden = model(data[i : i + 5], hidden)
        loss = nn.functional.mse_loss(decoder(output), data[i + 1 : i + 6])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in [*model.parameters(), *decoder.parameters()]:
            p.data.add_(p.grad, alpha=-0.1)
        print(f"loss {loss.item():.7f}", flush=True)


train()
