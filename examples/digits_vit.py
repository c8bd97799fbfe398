"""A small vision transformer on scikit-learn's digits: the workload of `make demo`.

steptune tune examples/digits_vit.py:DigitsViT --budget 4m
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import steptune


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Cuts an 8 x 8 image into 2 x 2 patches and classifies the mean of their features."""

    def __init__(self, width: int = 64, depth: int = 6, num_heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.patchify = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.position = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        x = self.patchify(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


class Digits(torch.utils.data.Dataset):
    """1,797 grey images of 8 x 8 pixels, shifted by up to one pixel at random."""

    def __init__(self) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32).div(8).sub(1).unsqueeze(1)
        self.labels = torch.tensor(digits.target)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index):
        shift = torch.randint(-1, 2, (2,)).tolist()
        return torch.roll(self.images[index], shift, dims=(1, 2)), self.labels[index]


class DigitsViT(steptune.Workload):
    """The workload: model, data, loss, optimizer."""

    global_batch = 64

    def model(self):
        return VisionTransformer()

    def dataset(self):
        return Digits()

    def loss(self, model, batch):
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def optimizer(self, named_parameters):
        return torch.optim.AdamW([p for _, p in named_parameters], lr=1e-3, weight_decay=0.05)
