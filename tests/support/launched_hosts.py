"""Studies that torchrun starts on two hosts: network namespaces of this machine with a link between them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
ADDRESS = "10.77.0.1"
"""IP address of the first host, as `emulated_hosts` gives it."""


class LaunchedHost:
    """torchrun on one host, in a folder of its own, whose output is in a file."""

    def __init__(self, network: Path, number: int, folder: Path, command: Sequence[str], ranks: int) -> None:
        self.folder = folder / f"host{number}"
        self.folder.mkdir(exist_ok=True)
        self.log = self.folder / "output.log"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks)]
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESS}:29500", "--rdzv-id", "study"]
        # The machine's name is that of another network, so that torchrun cannot see who hosts its store.
        rendezvous += ["--rdzv-conf", f"is_host={int(number == 0)}"]
        place = ["--node-rank", str(number), "--local-addr", f"10.77.0.{number + 1}"]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("STEPTUNE_")}
        environment = {
            **inherited,
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": f"link{number}",
            "STEPTUNE_HOST_PATIENCE_S": "3",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["nsenter", f"--net={network}", "--", *torchrun, *rendezvous, *place, *command],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def processes(self) -> list[psutil.Process]:
        """torchrun and all below it."""
        if self.process.poll() is not None:
            return []
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def kill(self) -> None:
        """Kill all processes, as where a host loses its power, but for its kernel."""
        for process in self.processes():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.process.wait()


@contextmanager
def launched(
    networks: Sequence[Path], folder: Path, *command: str, ranks: int = 2
) -> Iterator[tuple[LaunchedHost, LaunchedHost]]:
    """`torchrun … COMMAND` on both hosts; what is left of them is killed at the end."""
    with ExitStack() as stack:
        hosts = []
        for number, network in enumerate(networks):
            hosts.append(LaunchedHost(network, number, folder, command, ranks))
            stack.callback(hosts[-1].kill)
        first, second = hosts
        yield first, second
