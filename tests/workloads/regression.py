"""A small regression that trains in well under a millisecond per step, for tests of the machinery around it."""

import os

import torch
from torch.utils.data import Dataset

import steptune


class Numbers(Dataset):
    """Vectors and a linear function of them."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(length, 8, generator=generator)
        self.targets = self.inputs @ torch.randn(8, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


class Regression(steptune.Workload):
    """The plain workload; the others here change one thing about it."""

    def __init__(self, length: int = 256, batch: int = 8, workers: int = 0) -> None:
        self.length = length
        self.global_batch = batch
        if workers:
            self.current = {"data_loading": {"num_workers": workers}}

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2)), torch.nn.Linear(8, 1))

    def dataset(self) -> Dataset:
        return Numbers(self.length)

    def loss(self, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(model(inputs), targets)


class Penalised(Regression):
    """With a small penalty, which 16 bits hide."""

    def loss(self, model, batch):
        return super().loss(model, batch) + 1e-3 * sum(parameter.square().sum() for parameter in model.parameters())


class Normalised(Regression):
    """Has batch statistics, which each rank takes of its own part of a batch.

    Args:
        deal: Which part that is on two ranks: its "own", that of the "first" on both, or another half of the same
            samples ("halves").
    """

    def __init__(self, length: int = 256, deal: str = "own") -> None:
        super().__init__(length)
        self._deal = deal

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))

    def batch_transform(self, batch: list[torch.Tensor]) -> list[torch.Tensor]:
        return batch if self._deal == "own" else [self._dealt(leaf) for leaf in batch]

    def _dealt(self, leaf: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(leaf) for _ in range(2)]
        torch.distributed.all_gather(parts, leaf)
        return parts[0] if self._deal == "first" else torch.cat(parts)[torch.distributed.get_rank() :: 2]


class CountsThreads(Regression):
    """Fails in a rank whose operators have another number of threads than this."""

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self._wanted = wanted

    def loss(self, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if torch.distributed.is_initialized() and torch.get_num_threads() != self._wanted:
            raise RuntimeError(f"{torch.get_num_threads()} threads, not {self._wanted}")
        return super().loss(model, batch)


class DiesInStep(Regression):
    """One of several ranks ends in its first step."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def loss(self, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == self._rank:
            os._exit(3)
        return super().loss(model, batch)


class Together(Regression):
    """Raises where ranks train with other parameters than rank 0 does."""

    def loss(self, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if torch.distributed.is_initialized():
            own = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
            first = own.clone()
            torch.distributed.broadcast(first, src=0)
            if not torch.equal(own, first):
                raise RuntimeError("ranks train with different parameters")
        return super().loss(model, batch)


class Rest(Regression):
    """Trains on the last, smaller batch of an epoch too."""

    drop_last = False
