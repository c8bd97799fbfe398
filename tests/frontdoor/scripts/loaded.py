"""Says how often it was loaded, and reads a file that it opened before training.

Where it is asked to, it has a thread, makes a folder, or goes on from its checkpoint.
"""

import os
import sys
import threading

import torch
from torch.utils.data import DataLoader, Dataset

with open(os.environ["LOADS"], "a") as loads:
    loads.write(f"{os.getpid()}\n")
torch.manual_seed(0)
with open("numbers.txt", "w") as numbers:
    numbers.write("".join(f"{torch.rand(1).item():.6f}\n" for _ in range(4000)))
lines = open("numbers.txt")  # noqa: SIM115


class Numbers(Dataset):
    def __len__(self):
        return 800

    def __getitem__(self, index):
        return torch.tensor([float(lines.readline()), float(index % 3)])


if "--thread" in sys.argv:
    threading.Thread(target=threading.Event().wait, name="writer", daemon=True).start()
model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for batch in DataLoader(Numbers(), batch_size=4, shuffle=True):
    if "--folder" in sys.argv and optimizer.state == {}:
        os.mkdir("made")
    if "--resume" in sys.argv and optimizer.state == {} and os.path.exists("last.pt"):
        model.load_state_dict(torch.load("last.pt"))
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    if "--resume" in sys.argv:
        torch.save(model.state_dict(), "last.pt")
    print(f"loss {loss.item():.9f} {torch.get_num_threads()}", flush=True)
