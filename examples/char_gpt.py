"""A character GPT on the source text of Python's standard library, with samples of different lengths.

Every sample is one function or class of a module, so lengths vary; a batch is padded to its longest.
Throughput counts characters without the padding.

    steptune tune examples/char_gpt.py:CharGPT --budget 8m
"""

import ast
import json
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import steptune

MODULES = (
    "ast",
    "argparse",
    "calendar",
    "collections/__init__",
    "difflib",
    "heapq",
    "inspect",
    "json/decoder",
    "random",
    "textwrap",
)
MIN_LENGTH, MAX_LENGTH = 32, 128
PADDING = 0


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x):
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=rate)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int = 96, depth: int = 4, num_heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Embedding(MAX_LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embedding.weight.T


class Definitions(torch.utils.data.Dataset):
    """One function or class a line of a JSON file, as bytes."""

    def __init__(self, path: Path) -> None:
        texts = json.loads(path.read_text())
        self.texts = [torch.tensor(list(text.encode()[:MAX_LENGTH])) for text in texts]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index]


def standard_library_definitions() -> list[str]:
    """Source of the functions and classes of a few standard modules."""
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for name in MODULES:
        source = (library / f"{name}.py").read_text(encoding="utf-8")
        lines = source.splitlines(keepends=True)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                texts.append("".join(lines[node.lineno - 1 : node.end_lineno]))
    return [text for text in texts if len(text) >= MIN_LENGTH]


class CharGPT(steptune.Workload):
    """Tokens are characters; the loss is their mean, padding left out."""

    global_batch = 8
    sample_unit = "token"
    max_grad_norm = 1.0

    def model(self):
        return GPT()

    def prepare(self, directory):
        (directory / "definitions.json").write_text(json.dumps(standard_library_definitions()))

    def dataset(self):
        return Definitions(self.directory / "definitions.json")

    def collate(self, samples):
        return nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=PADDING)

    def num_units(self, batch):
        return int((batch[:, 1:] != PADDING).sum())

    def loss(self, model, batch):
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PADDING)

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
