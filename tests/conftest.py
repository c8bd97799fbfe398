"""Settings and fixtures of all tests."""

import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from _pytest.nodeid import NodeId
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from ranks import Ranks

pytest_plugins = ["postgres", "databases", "long_tests"]

# Threads of an operator wait for one another by spinning, which on a busy machine takes several times the time of the
# operator. torch reads this once, also in the processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Shells start background jobs with SIGINT ignored, and what is ignored stays so in child processes.
    signal.signal(signal.SIGINT, signal.default_int_handler)


UMASK = os.umask(0)
os.umask(UMASK)


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """A service that starts in this process closes what it makes to others, and later tests would, too."""
    os.umask(UMASK)
    yield
    os.umask(UMASK)


# A busy machine makes an example slow, and slow to draw; that is no failure.
settings.register_profile("steptune", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steptune")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAsTheyOccur(config))


class FailuresAsTheyOccur:
    """One line for each failure when it occurs, so that nobody waits for the end of a red run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = str(crash.message if crash else report.longrepr).strip().partition("\n")[0]
            terminal.write_line(f"\n{report.when} of {report.nodeid} failed: {said}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps an xdist group together: xdist 3.8 writes its name to where pytest 9.2 no longer looks for it."""
    if not getattr(config.option, "loadgroup", False):
        return
    for item in items:
        mark = item.get_closest_marker("xdist_group")
        if mark is not None and "@" not in item.nodeid:
            item._id = NodeId.parse(f"{item.nodeid}@{mark.args[0]}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """One thread computes in this process: models of tests are too small to share out."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator["Ranks"]:
    """Processes that form groups of gloo, started with the first test that needs them."""
    from ranks import Ranks

    started = Ranks()
    yield started
    started.close()
