"""DigitsViT in a plain script: `tuner.apply` builds what the trials ran."""

import os
import sys
from pathlib import Path

import tuner

RECOMMENDATION = Path(sys.argv[1])
os.environ.update(tuner.launch_environment(RECOMMENDATION))  # above `import torch`

from rates import report  # noqa: E402

from examples.digits_vit import DigitsViT  # noqa: E402

job = tuner.apply(RECOMMENDATION, DigitsViT())


def steps():
    while True:
        for batch in job:
            job.step(batch)
            yield len(batch[0])


if __name__ == "__main__":
    report(steps(), warm_up_s=float(sys.argv[2]), measure_s=float(sys.argv[3]))
