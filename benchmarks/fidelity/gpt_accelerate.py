"""CharGPT as an Accelerate script of a user, with the exported settings; `accelerate launch` reads the YAML."""

import sys

sys.path.insert(0, sys.argv[1])  # the folder of accelerate_settings.py

# First: it sets variables that torch reads when it is loaded.
from accelerate_settings import ACCELERATOR, DATALOADER, OPTIMIZER, set_up  # noqa: I001

from pathlib import Path

import torch
from accelerate import Accelerator
from examples.char_gpt import CharGPT
from loop import train
from rates import report


def main():
    set_up()
    workload = CharGPT()
    workload.directory = Path(sys.argv[1])
    workload.prepare(workload.directory)
    model = workload.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **OPTIMIZER)
    loader = torch.utils.data.DataLoader(
        workload.dataset(), shuffle=True, drop_last=True, collate_fn=workload.collate, **DATALOADER
    )
    steps = train(
        Accelerator(**ACCELERATOR),
        model,
        optimizer,
        loader,
        loss=workload.loss,
        count=workload.num_units,
        scheduler=workload.scheduler(optimizer),
        max_grad_norm=workload.max_grad_norm,
    )
    report(steps, warm_up_s=float(sys.argv[2]), measure_s=float(sys.argv[3]))


if __name__ == "__main__":
    main()
