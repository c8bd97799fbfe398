"""Tests that need a CUDA device: skipped elsewhere, and counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ranks import Ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def device() -> str:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return "cuda"


@pytest.fixture(scope="module")
def one_host() -> Iterator[Ranks]:
    """Ranks on up to four devices."""
    from device_ranks import needs, num_devices, variables
    from ranks import Ranks

    needs(2)
    count = min(4, num_devices())
    started = Ranks("cuda", count, lambda rank: variables(rank, count))
    yield started
    started.close()


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Ranks]:
    """Half of the devices on each; NCCL reads the name of a host once in a process."""
    from device_ranks import needs, num_devices, variables
    from ranks import Ranks

    needs(2)
    count = 4 if num_devices() >= 4 else 2
    started = Ranks("cuda", count, lambda rank: variables(rank, count, num_hosts=2))
    yield started
    started.close()
