"""Emulation of several hosts on one machine: one network namespace for each host, joined by rate-limited links.

    host 0: lo, link0 --- port0 \
                                  bridge, in a namespace of its own: the switch
    host 1: lo, link1 --- port1 /

A token bucket at either end of a link (tc-tbf) limits both directions; inside a host there is the loopback device, as
fast as memory. Ranks enter their host's namespace where STEPTUNE_HOST_NETWORKS names it (`tuner.trials.host_networks`).

    python -m steptune.tuner.network.emulated --rate 500mbit -- steptune tune workload.py:Class --ranks 4

A namespace lives as long as a process in it: here one that waits for the end of a pipe, so that nothing is left behind
whatever ends this one. No packet leaves the machine: none of the namespaces has a way out.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from steptune.tuner.emulation import NETWORKS_VARIABLE
from steptune.tuner.errors import ChoiceError, MissingDependencyError, PlatformError

MAX_HOSTS = 8
BURST = "128kb"
"""Burst size of the token bucket: twice the largest packet that the kernel makes from a stream (2 ms at 500 Mbit/s)."""
QUEUE = "100ms"
"""Maximum time that a packet waits for the link; later packets are dropped, as by a switch."""
COMMAND_S = 20.0
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_RATE = re.compile(r"\d+(\.\d+)?[kmg]bit")


@contextmanager
def emulated_hosts(num_hosts: int = 2, rate: str | None = None) -> Iterator[tuple[Path, ...]]:
    """Create the namespaces of the hosts, and remove them at the end of the context.

    Args:
        rate: Rate of every link in each direction, in tc's notation: `500mbit`, `25gbit`. None sets no limit.

    Yields:
        The namespace of each host.

    Raises:
        ChoiceError: The number of hosts or the rate is invalid.
        MissingDependencyError: A program is not installed.
        PlatformError: This process may not make network namespaces, or shape links.
    """
    if not 2 <= num_hosts <= MAX_HOSTS:
        raise ChoiceError(f"the number of emulated hosts must be from 2 to {MAX_HOSTS}, got {num_hosts}")
    if rate is not None and not _RATE.fullmatch(rate):
        raise ChoiceError(f"the rate of a link must look like 500mbit or 25gbit, got {rate!r}")
    with ExitStack() as stack:
        switch, *hosts = [stack.enter_context(_namespace()) for _ in range(num_hosts + 1)]
        _inside(switch, "ip", "link", "add", "switch", "type", "bridge")
        _inside(switch, "ip", "link", "set", "switch", "up")
        for number, host in enumerate(hosts):
            _connect(number, host, switch, rate)
        yield tuple(_place(pid) for pid in hosts)


def _connect(number: int, host: int, switch: int, rate: str | None) -> None:
    link, port = f"link{number}", f"port{number}"
    _inside(host, "ip", "link", "set", "lo", "up")
    _inside(host, "ip", "link", "add", link, "type", "veth", "peer", "name", port, "netns", str(switch))
    _inside(host, "ip", "address", "add", f"10.77.0.{number + 1}/24", "dev", link)
    _inside(switch, "ip", "link", "set", port, "master", "switch")
    for pid, device in ((host, link), (switch, port)):
        if rate is not None:
            bucket = ("tbf", "rate", rate, "burst", BURST, "latency", QUEUE)
            _inside(pid, "tc", "qdisc", "add", "dev", device, "root", *bucket)
        _inside(pid, "ip", "link", "set", device, "up")


@contextmanager
def _namespace() -> Iterator[int]:
    """Create a network namespace, and yield the id of the process that keeps it alive."""
    hold = [_tool("unshare"), "--net", "--", "sh", "-c", "echo ready && exec cat"]
    pipe = subprocess.PIPE
    with subprocess.Popen(hold, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        if not holder.stdout.readline():
            raise _not_permitted("a network namespace cannot be created", holder.stderr.read())
        yield holder.pid


def _inside(pid: int, tool: str, *arguments: str) -> None:
    command = [_tool("nsenter"), f"--net={_place(pid)}", "--", _tool(tool), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode != 0:
        raise _not_permitted(f"`{tool} {' '.join(arguments)}` failed in a network namespace", done.stderr)


def _place(pid: int) -> Path:
    return Path(f"/proc/{pid}/ns/net")


def _tool(name: str) -> str:
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))
    if found is None:
        raise MissingDependencyError(f"emulating hosts requires {name}, which is not installed: install {_TOOLS[name]}")
    return found


def _not_permitted(what: str, said: str) -> PlatformError:
    return PlatformError(
        f"{what} ({said.strip() or 'no reason given'}): emulating hosts requires Linux, and root or the command "
        "prefix `unshare --user --map-root-user`"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m steptune.tuner.network.emulated",
        description="Run a command with its ranks on emulated hosts.",
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", help="rate of every link, such as 500mbit or 25gbit (default: unlimited)")
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args(arguments)
    try:
        with emulated_hosts(asked.hosts, asked.rate) as networks:
            variables = {**os.environ, NETWORKS_VARIABLE: ",".join(map(str, networks))}
            return subprocess.run(asked.command, env=variables, check=False).returncode
    except (ChoiceError, MissingDependencyError, PlatformError) as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    sys.exit(main())
