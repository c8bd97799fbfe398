"""Scores of the guard's layers on a GPU: of correct changes and of planted faults, so that limits can be fitted there.

Small trainings (`tests/guarded_trainings.py`) run the guard's protocol in FP32, TF32, bfloat16 (O1, O2) and float16;
with the optimizer's forms, recorded steps, micro-batches and layouts, and with one thing wrong. Nothing rejects here:
what is written are scores in units of the measured noise. What does not begin within the time is left out and counted.

    python benchmarks/guard_device.py --seconds 120            # writes results/guard_device.json
    python benchmarks/guard_device.py --device cpu --seconds 60 --output /tmp/guard_device.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from stamp import RESULTS, hardware, stamp

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from guarded import BF16, FP32, PROTOCOL, Study, make_study
from guarded_trainings import FAULTS, Convolutional, Masked, Patches, Training, WideCausal

from steptune.tuner.guard.gradients import KINDS, Limits, scores
from steptune.tuner.guard.update_replay import LIMIT
from steptune.tuner.hardware import describe_environment
from steptune.tuner.trials.gradient_watch import GradientReference

OUTPUT = RESULTS / "guard_device.json"
TF32 = FP16 = 2.0**-11
SHORT = replace(PROTOCOL, num_pointwise=4, num_curve=0, num_horizon=0)
UNITS = Limits(residual=1.0, slope=1.0, scale=1.0, pooled=1.0, zeros=1.0)


TRAININGS: tuple[type[Training], ...] = (WideCausal, Convolutional, Masked, Patches)
PRECISIONS: dict[str, tuple[dict[str, Any], float]] = {
    "fp32": ({}, FP32),
    "bf16": ({"precision": {"level": "O1", "dtype": "bfloat16"}}, BF16),
    "O2": ({"precision": {"level": "O2", "dtype": "bfloat16"}}, BF16),
    "tf32": ({"precision": {"level": "tf32", "dtype": None}}, TF32),
    "fp16": ({"precision": {"level": "O1", "dtype": "float16"}}, FP16),
    "bf16, recorded": ({"precision": {"level": "O1", "dtype": "bfloat16"}, "cuda_graph": {"scope": "step"}}, BF16),
    "fp32, recorded": ({"cuda_graph": {"scope": "step"}}, FP32),
}
CHANGES: dict[str, dict[str, Any]] = {
    "unchanged": {},
    "for_loop": {"optimizer_implementation": {"implementation": "for_loop"}},
    "foreach": {"optimizer_implementation": {"implementation": "foreach"}},
    "fused": {"optimizer_implementation": {"implementation": "fused"}},
    "contiguous": {"optimizer_implementation": {"implementation": "fused", "contiguous": True}},
    "micro-batches": {"micro_batch": {"num_micro_batches": 2}},
    "channels last": {"memory_format": {"layout": "channels_last"}},
    "checkpointing": {"activation_checkpointing": {"every": 1}},
}
PLANTED = (
    "rate 1 % too low",
    "no weight decay",
    "schedule never stepped",
    "a layer left out",
    "state lost at every step",
    "loss 5 % smaller",
    "halves weighted alike",
    "last sample left out",
    "first branch detached",
    "gradient of the last tensor doubled",
    "gradients not cleared",
    "batch of the step before",
    "statistics updated 10 % too fast",
)

Run = tuple[type[Training], str, str, bool]


def runs(*, recorded: bool) -> Iterator[Run]:
    """Recorded steps last; all trainings in turns, so that any part has some of each."""
    for in_graphs in (False, True) if recorded else (False,):
        precisions = [name for name in PRECISIONS if name.endswith("recorded") is in_graphs]
        changes = ("unchanged", "foreach", "fused") if in_graphs else CHANGES
        named = [*((name, False) for name in changes), *((name, True) for name in PLANTED)]
        for (name, is_fault), precision, training in itertools.product(named, precisions, TRAININGS):
            if name == "micro-batches" and training is Convolutional:
                continue  # its statistics would be those of smaller batches
            if not (is_fault and precision == "fp32, recorded"):
                yield training, precision, name, is_fault


class Bench:
    """Studies of all trainings, and one row for each run."""

    def __init__(self, folder: Path, device: str) -> None:
        roundoffs = (FP32, TF32, BF16)
        self._device = device
        self._studies: dict[type[Training], tuple[Study, GradientReference]] = {}
        for training in TRAININGS:
            study = make_study(
                folder / training.__name__,
                training,
                protocol=SHORT,
                unit_roundoffs=roundoffs,
                device=device,
                bias_corrections=True,
            )
            gradients = GradientReference.load(study.files.reference_gradients)
            assert gradients is not None
            self._studies[training] = study, gradients

    def row(self, run: Run) -> dict[str, Any] | None:
        """None where the fault means nothing there."""
        training, precision, name, is_fault = run
        choices, roundoff = PRECISIONS[precision]
        if self._device == "cuda" and training in (Convolutional, Patches):
            roundoff = max(roundoff, TF32)  # convolutions use it unless told otherwise
        planted: type[Training] | None = training
        if is_fault:
            planted = next(fault for fault in FAULTS if fault.name == name).plant(training)
        if planted is None:
            return None
        study, reference = self._studies[training]
        row = {"training": training.__name__, "precision": precision, "run": name, "fault": is_fault}
        began = time.perf_counter()
        torch.set_float32_matmul_precision("highest")  # a run in TF32 allows it to the whole process
        torch.backends.cudnn.allow_tf32 = True
        try:
            job = study.job(planted(), **choices, **({} if is_fault else CHANGES[name]))
            judged = study.judged(job, unit_roundoff=roundoff)
        except Exception as error:  # what a device refuses is a row, too
            return {**row, "error": f"{type(error).__name__}: {error}"[:200]}
        checks = {check.name: [check.observed, check.tolerance] for check in judged.checks}
        found: dict[str, float] = {}
        if judged.gradients is not None:
            parts = ((reference.gradients, judged.gradients.gradients), (reference.changes, judged.gradients.changes))
            for prefix, (compared, seen) in zip(("", "state "), parts, strict=True):
                noise = compared.noise_at(roundoff)
                by_kind = scores(compared.steps, noise, seen, limits=UNITS, exact=reference.exact)
                found |= {prefix + kind: by_kind[kind].ratio for kind in (KINDS if not prefix else ("residual",))}
        return {**row, "checks": checks, "scores": found, "notes": judged.notes, "s": time.perf_counter() - began}


def _of_update(row: dict[str, Any]) -> float:
    return float(row["checks"].get("replayed update", [0.0])[0])


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Largest scores of correct runs and smallest of faults, by precision."""
    result = []
    for precision in PRECISIONS:
        own = [row for row in rows if row["precision"] == precision and "scores" in row]
        correct, faulty = ([row for row in own if row["fault"] is fault] for fault in (False, True))
        kinds = sorted({kind for row in own for kind in row["scores"]})
        largest = {kind: max((row["scores"].get(kind, 0.0) for row in correct), default=0.0) for kind in kinds}
        result.append(
            {
                "precision": precision,
                "correct": len(correct),
                "faults": len(faulty),
                "largest_of_correct": largest,
                "largest_update_of_correct": max(map(_of_update, correct), default=0.0),
                "beyond_every_correct": sum(
                    _of_update(row) > LIMIT or any(row["scores"].get(k, 0.0) > largest[k] for k in kinds)
                    for row in faulty
                ),
            }
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=120.0, help="after which no further run begins")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    began = time.monotonic()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    left_out = 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), arguments.device)
        prepared_s = time.monotonic() - began
        for run in runs(recorded=arguments.device == "cuda"):
            if time.monotonic() - began > arguments.seconds:
                left_out += 1
                continue
            row = bench.row(run)
            if row is not None:
                rows.append(row)
    result = {
        **stamp("python benchmarks/guard_device.py", ("tuner", "tests", "benchmarks")),
        "hardware": hardware(describe_environment(arguments.device, Path(tempfile.gettempdir()), 1)),
        "prepared_s": prepared_s,
        "seconds": time.monotonic() - began,
        "left_out": left_out,
        "summary": summary(rows),
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    for line in result["summary"]:
        print(line)
    print(f"{len(rows)} runs, {left_out} left out, errors:", {row["error"] for row in rows if "error" in row})


if __name__ == "__main__":
    main()
