"""ViT-B/16 in a loop of Accelerate: bf16, inductor, JPEG files decoded by four workers."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from random_images import RandomJpegs
from transformers import ViTConfig, ViTForImageClassification

parser = argparse.ArgumentParser()
parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU")
parser.add_argument("--compile", type=int, default=1)
parser.add_argument("--epochs", type=int, default=10)
options = parser.parse_args()
set_seed(0)
accelerator = Accelerator(
    mixed_precision="bf16", dynamo_backend="inductor" if options.compile else "no", cpu=options.tiny
)
small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
config = ViTConfig(num_labels=1000, **({**small, "image_size": 64} if options.tiny else {}))
model = ViTForImageClassification(config)
data = RandomJpegs(50_000, 512, (500, 376), config.image_size)
num_workers = 1 if options.tiny else 4
loader = torch.utils.data.DataLoader(data, batch_size=8 if options.tiny else 64, shuffle=True, num_workers=num_workers)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()
for epoch in range(options.epochs):
    for number, (pixels, labels) in enumerate(loader):
        logits = model(pixel_values=pixels).logits
        loss = torch.nn.functional.cross_entropy(logits, labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number % 100 == 0:
            accelerator.print(f"epoch {epoch} step {number} loss {loss.item():.4f}", flush=True)
