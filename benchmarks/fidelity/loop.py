"""A training loop under Accelerate, as its documentation writes it."""

from collections.abc import Callable, Iterator
from typing import Any


def train(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    loader: Any,
    *,
    loss: Callable[[Any, Any], Any],
    count: Callable[[Any], int],
    prepared_loader: Callable[[Any], Any],
) -> Iterator[int]:
    """Endless epochs; after every update, what `count` said of its batches."""
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loader = prepared_loader(loader)
    done = 0
    while True:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            done += count(batch)
            if accelerator.sync_gradients:
                yield done
                done = 0
