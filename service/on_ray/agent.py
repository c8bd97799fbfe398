"""The agent of a reserved host: a separate process, started by the Ray actor, that carries out the driver's orders.

python -m steptune.service.on_ray.agent  < an AgentOrder as JSON
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec

from steptune.service.launched import serve_host
from steptune.service.on_ray.messages import AgentOrder
from steptune.tuner.errors import SteptuneError
from steptune.tuner.trials.processes import die_with_parent


def main() -> int:
    die_with_parent(os.getppid(), signal.SIGTERM)  # as an interrupt: the files of the study are removed
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=AgentOrder)
    try:
        serve_host(
            host=order.host,
            address=order.address,
            port=order.port,
            secret=order.secret,
            folder=Path(order.folder),
            patience_s=order.patience_s,
        )
    except KeyboardInterrupt:
        return 130
    except (SteptuneError, OSError) as error:
        sys.stderr.write(f"host {order.host}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
