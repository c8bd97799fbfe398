"""Exchange of a value from the first host to the others, through the store of torchrun's rendezvous.

It runs in a separate process, because the store is torch's and the parent of a study never loads torch. Values go
through pipes, never through arguments, which every user of a machine can read.

    python -m steptune.tuner.trials.store_exchange  < {"address": …, "port": …, "key": …, "value": …, "timeout_s": …}
"""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import msgspec

from steptune.tuner.errors import PlatformError
from steptune.tuner.records import Record
from steptune.tuner.trials.launch import Launch

PATIENCE_S = 300.0
"""Time limit, in seconds, for receiving the value from the first host, which may start later than this one."""


class _Request(Record):
    address: str
    port: int
    key: str
    value: str
    withdrawn: bool
    timeout_s: float


def publish(launch: Launch, value: str, *, python: str = sys.executable) -> None:
    """Publish a value for the other hosts.

    Raises:
        PlatformError: The store cannot be reached.
    """
    _exchange(launch, value, python)


def published(launch: Launch, *, python: str = sys.executable) -> str:
    """Wait until the first host's value is published, and return it.

    Raises:
        PlatformError: The store cannot be reached, or nothing was published in time.
    """
    return _exchange(launch, "", python)


def withdraw(launch: Launch, *, python: str = sys.executable) -> None:
    """Remove the first host's value, once every host has it.

    Raises:
        PlatformError: The store cannot be reached.
    """
    _exchange(launch, "", python, withdrawn=True)


def _exchange(launch: Launch, value: str, python: str, *, withdrawn: bool = False) -> str:
    request = _Request(
        address=launch.address,
        port=launch.port,
        key=f"steptune/{launch.attempt}",
        value=value,
        withdrawn=withdrawn,
        timeout_s=PATIENCE_S,
    )
    command = [python, "-m", "steptune.tuner.trials.store_exchange"]
    done = subprocess.run(command, input=msgspec.json.encode(request), capture_output=True, check=False)
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise PlatformError(
            f"the torchrun rendezvous at {launch.address}:{launch.port} did not answer ({said}): use the same "
            "--rdzv-endpoint on all hosts, and check the first host's output"
        )
    return done.stdout.decode()


def main() -> None:
    from torch._C._distributed_c10d import TCPStore

    request = msgspec.json.decode(sys.stdin.buffer.read(), type=_Request)
    timeout = timedelta(seconds=request.timeout_s)
    store = TCPStore(request.address, request.port, is_master=False, timeout=timeout)
    if request.withdrawn:
        store.delete_key(request.key)
        return
    if request.value:
        store.set(request.key, request.value)
    sys.stdout.write(store.get(request.key).decode())


if __name__ == "__main__":
    main()
