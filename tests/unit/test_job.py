"""Tests of the names in `TrainingJob`: techniques are runners, layouts and hooks, and the job knows none of them."""

import io
import tokenize
from pathlib import Path

import steptune.tuner.training.job as job

TECHNIQUES = (
    *("captured", "mesh", "masters", "ignored", "flat", "local_sgd", "compression", "momentum", "dgc"),
    *("fsdp", "shards", "sharded", "laid_out"),
)


def test_the_job_names_no_technique() -> None:
    """Not in code; a docstring may give an example."""
    text = Path(str(job.__file__)).read_text()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    names = {token.string.lower() for token in tokens if token.type == tokenize.NAME}
    assert not {name for name in names for technique in TECHNIQUES if technique in name}
