"""Lightning's own loop: forward and backward run inside the optimizer's step, after a sanity check."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

    def training_step(self, batch, number):
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        print(f"loss {loss.item():.7f}", flush=True)
        return loss

    def validation_step(self, batch, number):
        self.model(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


torch.manual_seed(0)
data = TensorDataset(torch.randn(800, 8), torch.randn(800, 8))
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
trainer.fit(Module(), DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=64))
