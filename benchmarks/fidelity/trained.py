"""Train a recommendation for some steps in this process, and print the mean loss of the last ones."""

import json
import os
import sys
from pathlib import Path

import steptune

RECOMMENDATION, REFERENCE, SEED, NUM_STEPS, NUM_LAST = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
os.environ.update(steptune.launch_environment(RECOMMENDATION))  # above `import torch`

import torch  # noqa: E402

from steptune.tuner.workloads.loading import load_workload  # noqa: E402


def main() -> None:
    torch.manual_seed(SEED)
    job = steptune.apply(RECOMMENDATION, load_workload(REFERENCE), directory=RECOMMENDATION.parent / "data")
    torch.manual_seed(SEED)  # masks of dropout, however the model was made
    losses: list[torch.Tensor] = []
    while len(losses) < NUM_STEPS:
        for batch in job.loader:
            losses.append(job.step(batch).float().clone())
            if len(losses) == NUM_STEPS:
                break
    last = torch.stack(losses[-NUM_LAST:]).mean()
    json.dump({"first_loss": float(losses[0]), "last_loss": float(last)}, sys.stdout)
    sys.stdout.write("\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
