"""Two optimizers at module level: three backward passes in a step, transforms that are modules."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Normalise(nn.Module):
    def forward(self, x):
        return (x - 0.5) / 0.5


class Pictures(Dataset):
    def __init__(self):
        self.transform = Normalise()

    def __len__(self):
        return 800

    def __getitem__(self, index):
        return self.transform(torch.rand(16, generator=torch.Generator().manual_seed(index)))


torch.manual_seed(0)
loader = DataLoader(Pictures(), batch_size=8, shuffle=True)
generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16))
critic = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
optimizer_d = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
for real in loader:
    critic.zero_grad()
    loss_real = criterion(critic(real), torch.ones(len(real), 1))
    loss_real.backward()
    fake = generator(torch.randn(len(real), 4))
    loss_fake = criterion(critic(fake.detach()), torch.zeros(len(real), 1))
    loss_fake.backward()
    optimizer_d.step()
    generator.zero_grad()
    loss_g = criterion(critic(fake), torch.ones(len(real), 1))
    loss_g.backward()
    optimizer_g.step()
    print(f"loss {loss_real.item():.7f} {loss_fake.item():.7f} {loss_g.item():.7f}", flush=True)
