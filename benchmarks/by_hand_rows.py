"""Rows of a table in which a study's answer stands beside what an expert sets by hand: what `single_gpu.py` and
`multi_gpu.py` say in the same way, so that a figure of one means what it means in the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from stamp import RESULTS
from tuned import Tuned, add_foreign_load

from steptune.tuner.records import Candidate, Choice

Choices = dict[str, Choice]
SLACK = 0.98
"""The least median of "at least as fast"."""
# Sizes of a dry run.
SMALL_VIT = "hidden_size=32&num_hidden_layers=2&num_attention_heads=2&intermediate_size=64&image_size=32&num_labels=10"
SMALL_RESNET = "image_size=32&embedding_size=8&hidden_sizes=16,32&depths=2,1&num_labels=10"


def of_every_column(*, convolves: bool, on_cpu: bool) -> Choices:
    """Settings that an expert always makes; a CPU has no cuDNN."""
    common: Choices = {"optimizer_implementation": {"implementation": "fused"}}
    if convolves and not on_cpu:
        common["backend_flags"] = {"cudnn_benchmark": True}
    return common


def legal(study: Tuned, columns: Mapping[str, Choices]) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Configurations that this machine can run, and the reasons why it cannot run the others."""
    candidates: dict[str, Candidate] = {}
    impossible: dict[str, str] = {}
    for name, choices in columns.items():
        candidate, reason = study.candidate(choices)
        if candidate is None:
            impossible[name] = reason
        else:
            candidates[name] = candidate
    return candidates, impossible


def distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    return list({candidate.key: candidate for candidate in candidates}.values())


def reached(column: Mapping) -> bool:
    """At least as fast: the interval does not lie below 1, and the ratio not below 0.98."""
    return column["ratio"] >= SLACK and (column["interval"] is None or column["interval"][1] >= 1.0)


def add_arguments(
    parser: argparse.ArgumentParser, rows: Sequence[str], *, tune_minutes: float, minutes: float, out: str
) -> None:
    """
    Args:
        out: Name of the results file.
    """
    parser.add_argument("--only", nargs="*", choices=rows, default=rows)
    parser.add_argument("--allow", choices=["lossy"], default="")
    parser.add_argument("--tune-minutes", type=float, default=tune_minutes)
    timed = "for a row: the study, and what is timed beside it"
    parser.add_argument("--minutes", type=float, default=minutes, help=timed)
    parser.add_argument("--small", action="store_true", help="shapes for a dry run")
    add_foreign_load(parser)
    parser.add_argument("--summary", action="store_true", help="only say what the results file holds")
    parser.add_argument("--out", type=Path, default=RESULTS / out)
    parser.add_argument("--trials", type=Path, help="folder for a file of all trials of a row")
