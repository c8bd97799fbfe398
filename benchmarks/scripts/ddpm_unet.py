"""A diffusion model learns to remove noise, with the defaults of the published loops: batches of 16, no workers."""

import argparse

import torch
from random_images import RandomJpegs
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

parser = argparse.ArgumentParser()
parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU")
parser.add_argument("--compile", type=int, default=1)
parser.add_argument("--num_epochs", type=int, default=100)
parser.add_argument("--train_batch_size", type=int, default=16)
parser.add_argument("--dataloader_num_workers", type=int, default=0)
args = parser.parse_args()


class Residual(nn.Module):
    def __init__(self, num_in, num_out, num_time):
        super().__init__()
        self.before, self.after = nn.GroupNorm(8, num_in), nn.GroupNorm(8, num_out)
        self.first, self.second = nn.Conv2d(num_in, num_out, 3, padding=1), nn.Conv2d(num_out, num_out, 3, padding=1)
        self.time, self.skip = nn.Linear(num_time, num_out), nn.Conv2d(num_in, num_out, 1)

    def forward(self, x, time):
        hidden = self.first(F.silu(self.before(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.second(F.silu(self.after(hidden)))


class Attention(nn.Module):
    def __init__(self, num_channels):
        super().__init__()
        self.norm = nn.GroupNorm(8, num_channels)
        self.to_qkv, self.to_out = nn.Linear(num_channels, 3 * num_channels), nn.Linear(num_channels, num_channels)

    def forward(self, x):
        rows = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (part.unflatten(2, (8, -1)).transpose(1, 2) for part in self.to_qkv(rows).chunk(3, dim=2))
        attended = self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + attended.transpose(1, 2).unflatten(2, x.shape[2:])


class UNet(nn.Module):
    """Two residual blocks a level, attention on the lowest."""

    def __init__(self, widths, num_time=256):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(num_time, num_time), nn.SiLU(), nn.Linear(num_time, num_time))
        self.register_buffer("frequencies", torch.exp(-9.2 * torch.arange(num_time // 2) / (num_time // 2)))
        self.enter, self.leave = nn.Conv2d(3, widths[0], 3, padding=1), nn.Conv2d(widths[0], 3, 3, padding=1)
        pairs = list(zip(widths, (*widths[1:], widths[-1]), strict=True))
        self.down = nn.ModuleList(
            nn.ModuleList((Residual(a, a, num_time), Residual(a, a, num_time), nn.Conv2d(a, b, 3, 2, 1)))
            for a, b in pairs
        )
        self.middle = nn.ModuleList(
            (
                Residual(widths[-1], widths[-1], num_time),
                Attention(widths[-1]),
                Residual(widths[-1], widths[-1], num_time),
            )
        )
        self.up = nn.ModuleList(
            nn.ModuleList((nn.ConvTranspose2d(b, a, 2, 2), Residual(2 * a, a, num_time), Residual(a, a, num_time)))
            for a, b in reversed(pairs)
        )

    def forward(self, x, step):
        angles = step[:, None] * self.frequencies
        time = self.time(torch.cat((angles.sin(), angles.cos()), dim=1))
        x, kept = self.enter(x), []
        for first, second, smaller in self.down:
            x = second(first(x, time), time)
            kept.append(x)
            x = smaller(x)
        x = self.middle[2](self.middle[1](self.middle[0](x, time)), time)
        for larger, first, second in self.up:
            x = second(first(torch.cat((larger(x), kept.pop()), dim=1), time), time)
        return self.leave(x)


def main():
    torch.manual_seed(0)
    device = "cpu" if args.tiny else "cuda"
    model = UNet((16, 32) if args.tiny else (128, 256, 384, 512)).to(device)
    ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9999))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6)
    dataset = RandomJpegs(20_000, 256, (256, 256), 32 if args.tiny else 64)
    train_dataloader = torch.utils.data.DataLoader(
        dataset, batch_size=args.train_batch_size, shuffle=True, num_workers=args.dataloader_num_workers
    )
    signal = torch.linspace(0.9999, 0.98, 1000, device=device).cumprod(0)
    if args.compile:
        model.compile()
    for epoch in range(args.num_epochs):
        for number, (images, _) in enumerate(train_dataloader):
            images = images.to(device)
            noise, steps = torch.randn_like(images), torch.randint(0, 1000, (len(images),), device=device)
            share = signal[steps, None, None, None]
            noisy = share.sqrt() * images + (1 - share).sqrt() * noise
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = F.mse_loss(model(noisy, steps).float(), noise)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            ema_model.update_parameters(model)
            if number % 100 == 0:
                print(f"epoch {epoch} step {number} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
