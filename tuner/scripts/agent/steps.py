"""Detection of the end of a step in a loop that Steptune does not own, from the shortest period in the sequence of
optimizer steps.

One optimizer is one step after another; a GAN's two take turns; a WGAN's critic has several turns. The last step of a
period is the one that is followed by the most batches from a loader: there the loop begins anew. A loop that updates
its parameters by hand has no optimizer: each of its backward passes is a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

LONGEST_PERIOD = 16
PATIENCE = 4 * LONGEST_PERIOD
"""Number of optimizer steps after which an optimizer that has not stepped yet is left out of the period."""
OTHERS = 4
"""Number of consecutive steps by optimizers outside the known period, after which a new period is looked for."""
BACKWARDS_WITHOUT_OPTIMIZER = 12
"""Number of backward passes after which a script without an optimizer is taken to update its parameters by hand."""
BACKWARDS_BESIDE_OPTIMIZER = 256
"""Number of backward passes without an optimizer step after which a script with an optimizer is taken to update its
parameters by hand: it may accumulate gradients over many passes."""


class StepFinder:
    """Detector of the events that end a step of the training.

    Attributes:
        pattern: Numbers of the optimizers in a step, in order, the last one ending it; empty where steps are backward
            passes, None while the period is not known.
    """

    def __init__(self) -> None:
        self.pattern: tuple[int, ...] | None = None
        self.num_backwards = 0
        self.num_optimizer_steps = 0
        self._sequence: list[int] = []
        self._batches_after: list[int] = []
        self._num_foreign = 0
        self._retired: set[int] = set()

    def batch(self) -> None:
        """Note that a loader gave a batch."""
        if self.pattern is None and self._batches_after:
            self._batches_after[-1] += 1

    def backward_ended(self, num_optimizers: int) -> bool:
        """Say whether a step ends with this backward pass.

        Args:
            num_optimizers: Number of optimizers that exist.
        """
        self.num_backwards += 1
        if self.pattern is None and not self.num_optimizer_steps:
            needed = BACKWARDS_BESIDE_OPTIMIZER if num_optimizers else BACKWARDS_WITHOUT_OPTIMIZER
            if self.num_backwards >= needed:
                self.pattern = ()
        return self.pattern == ()

    def optimizer_stepped(self, number: int, optimizers: Collection[int]) -> bool:
        """Say whether a step of the training ends with this optimizer's step.

        Args:
            optimizers: Numbers of the optimizers that exist.
        """
        if self.pattern == ():
            self.pattern = None  # it came late; from here on its steps count
        self.num_optimizer_steps += 1
        self._sequence.append(number)
        self._watch_for_others(number)
        if self.pattern is None:
            self._batches_after.append(0)
            self.pattern = self._found(set(optimizers) - self._retired)
        length = len(self.pattern) if self.pattern else 0
        return bool(length) and tuple(self._sequence[-length:]) == self.pattern

    def _watch_for_others(self, number: int) -> None:
        """Look for a new period if only optimizers outside the known period step: another training has begun, or the
        optimizers are new.
        """
        if self.pattern is None:
            return
        self._num_foreign = 0 if number in self.pattern else self._num_foreign + 1
        if self._num_foreign >= OTHERS:
            self._retired |= set(self.pattern)
            self.pattern = None
            self._sequence = self._sequence[-OTHERS:]
            self._batches_after = [0] * (OTHERS - 1)
            self._num_foreign = 0

    def _found(self, optimizers: set[int]) -> tuple[int, ...] | None:
        sequence = self._sequence
        stepped = set(sequence)
        if not optimizers <= stepped and len(sequence) < PATIENCE:
            return None
        longest = min(LONGEST_PERIOD, (len(sequence) - 1) // 2)
        for period in range(len(stepped), longest + 1):
            last = sequence[-period:]
            if set(last) == stepped and last == sequence[-2 * period : -period]:
                return self._turned(period)
        return None

    def _turned(self, period: int) -> tuple[int, ...]:
        """Return the period, rotated to end with the step that is followed by the most new batches; among several such
        steps, with the last.
        """
        sequence = self._sequence
        end = len(sequence) - 1  # what follows the newest step is not known yet
        batches: Counter[int] = Counter()
        for position in range(end - 2 * period, end):
            batches[position % period] += self._batches_after[position]
        most = max(batches.values())
        last = max(phase for phase in range(period) if batches[phase] == most)
        newest = max(position for position in range(end + 1) if position % period == last)
        return tuple(sequence[newest - period + 1 : newest + 1])
