"""GPT-2 of transformers in a plain loop over a DataLoader, with the library's own collator and schedule."""

import argparse

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator, get_linear_schedule_with_warmup, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU")
parser.add_argument("--max_steps", type=int, default=100_000)
options = parser.parse_args()
set_seed(0)
sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512} if options.tiny else {}
device = "cpu" if options.tiny else "cuda"


class Texts(Dataset):
    def __init__(self, length, num_tokens, num_words):
        self.tokens = torch.randint(0, num_words, (length, num_tokens))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


config = GPT2Config(**sizes)
texts = Texts(4096, 32 if options.tiny else 512, config.vocab_size)
loader = DataLoader(texts, batch_size=8, shuffle=True, collate_fn=default_data_collator)
model = GPT2LMHeadModel(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
schedule = get_linear_schedule_with_warmup(optimizer, 100, options.max_steps)
for _ in range(options.max_steps // len(loader) + 1):
    for batch in loader:
        loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
