"""GPT of 124 million parameters in a loop that makes its own batches, as nanoGPT does: bf16, compiled, fused AdamW."""

import argparse
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU")
parser.add_argument("--compile", type=int, default=1)
parser.add_argument("--max_iters", type=int, default=100_000)
options = parser.parse_args()
n_layer, n_head, n_embd, block_size, batch_size, vocab_size = 12, 12, 768, 1024, 12, 50_304
device = "cuda"
if options.tiny:
    n_layer, n_head, n_embd, block_size, batch_size, vocab_size, device = 2, 4, 64, 64, 4, 512, "cpu"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        parts = self.c_attn(self.ln_1(x)).split(n_embd, dim=2)
        q, k, v = (part.unflatten(2, (n_head, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.Sequential(*(Block() for _ in range(n_layer)))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        logits = self.lm_head(self.ln_f(self.h(x)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
tokens = np.random.default_rng(0).integers(0, vocab_size, 10_000_000, dtype=np.uint16)
ctx = torch.autocast(device, dtype=torch.bfloat16) if device == "cuda" else nullcontext()


def get_batch():
    ix = torch.randint(len(tokens) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(tokens[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    if device == "cuda":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x, y


model = GPT().to(device)
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=device == "cuda")
if options.compile:
    model = torch.compile(model)
X, Y = get_batch()
for iter_num in range(options.max_iters):
    with ctx:
        logits, loss = model(X, Y)
    X, Y = get_batch()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % 50 == 0:
        print(f"iter {iter_num}: loss {loss.item():.4f}", flush=True)
