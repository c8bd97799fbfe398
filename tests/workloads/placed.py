"""A workload whose ranks say where they are."""

import os
from pathlib import Path

import torch
from regression import Regression

NETWORK = Path("/proc/self/ns/net")


class Placed(Regression):
    """Prints the rank, its place on its host and the network that it is in, once."""

    def model(self) -> torch.nn.Module:
        if "LOCAL_RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ:
            place = f"rank {os.environ['RANK']} local {os.environ['LOCAL_RANK']} in {NETWORK.readlink()}\n"
            os.write(1, place.encode())
        return super().model()
