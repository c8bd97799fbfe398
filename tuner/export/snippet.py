"""Export as a training script that runs as recommended; it contains the recommendation and the workload's name."""

from __future__ import annotations

from string import Template
from typing import ClassVar

import msgspec

from steptune._version import __version__
from steptune.tuner.export.base import Exporter
from steptune.tuner.export.native import as_yaml
from steptune.tuner.records import Recommendation

_SCRIPT = Template('''\
$header
import argparse
import itertools
import os
import time
$environment
import torch

import steptune
from steptune.tuner.workloads.loading import load_workload

WORKLOAD = $workload

# The record without the story of its search. `choices` is what runs, `parts` says why.
RECOMMENDATION = """
$recommendation"""


def endless(loader):
    """Batches of one epoch after another; samplers that are split over ranks shuffle anew."""
    for epoch in itertools.count():
        for sampler in (loader.sampler, loader.batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        yield from loader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--data", default="steptune_data", help="where the workload prepares its data")
    parser.add_argument("--device", help="default: the kind of device that was measured")
    arguments = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # started by torchrun
        torch.distributed.init_process_group()

    workload = load_workload(WORKLOAD)
    job = steptune.apply(RECOMMENDATION, workload, device=arguments.device, directory=arguments.data)
    began = time.perf_counter()
    for step, batch in enumerate(itertools.islice(endless(job.loader), arguments.steps), start=1):
        loss = job.step(batch)
        if step % 100 == 0 or step == arguments.steps:
            rate = step * workload.global_batch / (time.perf_counter() - began)
            print(f"step {step}: loss {float(loss):.4f}, {rate:.1f} samples/s", flush=True)
    # Checkpoints: torch.save job.state_dict(), which has your own key names, and job.optimizer_state_dict(), here.

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
''')

_ENVIRONMENT = Template("""\

# Libraries read these when they are loaded, so they are set before torch is imported.
os.environ.update($variables)
""")


class PythonSnippet(Exporter):
    name = "python"
    summary = "a training script that runs as recommended"
    version: ClassVar[str] = f"steptune {__version__}"
    usage = "Run it: python train_recommended.py --steps 1000"
    comment = "#"

    def file_name(self, recommendation: Recommendation) -> str:
        return "train_recommended.py"

    def export(self, recommendation: Recommendation) -> str:
        variables = dict(sorted(recommendation.environment_variables.items()))
        return _SCRIPT.substitute(
            header=self.header(recommendation),
            environment=_ENVIRONMENT.substitute(variables=repr(variables)) if variables else "",
            workload=repr(recommendation.workload),
            recommendation=_inside_quotes(as_yaml(_without_story(recommendation))),
        )


def _without_story(recommendation: Recommendation) -> Recommendation:
    """Return the recommendation without the fields that only explain the search: untried choices, alternatives, the
    guard's curves.
    """
    guard = recommendation.guard
    return msgspec.structs.replace(
        recommendation,
        certificate=msgspec.structs.replace(recommendation.certificate, not_tried=()),
        alternatives=(),
        guard=msgspec.structs.replace(guard, losses=(), reference_losses=()) if guard else None,
    )


def _inside_quotes(text: str) -> str:
    """Return text escaped for a triple-quoted string."""
    return text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
