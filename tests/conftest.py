"""What holds for all tests."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

# A busy machine makes an example slow; that is no failure.
settings.register_profile("steptune", deadline=None)
settings.load_profile("steptune")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models too small to share out: threads that wait for each other on a busy machine take seconds."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
