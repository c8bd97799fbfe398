"""Facts that the hooks of a process have gathered so far about its training loop."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .sample_times import SampleTimes
from .steps import StepFinder


@dataclass
class Made:
    """Facts about the creation and use of a loader or an optimizer.

    Attributes:
        number: Number in the order of creation.
        place: Line of the user's code that made it; empty where none is known.
        values: A loader's attributes as plain values: the loader may be gone while its iterator is in use.
        num_batches: Number of batches that a loader has given in this epoch.
        num_backwards: Number of backward passes that followed a batch of a loader.
    """

    number: int
    place: str
    values: dict[str, Any] = field(default_factory=dict)
    num_batches: int = 0
    num_backwards: int = 0


class ObservedLoop:
    """Observed parts of the loop, with the number of times that each was used.

    Attributes:
        finder: Determines which optimizers' steps end a step of the training.
        loaders: Facts about each loader, in the order of creation.
        optimizers: Facts about each optimizer that still exists.
        optimizer_kinds: Classes of all optimizers, in the order of creation.
        notes: Number of uses of each feature, by kind.
        called_modules: Outermost modules that were called with gradients in the first steps, with their numbers of
            calls.
        module_places: Lines of the user's code that called them.
        kinds: Steps by their numbers of backward passes and batches.
        samples: Times of all loaders' samples, in this process and in those forked from it.
    """

    samples = SampleTimes()

    def __init__(self) -> None:
        self.finder = StepFinder()
        self.loaders: list[Made] = []
        self.optimizers: WeakKeyDictionary[Any, Made] = WeakKeyDictionary()
        self.optimizer_kinds: list[str] = []
        self.notes: dict[str, Counter[str]] = {}
        self.called_modules: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()
        self.module_places: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self.num_calls_without_grad = 0
        self.kinds: Counter[tuple[int, int]] = Counter()

    def note(self, kind: str, text: str) -> None:
        """Count one use of a feature of this kind, such as "schedulers", described by a text, such as the scheduler's
        class.
        """
        if kind not in self.notes:
            self.notes[kind] = Counter()
        self.notes[kind][text] += 1
