"""Export as a shell script that starts the Python export with its ranks and its environment."""

from __future__ import annotations

import shlex
from string import Template

from steptune.tuner.export.base import Exporter, one_line
from steptune.tuner.records import Recommendation

_SCRIPT = Template("""\
#!/usr/bin/env bash
$header# What runs: $label
set -euo pipefail
$variables$hosts
exec torchrun --standalone --nproc-per-node=$ranks "$$(dirname "$$0")/train_recommended.py" "$$@"
""")
_HOSTS = """
# On several hosts, replace --standalone by --nnodes and --rdzv-endpoint. torchrun numbers ranks host by host; with a
# launcher that assigns ranks to hosts in turn, every edge of a ring crosses the network.
"""


class TorchrunScript(Exporter):
    name = "torchrun"
    summary = "a script that starts the Python export with its ranks and its environment"
    version = "torch 2.13.0"
    usage = "Beside train_recommended.py (the python export): bash train_recommended.sh --steps 1000"
    comment = "#"

    def file_name(self, recommendation: Recommendation) -> str:
        return "train_recommended.sh"

    def export(self, recommendation: Recommendation) -> str:
        several = recommendation.num_ranks > 1
        variables = sorted(recommendation.environment_variables.items())
        return _SCRIPT.substitute(
            header=self.header(recommendation),
            label=one_line(recommendation.candidate.label),
            variables="".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables),
            hosts=_HOSTS if several else "",
            ranks=recommendation.num_ranks,
        )
