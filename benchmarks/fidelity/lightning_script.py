"""A classifier under the Trainer of Lightning, with the exported settings: FOLDER EXAMPLE SECONDS SECONDS."""

import sys

sys.path.insert(0, sys.argv[1])  # the folder of lightning_trainer.py

# First: it sets variables that torch reads when it is loaded.
from lightning_trainer import DATALOADER, OPTIMIZER, prepared, prepared_dataset, prepared_loader, trainer  # noqa: I001

from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from classifiers import EXAMPLES
from rates import Meter


class Classifier(lightning.LightningModule):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model, self.made_optimizer = model, optimizer

    def training_step(self, batch, index):
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def configure_optimizers(self):
        return self.made_optimizer(self.parameters(), **OPTIMIZER)


class Measured(lightning.Callback):
    def __init__(self, meter):
        self.meter = meter

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        trainer.should_stop = self.meter.step(len(batch[0]))


def main():
    folder = Path(sys.argv[1])
    meter = Meter(warm_up_s=float(sys.argv[3]), measure_s=float(sys.argv[4]))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    made = trainer(max_epochs=-1, min_epochs=0, callbacks=[Measured(meter)], enable_model_summary=False, **quiet)
    model, dataset, optimizer = EXAMPLES[sys.argv[2]](folder)
    loader = torch.utils.data.DataLoader(prepared_dataset(dataset), shuffle=True, drop_last=True, **DATALOADER)
    made.fit(prepared(Classifier(model, optimizer)), prepared_loader(loader))


if __name__ == "__main__":
    main()
