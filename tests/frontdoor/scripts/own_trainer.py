"""A trainer class of its own, which makes the loader in `run` and calls back."""

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


class Trainer:
    def __init__(self, model, dataset):
        self.model, self.dataset, self.callbacks = model, dataset, []
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)

    def run(self, steps):
        sampler = RandomSampler(self.dataset, replacement=True, num_samples=10**6)
        loader = DataLoader(self.dataset, sampler=sampler, batch_size=8, num_workers=1)
        batches = iter(loader)
        for _ in range(steps):
            x, y = next(batches)
            self.model.train()
            self.loss = nn.functional.mse_loss(self.model(x), y)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            self.optimizer.step()
            for callback in self.callbacks:
                callback(self)


if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = Trainer(nn.Linear(8, 8), TensorDataset(torch.randn(64, 8), torch.randn(64, 8)))
    trainer.callbacks.append(lambda trainer: print(f"loss {trainer.loss.item():.7f}", flush=True))
    trainer.run(96)
