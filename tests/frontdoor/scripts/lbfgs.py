"""An optimizer with a closure: many backward passes in a step, and the data is one tensor."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.linspace(-1, 1, 128)[:, None]
y = torch.sin(6 * x)
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
for _ in range(96):

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    print(f"loss {loss.item():.7f}", flush=True)
