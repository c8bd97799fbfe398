"""A batch script of Slurm that starts the Python export with its ranks and its environment."""

from __future__ import annotations

import shlex
from string import Template

from steptune.tuner.export.base import Exporter, one_line
from steptune.tuner.records import Recommendation

_SCRIPT = Template("""\
#!/usr/bin/env bash
#SBATCH --nodes=1 --ntasks-per-node=1
$header# What runs: $label
set -euo pipefail
${variables}srun torchrun --standalone --nproc-per-node=$ranks train_recommended.py "$$@"
""")


class SlurmScript(Exporter):
    name = "slurm"
    summary = "a batch script of Slurm that starts the Python export with its ranks and its environment"
    version = "Slurm 24.05"
    usage = "Beside train_recommended.py (the python export): sbatch train_recommended.sbatch --steps 1000"
    comment = "#"

    def file_name(self, recommendation: Recommendation) -> str:
        return "train_recommended.sbatch"

    def export(self, recommendation: Recommendation) -> str:
        variables = sorted(recommendation.environment_variables.items())
        return _SCRIPT.substitute(
            header=self.header(recommendation),
            label=one_line(recommendation.candidate.label),
            variables="".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables),
            ranks=recommendation.num_ranks,
        )
