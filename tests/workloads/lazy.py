"""A workload whose model imports a module when it is built."""

import os
import sys

from regression import Regression


class Lazy(Regression):
    """Its loss is wrong in a process that had to import the module itself, but for the one that prepared the data."""

    def __init__(self):
        super().__init__()
        self.was_imported = "tabnanny" in sys.modules

    def prepare(self, directory):
        (directory / "prepared_by").write_text(str(os.getpid()))

    def model(self):
        import tabnanny  # noqa: F401

        return super().model()

    def loss(self, model, batch):
        prepared_by = int((self.directory / "prepared_by").read_text())
        if not self.was_imported and os.getpid() != prepared_by:
            raise RuntimeError("imported by the trial itself")
        return super().loss(model, batch)
