"""A workload in a plain script: `steptune.apply` builds what the trials ran."""

import os
import sys
from pathlib import Path

import steptune

RECOMMENDATION, REFERENCE = Path(sys.argv[1]), sys.argv[2]
os.environ.update(steptune.launch_environment(RECOMMENDATION))  # above `import torch`

from rates import report  # noqa: E402

from steptune.tuner.workloads.loading import load_workload  # noqa: E402

workload = load_workload(REFERENCE)
job = steptune.apply(RECOMMENDATION, workload, directory=RECOMMENDATION.parent / "data-of-the-script")


def steps():
    while True:
        for batch in job:
            job.step(batch)
            yield workload.num_units(batch)


if __name__ == "__main__":
    report(steps(), warm_up_s=float(sys.argv[3]), measure_s=float(sys.argv[4]))
