"""Trial servers of a study: one for each load-time environment, on all hosts of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from steptune.tuner.errors import RunnerError
from steptune.tuner.trials.connection import ServerConnection
from steptune.tuner.trials.host_group import Host, HostGroup, SpreadServer
from steptune.tuner.trials.jobs import Job, JobBoard
from steptune.tuner.trials.processes import kill_tree
from steptune.tuner.trials.sandbox import Sandbox
from steptune.tuner.trials.study_files import StudyFiles
from steptune.tuner.trials.watch import Watch
from steptune.tuner.workloads.reference import imported_modules, parse_reference


class ServerPool:
    """Trial servers of a study, by the environment variables with which they were started.

    Args:
        workload: Reference of the workload.
        python: The user's interpreter.
        sandbox: Sandbox around every server.
        hosts: Group of all hosts of the ranks, if there are several.

    Attributes:
        was_killed: True once `kill` was called.
    """

    def __init__(
        self,
        files: StudyFiles,
        *,
        workload: str,
        python: str,
        start_method: str,
        sandbox: Sandbox,
        hosts: HostGroup | None,
        look: Callable[[], None],
        describe: Callable[[], object],
    ) -> None:
        """Prepare a pool without any server.

        Args:
            look: Function that is called a few times per second while anything runs.
            describe: Function that checks whether all hosts are alike.
        """
        self._files = files
        self._workload = workload
        self._python = python
        self._start_method = start_method
        self._sandbox = sandbox
        self._hosts = hosts
        self._describe = describe
        self._heard: list[Host] = []
        """Hosts from which the job board receives messages."""
        self._places: set[str] = set()
        """Locations of the hosts that were found to have the same environment."""
        self.was_killed = False
        self.servers: dict[tuple[tuple[str, str], ...], ServerConnection | SpreadServer] = {}
        self._watch = None
        if sandbox.quota is not None:
            self._watch = Watch(
                files.directory,
                sandbox.quota,
                sandbox.as_user,
                uid=sandbox.uid,
                python=python,
                servers=lambda: [server.pid for server in tuple(self.servers.values())],
                fellows=sandbox.fellows,
            )
        self.board = JobBoard(self._watch, look)

    def know_hosts(self) -> None:
        """Wait for all hosts, and treat them as having the same environment until they are compared."""
        self._gather_hosts()
        self._places = set() if self._hosts is None else set(self._hosts.places)

    def remove_dead(self) -> list[ServerConnection | SpreadServer]:
        """Remove the servers that have ended, and return them."""
        dead = {key: server for key, server in self.servers.items() if server.has_ended}
        for key in dead:
            self._drop(key)
        if dead:
            self._lose_hosts()
        return list(dead.values())

    def begin(self, variables: Mapping[str, str], **job: Any) -> Job:
        """Start a job. If its trial server died while idle, start the job on a new one.

        Raises:
            RunnerError: The new server is gone, too, or the servers were killed on purpose.
        """
        server = self._server(variables)
        try:
            return self.board.start(server, **job)
        except RunnerError:
            if self.was_killed or not server.has_ended:
                raise
            return self.board.start(self._server(variables), **job)

    def _server(self, variables: Mapping[str, str]) -> ServerConnection | SpreadServer:
        self._gather_hosts()
        key = tuple(sorted(variables.items()))
        if key in self.servers and self.servers[key].has_ended and not self.was_killed:
            self._drop(key)
        if key not in self.servers:
            self._files.compile_cache.mkdir(parents=True, exist_ok=True)
            server = self._started(variables)
            self.servers[key] = server
            if self._watch is not None and self._sandbox.temporary is None:
                self._watch.add(server.temporary)
            self.board.add_server(server)
        return self.servers[key]

    def _started(self, variables: Mapping[str, str]) -> ServerConnection | SpreadServer:
        """Start a new server on all hosts. A host that is lost meanwhile may reconnect once.

        Raises:
            RunnerError: The host did not come back, or another was lost, too.
        """
        try:
            return self._spread(self._local_server(variables), variables)
        except RunnerError:
            if self.was_killed or self._hosts is None or not any(host.lost for host in self._hosts.hosts.values()):
                raise
            self._gather_hosts()
            return self._spread(self._local_server(variables), variables)

    def _spread(self, local: ServerConnection, variables: Mapping[str, str]) -> ServerConnection | SpreadServer:
        return local if self._hosts is None else self._hosts.spread(local, dict(variables), self._preload())

    def _local_server(self, variables: Mapping[str, str]) -> ServerConnection:
        return ServerConnection(
            python=self._python,
            variables={**compile_caches(self._files.compile_cache), **variables},
            preload=self._preload(),
            imports=self._files.imports,
            log=self._files.logs / f"server{len(self.servers)}.log",
            start_method=self._start_method,
            sandbox=self._sandbox,
        )

    def _gather_hosts(self) -> None:
        """Wait for missing hosts.

        Raises:
            RunnerError: The hosts did not connect, or one differs from the others.
        """
        if self._hosts is None:
            return
        self._lose_hosts()
        self._hosts.gather()
        for host in self._hosts.hosts.values():
            if host not in self._heard:
                self.board.add_server(host)
                self._heard.append(host)
        if self._places and not self._places.issuperset(self._hosts.places):
            self._places.update(self._hosts.places)
            self._describe()  # one in the place of a lost one has to be like it

    def _lose_hosts(self) -> None:
        """Stop listening to lost hosts and forget their jobs."""
        for host in self._hosts.lost() if self._hosts is not None else ():
            if host in self._heard:
                self.board.remove_server(host)
                self._heard.remove(host)
            host.close()

    def _drop(self, key: tuple[tuple[str, str], ...]) -> None:
        """Remove a server that has ended."""
        server = self.servers.pop(key)
        self.board.lose_server(server)
        server.close()

    def _preload(self) -> list[str]:
        """Return the modules that the workload's own file imports from installed packages."""
        reference = parse_reference(self._workload)
        if reference.kind == "zoo":
            return ["steptune.tuner.workloads.zoo"]
        if reference.kind == "module":
            return []
        folder = reference.path.parent
        local = {p.stem for p in folder.glob("*.py")} | {p.name for p in folder.iterdir() if p.is_dir()}
        return [name for name in imported_modules(reference.path) if name.partition(".")[0] not in local]

    def kill(self) -> None:
        """Kill all trials at once, from any thread; threads that wait for them get a RunnerError."""
        self.was_killed = True
        for server in tuple(self.servers.values()):
            kill_tree(server.pid)

    def close(self) -> None:
        """End all servers."""
        for server in self.servers.values():
            self.board.remove_server(server)
            server.close()
        self.servers.clear()


def compile_caches(folder: Path) -> dict[str, str]:
    """Return the environment variables for the caches of compiled code, which only this study's trials share.

    Source: https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_configuration_tutorial.html
    """
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
