"""A classifier under the Trainer of transformers, with the exported settings: FOLDER EXAMPLE SECONDS SECONDS."""

import sys

sys.path.insert(0, sys.argv[1])  # the folder of training_arguments.py

# First: it sets variables that torch reads when it is loaded.
from training_arguments import (  # noqa: I001
    ARGUMENTS,
    OPTIMIZER,
    prepared,
    prepared_dataset,
    prepared_trainer,
    training_arguments,
)

from pathlib import Path

import torch
import torch.nn.functional as F
from classifiers import EXAMPLES
from rates import Meter
from transformers import Trainer, TrainerCallback


class Classifier(torch.nn.Module):
    """A model that gives its loss, as those of transformers do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images, labels):
        logits = self.model(images)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Measured(TrainerCallback):
    def __init__(self, meter, batch):
        self.meter, self.batch = meter, batch

    def on_step_end(self, args, state, control, **others):
        control.should_training_stop = self.meter.step(self.batch)


def collate(samples):
    images, labels = torch.utils.data.default_collate(samples)
    return {"images": images, "labels": labels}


def main():
    folder = Path(sys.argv[1])
    arguments = training_arguments(
        str(folder / "out"),
        max_steps=1_000_000_000,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model, dataset, optimizer = EXAMPLES[sys.argv[2]](folder)
    model = prepared(Classifier(model))
    batch = ARGUMENTS["per_device_train_batch_size"] * ARGUMENTS["gradient_accumulation_steps"]
    made = Trainer(
        model,
        arguments,
        train_dataset=prepared_dataset(dataset),
        data_collator=collate,
        optimizers=(optimizer(model.parameters(), **OPTIMIZER), None),
        callbacks=[Measured(Meter(warm_up_s=float(sys.argv[3]), measure_s=float(sys.argv[4])), batch)],
    )
    prepared_trainer(made).train()


if __name__ == "__main__":
    main()
