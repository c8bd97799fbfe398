"""Does an unattended study of some minutes beat what an expert gets by hand? Seven rows on one GPU.

    python benchmarks/single_gpu.py --only vit_large
    python benchmarks/single_gpu.py --only vit_large --allow lossy
    python benchmarks/single_gpu.py --summary
    python benchmarks/single_gpu.py --small --tune-minutes 1.5 --minutes 3      # a dry run on a CPU

For each row: a study with the guard on, as `steptune tune` runs it; then its recommendation and the by-hand
configurations side by side, in blocks of fresh processes with random order, compared as the confirmation compares,
on the same device within the same command. The by-hand configurations are candidates of the same strategies, all
with fused AdamW and cuDNN's benchmark; they get the loader that the study found, because by hand they were measured
with inputs that lay on the device. FP32 is as PyTorch has it: convolutions may use TF32.

One JSON line a row is appended to the results file; rows may come from several sittings, and the last of a row counts.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from by_hand_rows import (
    SMALL_RESNET,
    SMALL_VIT,
    Choices,
    add_arguments,
    distinct,
    legal,
    of_every_column,
    reached,
)
from result_lines import append, kept_lines
from stamp import stamp
from tuned import answer, compared, json_lines, settings_of, side_by_side, told, tuned

from steptune.tuner.records import StudySettings

BEST_O1, BEST_PURE = "best by hand, O1", "best by hand, pure bf16"
BLOCKS_O1 = "by hand, O1, compiled blocks"
WANTED_MEAN = {"": 1.05, "lossy": 1.03}
CHANNELS_LAST: Choices = {"memory_format": {"layout": "channels_last"}}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One workload.

    Attributes:
        best: What by hand was fastest beside the precision.
        convolves: It has convolutions, for which cuDNN's benchmark is on.
        pure: Pure bf16 was measured by hand too.
        blocks: An expert would try compiling the blocks, too: they are of one kind and keep the device busy.
        small: The workload of a dry run.
    """

    name: str
    workload: str
    best: Choices
    small: str
    convolves: bool = True
    pure: bool = True
    blocks: bool = False


def compiled(mode: str) -> Choices:
    return {"compile": {"mode": mode}}


_SWIN = "image_size=32&patch_size=4&window_size=4&embed_dim=8&depths=2,2&num_heads=2,4&num_labels=10"
_GPT = "sequence=32&n_layer=2&n_embd=32&n_head=2&vocab_size=256&n_positions=32"
ROWS: tuple[Row, ...] = (
    Row(
        name="vit_large",
        workload="zoo:vit_large?batch=128",
        best=compiled("default"),
        blocks=True,
        small=f"zoo:vit_large?batch=8&{SMALL_VIT}",
    ),
    Row(
        name="swin_base",
        workload="zoo:swin_base?batch=128",
        best=compiled("default"),
        small=f"zoo:swin_base?batch=8&{_SWIN}",
    ),
    Row(
        name="swin_tiny_16",
        workload="zoo:swin_tiny?batch=16",
        best=compiled("reduce-overhead"),
        small=f"zoo:swin_tiny?batch=4&{_SWIN}",
    ),
    Row(
        name="resnet50",
        workload="zoo:resnet50?batch=256",
        best={**CHANNELS_LAST, **compiled("reduce-overhead")},
        pure=False,
        small=f"zoo:resnet50?batch=8&{SMALL_RESNET}",
    ),
    Row(
        name="resnet50_16",
        workload="zoo:resnet50?batch=16",
        best={**CHANNELS_LAST, **compiled("reduce-overhead")},
        pure=False,
        small=f"zoo:resnet50?batch=4&{SMALL_RESNET}",
    ),
    Row(
        name="gpt2_large",
        workload="zoo:gpt2_large?batch=8&sequence=1024",
        best=compiled("default"),
        convolves=False,
        blocks=True,
        small=f"zoo:gpt2_large?batch=4&{_GPT}",
    ),
    Row(
        name="gpt2_small",
        workload="zoo:gpt2?batch=4&sequence=1024",
        best=compiled("reduce-overhead"),
        convolves=False,
        small=f"zoo:gpt2?batch=2&{_GPT}",
    ),
)


def by_hand(row: Row, *, on_cpu: bool = False) -> dict[str, Choices]:
    """The columns of the table, as choices; on a CPU, where there is no cuDNN, those that a dry run can try."""
    common = of_every_column(convolves=row.convolves, on_cpu=on_cpu)

    def at(level: str, dtype: str | None, more: Choices | None = None) -> Choices:
        return {**common, "precision": {"level": level, "dtype": dtype}, **(more or {})}

    columns = {
        "fp32": common,
        "TF32": at("tf32", None),
        "O1 fp16": at("O1", "float16"),
        "O1 bf16": at("O1", "bfloat16"),
        BEST_O1: at("O1", "bfloat16", row.best),
    }
    if row.blocks:
        blocks: Choices = {"compile": {"mode": "default", "scope": "regional", "dynamic": False}}
        columns[BLOCKS_O1] = at("O1", "bfloat16", blocks)
    return {**columns, BEST_PURE: at("O3", "bfloat16", row.best)} if row.pure else columns


def run(row: Row, settings: StudySettings, small: bool, minutes: float, trials: Path | None) -> dict:
    """Tunes one row and times it beside what was done by hand; all trials go to the file `trials`."""
    deadline = time.monotonic() + 60 * minutes
    workload = row.small if small else row.workload
    with tuned(workload, settings, say=f"{row.name}  ") as study:
        if trials is not None:
            trials.write_text(json_lines(told(study)))
        ours = study.recommendation.candidate
        on_cpu = study.recommendation.hardware.device_kind == "cpu"
        columns, impossible = legal(study, by_hand(row, on_cpu=on_cpu))
        first = [columns[name] for name in goals(bool(settings.allow)) if name in columns]
        contenders = distinct([ours, *first])
        others = [c for c in distinct(list(columns.values())) if c not in contenders]
        blocks = side_by_side(study, contenders, others, deadline)
        table = {name: compared(ours, candidate, blocks) for name, candidate in columns.items()}
        ours_again = compared(ours, ours, blocks)
        return {
            "workload": workload,
            **answer(study),
            "beside": {"units_per_s": ours_again["units_per_s"], "num_blocks": len(blocks)},
            "by_hand": {**table, **{name: {"unsupported": reason} for name, reason in impossible.items()}},
        }


# --- the summary ------------------------------------------------------------------------------


def goals(lossy: bool) -> tuple[str, ...]:
    return (BEST_O1, BLOCKS_O1, BEST_PURE) if lossy else (BEST_O1, BLOCKS_O1)


def target(line: dict) -> dict | None:
    """Figure that a row has to reach: the best O1 by hand, or pure bf16 where `lossy` is allowed and that is better."""
    names = goals(line["allow"] == "lossy")
    found = [line["by_hand"][name] for name in names if line["by_hand"].get(name, {}).get("ratio")]
    return min(found, key=lambda row: row["ratio"], default=None)


def summary(lines: Sequence[dict]) -> str:
    """A table for each consent, its geometric mean, and what is missing."""
    text = []
    for allow, wanted in WANTED_MEAN.items():
        last = {line["row"]: line for line in lines if line["allow"] == allow}
        ratios = []
        text.append(f"allowed: {allow or 'nothing'}")
        for row in ROWS:
            line = last.get(row.name)
            goal = target(line) if line else None
            if line is None or goal is None:
                text.append(f"  {row.name:14} missing{'' if line is None else ': no by-hand figure to compare with'}")
                continue
            ratios.append(goal["ratio"])
            text.append(
                f"  {row.name:14} {line['beside']['units_per_s'] or 0:12.0f} {line['unit']}s/s, "
                f"{goal['ratio']:.3f} {goal['interval'] or ''} of by hand ({goal['units_per_s'] or 0:.0f}), "
                f"{line['gain'] or 0:.2f} of today's, {line['tuning_s']:.0f} s, {line['trials']} trials: "
                f"{'reached' if reached(goal) else 'NOT reached'}"
            )
        if ratios:
            mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
            verdict = "reached" if mean >= wanted else "NOT reached"
            text.append(f"  geometric mean of {len(ratios)} rows {mean:.3f}; wanted {wanted}: {verdict}")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, [row.name for row in ROWS], tune_minutes=6.0, minutes=9.5, out="single_gpu.jsonl")
    arguments = parser.parse_args()
    if not arguments.summary:
        tune(arguments)
    print(summary(kept_lines(arguments.out, small=arguments.small)))


def tune(arguments: argparse.Namespace) -> None:
    """Runs the rows that were asked for, and appends a line for each as soon as it is known."""
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", "benchmarks/single_gpu.py", *sys.argv[1:]])
    for row in (row for row in ROWS if row.name in arguments.only):
        settings = settings_of(arguments.tune_minutes, arguments.foreign_load, arguments.allow)
        trials = arguments.trials and arguments.trials / f"{row.name}{arguments.allow}.jsonl"
        found = run(row, settings, arguments.small, arguments.minutes, trials)
        head = {"row": row.name, "allow": arguments.allow, "small": arguments.small, **stamp(command)}
        append(arguments.out, {**head, **found})
        shown = {"row": row.name, "recommended": found["recommended"], "by_hand": found["by_hand"]}
        print(json.dumps(shown, indent=1), flush=True)


if __name__ == "__main__":
    main()
