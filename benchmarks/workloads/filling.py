"""A transformer in FP32 whose batch fills a device: nearly all of its memory are activations."""

import torch
import torch.nn.functional as F
from torch import nn

import steptune


class Filling(steptune.Workload):
    """A narrow causal transformer on random tokens: much to keep, little to compute."""

    def __init__(self, batch=64, sequence=256, width=256, depth=8, vocabulary=1024):
        self.global_batch = batch
        self.sequence, self.width, self.depth, self.vocabulary = sequence, width, depth, vocabulary

    def model(self):
        return Transformer(self.vocabulary, self.width, self.depth)

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        shape = (4 * self.global_batch, self.sequence + 1)
        return torch.utils.data.TensorDataset(torch.randint(self.vocabulary, shape, generator=generator))

    def loss(self, model, batch):
        (tokens,) = batch
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def optimizer(self, named_parameters):
        return torch.optim.AdamW([p for _, p in named_parameters], lr=3e-4)


class Transformer(nn.Module):
    def __init__(self, vocabulary, width, depth):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, width, head_width=64):
        super().__init__()
        self.num_heads = max(1, width // head_width)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.projections(self.norm_1(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))
