"""The actor that holds a reserved host. It runs no user code: that runs in ranks, below the agent's trial servers.

Ray starts it anew, on another node where its own is lost, and with it the agent, which connects to the driver.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping

import msgspec

from steptune.service.on_ray.messages import AgentOrder
from steptune.service.places import VISIBLE_DEVICES

CHANGED_BY_RAY = ("OMP_NUM_THREADS",)


class RayHost:
    """One host of a study.

    Args:
        order: For the host's agent; None on the driver's node, where trial servers are the driver's.
    """

    def __init__(self, order: AgentOrder | None) -> None:
        self._agent: subprocess.Popen[bytes] | None = None
        self._is_over = False
        if order is None:
            return
        command = [sys.executable, "-m", "steptune.service.on_ray.agent"]
        self._agent = subprocess.Popen(command, stdin=subprocess.PIPE, env=agent_environment(os.environ, order))
        assert self._agent.stdin is not None
        self._agent.stdin.write(msgspec.json.encode(order))
        self._agent.stdin.close()
        threading.Thread(target=self._end_with_agent, args=(self._agent,), daemon=True).start()

    def gpus(self) -> str:
        """Return the GPUs that Ray has given to this host, as CUDA_VISIBLE_DEVICES names them."""
        return os.environ.get(VISIBLE_DEVICES, "")

    def leave(self, timeout_s: float) -> None:
        """Wait until the agent has ended after the study; one that has not heard of its end is told to end."""
        if self._agent is None:
            return
        try:
            self._agent.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._is_over = True
            self._agent.terminate()  # as an interrupt: the files of the study are removed
            self._agent.wait(timeout_s)

    def _end_with_agent(self, agent: subprocess.Popen[bytes]) -> None:
        if agent.wait() != 0 and not self._is_over:
            os._exit(1)


def agent_environment(variables: Mapping[str, str], order: AgentOrder) -> dict[str, str]:
    """Return Ray's environment of a node without what is Ray's, its token above all, and with the driver's threads.

    GPUs that were not reserved are hidden.
    """
    kept = {name: value for name, value in variables.items() if name not in CHANGED_BY_RAY and not is_of_ray(name)}
    hidden = {} if order.num_gpus else {VISIBLE_DEVICES: ""}
    return {**kept, **order.variables, **hidden}


def is_of_ray(name: str) -> bool:
    """Say whether a variable is Ray's, as its token is."""
    return name.startswith("RAY_")
