"""DigitsViT as an Accelerate script of a user, with the exported settings; `accelerate launch` reads the YAML."""

import sys

sys.path.insert(0, sys.argv[1])  # the folder of accelerate_settings.py

# First: it sets variables that torch reads when it is loaded.
from accelerate_settings import ACCELERATOR, DATALOADER, OPTIMIZER, set_up  # noqa: I001

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from examples.digits_vit import Digits, VisionTransformer
from rates import report

set_up()
accelerator = Accelerator(**ACCELERATOR)
model = VisionTransformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, **OPTIMIZER)
loader = torch.utils.data.DataLoader(Digits(), shuffle=True, drop_last=True, **DATALOADER)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


def steps():
    samples = 0
    while True:
        for images, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
            samples += len(images)
            if accelerator.sync_gradients:
                yield samples
                samples = 0


if __name__ == "__main__":
    report(steps(), warm_up_s=float(sys.argv[2]), measure_s=float(sys.argv[3]))
