"""A classifier as an Accelerate script, with the exported settings: FOLDER EXAMPLE SECONDS SECONDS.

`accelerate launch` reads the YAML.
"""

import sys

sys.path.insert(0, sys.argv[1])  # the folder of accelerate_settings.py

# First: it sets variables that torch reads when it is loaded.
from accelerate_settings import (  # noqa: I001
    ACCELERATOR,
    DATALOADER,
    OPTIMIZER,
    prepared,
    prepared_dataset,
    prepared_loader,
    set_up,
)

from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from classifiers import EXAMPLES
from loop import train
from rates import report


def main():
    set_up()
    model, dataset, optimizer = EXAMPLES[sys.argv[2]](Path(sys.argv[1]))
    model = prepared(model)
    steps = train(
        Accelerator(**ACCELERATOR),
        model,
        optimizer(model.parameters(), **OPTIMIZER),
        torch.utils.data.DataLoader(prepared_dataset(dataset), shuffle=True, drop_last=True, **DATALOADER),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        count=lambda batch: len(batch[0]),
        prepared_loader=prepared_loader,
    )
    report(steps, warm_up_s=float(sys.argv[3]), measure_s=float(sys.argv[4]))


if __name__ == "__main__":
    main()
