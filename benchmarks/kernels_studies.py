"""Gain of a study on the models that the fused kernels are for, and the kernels' own part in its answer.

    python benchmarks/kernels_studies.py --only swin_tiny detector --minutes 3          # needs a CUDA device
    python benchmarks/kernels_studies.py --small --minutes 2 --only detector            # a dry run

Each model is tuned as `steptune tune` does it, from FP32 eager and from what professionals run today: autocast to
bfloat16, a fused optimizer, compiled. The part of the kernels is their contribution as the confirmation measures it, by
leaving them out of the answer; where the budget did not reach for that, the row has none. One JSON line is appended to
the results file.
"""

from __future__ import annotations

from bound_rows import measure_rows, parser_of
from msgspec import to_builtins
from stamp import ROOT
from tuned import Tuned

PROFESSIONAL = f"{ROOT / 'benchmarks' / 'workloads' / 'mixed_precision.py'}:professional?entry="
KERNELS = "fused_kernels"
MODELS = ("swin_tiny", "swin_base", "detector", "monocular_3d")
FULL = {name: f"zoo:{name}" for name in MODELS} | {f"{name}_bf16": PROFESSIONAL + name for name in MODELS}
_SWIN = "batch=2&embed_dim=12&depths=1,1&num_heads=1,2&image_size=56&num_labels=10"
_ARGUMENTS = {
    "swin_tiny": _SWIN,
    "swin_base": _SWIN,
    "detector": "batch=2&image_size=64&width=8&depth=0",
    "monocular_3d": "batch=2&height=128&image_width=128&width=8&depth=0",
}
SMALL = {name: f"zoo:{name}?{_ARGUMENTS[name]}" for name in MODELS} | {
    f"{name}_bf16": f"{PROFESSIONAL}{name}&{_ARGUMENTS[name]}" for name in MODELS
}


def look(name: str, study: Tuned, found: dict) -> dict:
    """The kernels' part in the answer, and every trial that had them."""
    parts = {part.strategy: to_builtins(part) for part in study.recommendation.parts}
    trials = [
        trial.result.failure.message.replace(f"{ROOT}/", "")[:200]
        if trial.result.failure
        else trial.result.guard and trial.result.guard.reason
        for trial in study.store.trials(study.study.study_id)
        if KERNELS in trial.candidate.choices and trial.result is not None
    ]
    return {"kernels": parts.get(KERNELS), "trials_with_kernels": trials}


def verdict(row: dict) -> str:
    within = "in the answer" if row["kernels"] else "not in the answer"
    return f"{row['verdict']}, {row['gain']} {row['gain_interval']}, the kernels {within}: {row['kernels']}"


def main() -> None:
    arguments = parser_of(__doc__, FULL, "kernels_studies.jsonl").parse_args()
    measure_rows("kernels_studies.py", arguments, SMALL if arguments.small else FULL, look, verdict)


if __name__ == "__main__":
    main()
