"""ResNet-50 in the idiom of timm's script: AMP in bfloat16, compiled, averaged weights, four workers."""

import argparse
from functools import partial

import torch
from random_images import RandomJpegs
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import ResNetConfig, ResNetForImageClassification

parser = argparse.ArgumentParser()
parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU")
parser.add_argument("--compile", type=int, default=1)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("-b", "--batch-size", type=int, default=128)
parser.add_argument("-j", "--workers", type=int, default=4)
parser.add_argument("--pin-mem", action="store_true")
parser.add_argument("--lr", type=float, default=0.1)


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, amp_autocast, model_ema, device):
    model.train()
    for batch_idx, (images, target) in enumerate(loader):
        images, target = images.to(device), target.to(device)
        with amp_autocast():
            output = model(images).logits
            loss = loss_fn(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model_ema.update_parameters(model)
        if batch_idx % 50 == 0:
            print(f"Train: {epoch} [{batch_idx}/{len(loader)}] Loss: {loss.item():.3f}", flush=True)


def main():
    args = parser.parse_args()
    torch.manual_seed(42)
    device = "cpu" if args.tiny else "cuda"
    small = {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1]}
    model = ResNetForImageClassification(ResNetConfig(num_labels=1000, **(small if args.tiny else {}))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=2e-5, nesterov=True)
    model_ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9998))
    if args.compile:
        model.compile()
    dataset = RandomJpegs(1_281_167, 512, (500, 376), 64 if args.tiny else 224)
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        pin_memory=args.pin_mem,
        drop_last=True,
    )
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    amp_autocast = partial(torch.autocast, device_type=device, dtype=torch.bfloat16)
    for epoch in range(args.epochs):
        train_one_epoch(epoch, model, loader, optimizer, loss_fn, amp_autocast, model_ema, device)


if __name__ == "__main__":
    main()
