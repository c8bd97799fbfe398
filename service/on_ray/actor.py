"""The Ray actor that holds a reserved host. It runs no user code: the host's agent starts trial servers, which start
the ranks, and user code runs in these.

If its node is lost, Ray restarts it on another one, and with it the agent, which connects to the driver.
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
        order: Order for the host's agent; None on the driver's node, whose trial servers belong to the driver.
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
        """Return the GPUs that Ray has assigned to this host, in the form of CUDA_VISIBLE_DEVICES."""
        return os.environ.get(VISIBLE_DEVICES, "")

    def leave(self, timeout_s: float) -> None:
        """Wait for the agent to end after the study; stop an agent that was not told of the end."""
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
    """Return a node's environment without Ray's own variables, such as its token, and with the driver's number of
    threads.

    GPUs that were not reserved are hidden.
    """
    kept = {name: value for name, value in variables.items() if name not in CHANGED_BY_RAY and not is_of_ray(name)}
    hidden = {} if order.num_gpus else {VISIBLE_DEVICES: ""}
    return {**kept, **order.variables, **hidden}


def is_of_ray(name: str) -> bool:
    """Say whether a variable is one of Ray's, such as its token."""
    return name.startswith("RAY_")
