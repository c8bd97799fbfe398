"""Batches without a loader, the next one drawn before backward; gradients accumulated over four of them."""

import torch
from torch import nn

torch.manual_seed(0)
data = torch.randint(0, 32, (4096,))
model = nn.Sequential(nn.Embedding(32, 16), nn.Flatten(), nn.Linear(16 * 8, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scaler = torch.amp.GradScaler("cpu", enabled=False)


def get_batch():
    at = torch.randint(len(data) - 9, (4,))
    return torch.stack([data[i : i + 8] for i in at]), torch.stack([data[i + 8] for i in at])


x, y = get_batch()
for _ in range(96):
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y) / 4
        x, y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(f"loss {loss.item():.7f}", flush=True)
