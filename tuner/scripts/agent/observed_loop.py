"""Facts about a training loop that the hooks of its process have gathered so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .steps import StepFinder


@dataclass
class Made:
    """Facts about a loader or an optimizer.

    Attributes:
        number: In the order of creation.
        place: Line of the user's code that made it; empty where none is known.
        values: A loader's attributes, as plain values: it may be gone while its iterator is used.
        num_batches: That a loader has given in this epoch.
        num_backwards: Passes that followed a batch of a loader.
    """

    number: int
    place: str
    values: dict[str, Any] = field(default_factory=dict)
    num_batches: int = 0
    num_backwards: int = 0


class ObservedLoop:
    """Parts of the loop that were seen, and how often.

    Attributes:
        finder: Knows which optimizers' steps make a step.
        loaders: What is known of each, in the order of creation.
        optimizers: The same of those that exist.
        optimizer_kinds: Classes of all, in the order of creation.
        notes: By kind: how often what was used.
        called_modules: Outermost modules that were called with gradients in the first steps, and how often.
        module_places: Lines of the user's code that called them.
        kinds: Steps by their numbers of backward passes and batches.
    """

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
        """Note that something was used."""
        if kind not in self.notes:
            self.notes[kind] = Counter()
        self.notes[kind][text] += 1
