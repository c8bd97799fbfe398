"""Lightning with two optimizers that the module steps itself."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Pair(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(4, 8), nn.Linear(8, 1)

    def training_step(self, batch, number):
        optimizer_g, optimizer_d = self.optimizers()
        noise = torch.randn(len(batch[0]), 4)
        loss_g = -self.critic(self.generator(noise)).mean()
        optimizer_g.zero_grad()
        self.manual_backward(loss_g)
        optimizer_g.step()
        loss_d = (self.critic(self.generator(noise).detach()) - self.critic(batch[0])).mean()
        optimizer_d.zero_grad()
        self.manual_backward(loss_d)
        optimizer_d.step()
        print(f"loss {loss_g.item():.7f} {loss_d.item():.7f}", flush=True)

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=1e-4) for part in (self.generator, self.critic)]


torch.manual_seed(0)
data = TensorDataset(torch.randn(800, 8))
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
trainer.fit(Pair(), DataLoader(data, batch_size=8, shuffle=True))
