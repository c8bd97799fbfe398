"""DigitsViT as an Accelerate script of a user, with the exported settings; `accelerate launch` reads the YAML."""

import sys

sys.path.insert(0, sys.argv[1])  # the folder of accelerate_settings.py

# First: it sets variables that torch reads when it is loaded.
from accelerate_settings import ACCELERATOR, DATALOADER, OPTIMIZER, set_up  # noqa: I001

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from examples.digits_vit import Digits, VisionTransformer
from loop import train
from rates import report


def main():
    set_up()
    model = VisionTransformer()
    steps = train(
        Accelerator(**ACCELERATOR),
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, **OPTIMIZER),
        torch.utils.data.DataLoader(Digits(), shuffle=True, drop_last=True, **DATALOADER),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        count=lambda batch: len(batch[0]),
    )
    report(steps, warm_up_s=float(sys.argv[2]), measure_s=float(sys.argv[3]))


if __name__ == "__main__":
    main()
