"""A Llama of 1.2 billion parameters, trained as people train it already: bf16, compiled, fused AdamW."""

import torch
import torch.nn.functional as F
from torch import nn

import steptune


class Attention(nn.Module):
    """Causal attention with rotary positions; several query heads share one head of keys and values."""

    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.query = nn.Linear(width, heads * self.head, bias=False)
        self.key = nn.Linear(width, kv_heads * self.head, bias=False)
        self.value = nn.Linear(width, kv_heads * self.head, bias=False)
        self.out = nn.Linear(heads * self.head, width, bias=False)

    def forward(self, x, cos, sin):
        rows, length, _ = x.shape
        q = self.query(x).view(rows, length, self.heads, self.head).transpose(1, 2)
        k = self.key(x).view(rows, length, self.kv_heads, self.head).transpose(1, 2)
        v = self.value(x).view(rows, length, self.kv_heads, self.head).transpose(1, 2)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        shared = self.heads // self.kv_heads
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, -1))


def rotated(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each behind a normalisation."""

    def __init__(self, width, hidden, heads, kv_heads):
        super().__init__()
        self.attention_norm, self.feed_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads, kv_heads)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.feed_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A decoder whose output layer is its embedding."""

    def __init__(self, vocabulary, width, hidden, depth, heads, kv_heads, sequence):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden, heads, kv_heads) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        head = width // heads
        angles = torch.outer(torch.arange(sequence), 500_000.0 ** (-torch.arange(0, head, 2) / head)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.apply(initialise)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.linear(self.norm(x), self.embedding.weight)


def initialise(module):
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


class Llama1B(steptune.Workload):
    """Sizes of Llama 3.2 1B on random tokens, which lie in memory. 45 GB of a device in bf16, compiled."""

    sample_unit = "token"
    max_grad_norm = 1.0
    current = {  # noqa: RUF012 (a workload's own attribute)
        "precision": {"level": "O1", "dtype": "bfloat16"},
        "compile": {"mode": "default"},
    }

    def __init__(
        self,
        batch=4,
        sequence=2048,
        vocabulary=128_256,
        width=2048,
        hidden=8192,
        depth=16,
        heads=32,
        kv_heads=8,
        samples=512,
        plain=False,
    ):
        if plain:
            self.current = {}
        self.global_batch = batch
        self.sequence, self.vocabulary, self.samples = sequence, vocabulary, samples
        self.sizes = (width, hidden, depth, heads, kv_heads)

    def model(self):
        return Llama(self.vocabulary, *self.sizes, self.sequence)

    def blocks(self, model):
        return list(model.blocks)

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocabulary, (self.samples, self.sequence + 1), generator=generator)
        return torch.utils.data.TensorDataset(tokens)

    def loss(self, model, batch):
        (tokens,) = batch
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def num_units(self, batch):
        (tokens,) = batch
        return float(tokens.shape[0] * self.sequence)

    def optimizer(self, named_parameters):
        return torch.optim.AdamW([p for _, p in named_parameters], lr=3e-4, betas=(0.9, 0.95), fused=True)
