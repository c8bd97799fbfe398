"""Two ranks under DistributedDataParallel or fully sharded, started by torchrun."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(1600, 8), torch.randn(1600, 8))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    if "--shard" in sys.argv:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    os.makedirs("out", exist_ok=True)
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"loss {loss.item():.7f}", flush=True)
            torch.save(model.state_dict(), "out/last.pt")
    del loss, model, optimizer  # a reducer that outlives its process group may wait for it for ever
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
