"""Emulated hosts for tests, where this machine lets them be made."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from steptune.tuner.errors import MissingDependencyError, PlatformError
from steptune.tuner.network.emulated import emulated_hosts


@contextmanager
def two_hosts(rate: str | None = None, *, needed_in_ci: bool = False, num_hosts: int = 2) -> Iterator[tuple[Path, ...]]:
    """Skips the test where network namespaces are not permitted; what CI installs has to be there.

    Args:
        needed_in_ci: There, what is not permitted fails the test, too.
        num_hosts: Two, or as many more as are to replace one.
    """
    with ExitStack() as stack:
        try:
            networks = stack.enter_context(emulated_hosts(num_hosts, rate))
        except MissingDependencyError as error:
            if os.environ.get("CI") == "true":
                pytest.fail(str(error))
            pytest.skip(str(error))
        except PlatformError as error:
            if needed_in_ci and os.environ.get("CI") == "true":
                pytest.fail(str(error))
            pytest.skip(str(error))
        yield networks


def sent_bytes(network: Path) -> dict[str, int]:
    """Bytes that a host sent, by interface."""
    table = (network.parents[1] / "net" / "dev").read_text().splitlines()[2:]
    fields = [line.replace(":", " ").split() for line in table]
    return {name: int(values[8]) for name, *values in fields}
