"""A project whose modules have the names of Steptune's parts."""

from pathlib import Path

OWN_NAMES = ("tuner", "service", "dashboards", "migrations", "kernels")
WORKLOAD = '''
import torch
from torch.utils.data import TensorDataset

import dashboards
import kernels
import migrations.steps
import service
import tuner
from steptune import Workload


class Mine(Workload):
    """Uses what lies beside it in the parent, in the ranks and in loader workers."""

    global_batch = 4

    def model(self):
        return torch.nn.Linear(tuner.WIDTH, service.WIDTH)

    def dataset(self):
        return TensorDataset(torch.zeros(16, tuner.WIDTH))

    def collate(self, samples):
        assert migrations.steps.WIDTH == kernels.WIDTH == dashboards.WIDTH
        return torch.stack([sample for sample, in samples])

    def loss(self, model, batch):
        return model(batch).square().mean()
'''


def own_modules(folder: Path) -> Path:
    """A project whose modules have the names of Steptune's folders, as files and as packages."""
    folder.mkdir()
    (folder / "train.py").write_text(WORKLOAD)
    for name in OWN_NAMES[:3]:
        (folder / f"{name}.py").write_text("WIDTH = 3\n")
    for name in OWN_NAMES[3:]:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("WIDTH = 3\n")
    (folder / "migrations" / "steps.py").write_text("WIDTH = 3\n")
    return folder
