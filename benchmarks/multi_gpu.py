"""Does an unattended study beat what an expert gets by hand on several GPUs? Seven workloads on one host and on two.

    python benchmarks/multi_gpu.py --only vit_large
    python benchmarks/multi_gpu.py --only vit_large --network two --allow lossy
    python benchmarks/multi_gpu.py --summary
    python benchmarks/multi_gpu.py --small --tune-minutes 2 --minutes 4      # a dry run on a CPU, over gloo

For each row: a study with the guard on and a rank for every visible GPU, as `steptune tune` runs it; then, on the same
devices within the same command, its recommendation and the by-hand configurations: one start of each, then blocks of
fresh processes in random order of the recommendation, DDP as PyTorch has it, and the fastest by hand, compared as the
confirmation compares. Today's configuration is DDP at O1 in bfloat16 with fused AdamW. By hand DDP computes as today,
FSDP2 with bfloat16 weights and FP32 masters (O2), norms whole on every rank, all with cuDNN's benchmark and the loader
that the study found. The most promising are compiled as well, block by block where the model repeats blocks.
What drops information is by hand only where the study may do so, too.

Two hosts are emulated (`STEPTUNE_EMULATED_HOSTS`): ranks send between them through sockets over loopback. `two_25gbit`
shapes the loopback interface to the 25 Gbit/s of each host's port, both ways together, which needs root and `tc`.

Where there is one GPU, `STEPTUNE_EMULATED_DEVICES=2` lets two ranks share it, on two emulated hosts: they take turns,
and each exchange waits for some. Such rows stand in tables of their own.

`vit_huge_largest` has the largest batch that DDP at O1 fits into memory, which is found first.

`predicted_units_per_s` is what `steptune predict` says of a by-hand configuration that computes as today's does.

One JSON line a row is appended to the results file; rows may come from several sittings, and the last of a row counts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from by_hand_rows import Choices, add_arguments, distinct, legal
from multi_gpu_rows import DDP, O1, ROWS, Row, by_hand
from multi_gpu_table import NETWORKS, summary, told_row
from rank_peaks import Configuration, largest_batch, measured
from result_lines import append, kept_lines
from stamp import ROOT, stamp
from tuned import (
    INPUT_STRATEGIES,
    LEAST_S,
    OTHER_S,
    Tuned,
    answer,
    compared,
    json_lines,
    settings_of,
    side_by_side,
    told,
    tuned,
)

from steptune.tuner.emulation import HOSTS_VARIABLE, ranks_per_device
from steptune.tuner.errors import ChoiceError, StoreError
from steptune.tuner.prediction.basis import basis_of
from steptune.tuner.prediction.plans import COMMUNICATION
from steptune.tuner.records import Candidate, StudySettings, TrialResult

IMAGENET = 1_281_167
PORT_GBITS = 25
NUM_CONTENDERS = 2
"""Number of the fastest by hand that are started again."""
FINDING_S = 100.0
"""Seconds that looking for the largest batch may take."""
SMALL_PER_GPU, SMALL_MOST = 4, 16

# --- one row ----------------------------------------------------------------------------------


def run(row: Row, settings: StudySettings, network: str, small: bool, minutes: float, trials: Path | None) -> dict:
    """Tunes one row and times it beside what was done by hand."""
    deadline = time.monotonic() + 60 * minutes
    found_batch: dict = {}
    if row.per_gpu is None:
        found_batch = largest_for_ddp(row, settings, small)
    per_gpu = int(found_batch.get("per_gpu") or (SMALL_PER_GPU if small else row.per_gpu or 0))
    if not per_gpu:
        return {"workload": row.workload, "impossible": "not even one sample a GPU fits under DDP", **found_batch}
    reference = row.reference(per_gpu * settings.num_ranks, small=small)
    with tuned(reference, settings, say=f"{row.name}  ") as study:
        if trials is not None:
            trials.parent.mkdir(parents=True, exist_ok=True)
            trials.write_text(json_lines(told(study)))
        ours = study.recommendation.candidate
        on_cpu = study.recommendation.hardware.device_kind == "cpu"
        columns, impossible = legal(study, by_hand(row, network=network, lossy=bool(settings.allow), on_cpu=on_cpu))
        blocks = beside(study, ours, columns, deadline)
        ours_again = compared(ours, ours, blocks)
        table = {
            name: {**compared(ours, candidate, blocks), **_memory(candidate, blocks), **predicted(study, candidate)}
            for name, candidate in columns.items()
        }
        line = {
            "workload": reference.removeprefix(f"{ROOT}/"),
            "per_gpu": per_gpu,
            "ranks": settings.num_ranks,
            **found_batch,
            **answer(study),
            "beside": {"units_per_s": ours_again["units_per_s"], "num_blocks": len(blocks), **_memory(ours, blocks)},
            "emulation": _emulation(study),
            "by_hand": {**table, **{name: {"unsupported": reason} for name, reason in impossible.items()}},
        }
        line["exposed_communication"] = line["shares_after"].get("communication", 0.0)
        if row.image and ours_again["units_per_s"]:
            line["hours_per_imagenet_epoch"] = round(IMAGENET / ours_again["units_per_s"] / 3600, 4)
        return line


def beside(
    study: Tuned, ours: Candidate, columns: Mapping[str, Candidate], deadline: float
) -> list[dict[str, TrialResult]]:
    """One start of each, the default and ours first; then blocks of those that count, with what time is left."""
    first: dict[str, TrialResult] = {}
    for number, candidate in enumerate(distinct([ours, *columns.values()])):
        left_s = deadline - time.monotonic()
        if number < 2 or left_s > LEAST_S + OTHER_S:
            (first[candidate.key],) = study.run([candidate], number, left_s)
    rates = {name: compared(ours, candidate, [first])["units_per_s"] or 0.0 for name, candidate in columns.items()}
    fastest = sorted((name for name in columns if name != DDP), key=lambda name: -rates[name])[:NUM_CONTENDERS]
    contenders = [ours, *(columns[name] for name in (DDP, *fastest) if rates.get(name))]
    if deadline - time.monotonic() < LEAST_S:
        return [first]
    return [first, *side_by_side(study, distinct(contenders), [], deadline)]


def predicted(study: Tuned, candidate: Candidate) -> dict:
    """Predict a configuration as `steptune predict` does, from the profile of today's and the measured links. Only
    configurations that communicate otherwise and compute as today can be predicted.
    """
    trials = study.store.trials(study.study.study_id)
    today = next((t for t in trials if t.result and t.result.breakdowns and t.result.candidate.is_baseline), None)
    others = candidate.choices.keys() - {*COMMUNICATION, "backend_flags", *INPUT_STRATEGIES}
    if today is None or others:
        return {}
    try:
        basis = basis_of(study.study, trials, today)
    except (StoreError, ChoiceError) as error:  # a row is of what was measured: it does not end for a prediction
        return {"not_predicted": str(error)}
    step_ns = basis.model.step_ns(basis.choices(candidate), basis.cluster)
    units = basis.facts.units_per_rank * basis.cluster.num_ranks
    return {"predicted_units_per_s": round(units / step_ns * 1e9, 1)}


def _memory(candidate: Candidate, blocks: Sequence[dict[str, TrialResult]]) -> dict:
    """Peak of every rank."""
    found: dict[int, int] = {}
    for block in blocks:
        for peak in block[candidate.key].memory if candidate.key in block else ():
            size = peak.allocated_bytes or peak.resident_bytes
            found[peak.rank] = max(size, found.get(peak.rank, 0))
    return {"peak_mib_by_rank": [found[rank] >> 20 for rank in sorted(found)]}


def _emulation(study: Tuned) -> str:
    """NCCL's choices as the trials of the study saw them."""
    for trial in study.store.trials(study.study.study_id):
        for effect in trial.result.effects if trial.result else ():
            if effect.strategy == "nccl_settings":
                return effect.detail
    return ""


def largest_for_ddp(row: Row, settings: StudySettings, small: bool) -> dict:
    """The largest batch of a GPU that DDP at O1 trains, found from the peaks of two small ones."""
    choices: Choices = {**O1, "optimizer_implementation": {"implementation": "fused"}}
    device = "cpu" if small and not _num_gpus() else "cuda"
    most, until = SMALL_MOST if small else 1024, time.monotonic() + FINDING_S
    peaks: dict[int, int] = {}

    def peak_of(size: int) -> bool:
        if time.monotonic() > until:
            return False
        reference = row.reference(size * settings.num_ranks, small=small)
        found = measured(
            Configuration(workload=reference, choices=choices, num_ranks=settings.num_ranks, device=device)
        )
        if not found.failure:
            peaks[size] = found.most_bytes
        elif not found.out_of_memory:
            print(f"{row.name}: {size} a GPU: {found.failure}", flush=True)
        return not found.failure

    if not all(peak_of(size) for size in (8, 16)):
        return {"per_gpu": largest_batch(peak_of, 4, 8), "largest_peaks_mib": _mib(peaks)}
    per_sample = max(1.0, (peaks[16] - peaks[8]) / 8)
    guess = 16 if small else int(0.95 * (_gpu_bytes() - peaks[16]) / per_sample) + 16
    size = min(most, guess // 8 * 8)
    # Ours is trained in processes of its own, whose guard needs some memory, too: an eighth is stepped down at a time.
    while size > 16 and not peak_of(size):
        size = size * 7 // 8 // 8 * 8
        if time.monotonic() > until:
            size = max(peaks)
            print(f"{row.name}: no time is left to look for the largest batch: {size} a GPU was trained", flush=True)
            break
    return {"per_gpu": size, "largest_peaks_mib": _mib(peaks)}


def _mib(peaks: Mapping[int, int]) -> dict[int, int]:
    return {size: found >> 20 for size, found in peaks.items()}


# --- the machine ------------------------------------------------------------------------------


@functools.cache
def _asked(expression: str) -> int:
    """Ask torch in another process, because importing it takes seconds."""
    code = f"import torch; print({expression})"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def _num_gpus() -> int:
    """Visible ones, or the parts of them that are taken for devices."""
    return _asked("torch.cuda.device_count()") * _sharing()


def _sharing() -> int:
    """Ranks on one GPU."""
    visible = _asked("torch.cuda.device_count()")
    return ranks_per_device(visible) if visible else 1


def _gpu_bytes() -> int:
    return _asked("torch.cuda.get_device_properties(0).total_memory") // _sharing()


class CannotShape(Exception):
    """The loopback interface cannot be given a rate."""


@contextlib.contextmanager
def network_of(name: str) -> Iterator[None]:
    """The ranks on one host or on two emulated ones, over a shaped interface where that is asked for.

    Raises:
        CannotShape: Says why the interface cannot be shaped here.
    """
    if name == "one":
        os.environ.pop(HOSTS_VARIABLE, None)
        yield
        return
    os.environ[HOSTS_VARIABLE] = "2"
    try:
        if name == "two":
            yield
            return
        shape()
        try:
            yield
        finally:
            subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=False)
    finally:
        os.environ.pop(HOSTS_VARIABLE, None)


def shape() -> None:
    """Loopback carries what both hosts send, so that it gets the rate of two ports."""
    if shutil.which("tc") is None:
        raise CannotShape("there is no tc (iproute2) here")
    shaper = f"tbf rate {2 * PORT_GBITS}gbit burst 32mb latency 50ms"
    made = subprocess.run(
        ["tc", "qdisc", "add", "dev", "lo", "root", *shaper.split()], capture_output=True, text=True, check=False
    )
    if made.returncode:
        raise CannotShape(f"tc cannot shape lo: {made.stderr.strip() or made.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, [row.name for row in ROWS], tune_minutes=4.7, minutes=9.3, out="multi_gpu.jsonl")
    parser.add_argument("--network", nargs="*", choices=NETWORKS, default=["one"])
    parser.add_argument("--ranks", type=int, help="default: one for each visible GPU, two on a CPU")
    arguments = parser.parse_args()
    if not arguments.summary:
        tune(arguments)
    print(summary(kept_lines(arguments.out, small=arguments.small)))


def tune(arguments: argparse.Namespace) -> None:
    """Runs the rows that were asked for, and appends a line for each as soon as it is known."""
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", "benchmarks/multi_gpu.py", *sys.argv[1:]])
    num_ranks = arguments.ranks or _num_gpus() or 2
    if num_ranks < 2:
        raise SystemExit(f"{num_ranks} GPU is visible: several ranks need several, or --ranks 2 on a CPU")
    for network in arguments.network:
        for row in (row for row in ROWS if row.name in arguments.only):
            settings = msgspec.structs.replace(
                settings_of(arguments.tune_minutes, arguments.foreign_load, arguments.allow), num_ranks=num_ranks
            )
            if row.per_gpu is None:
                settings = msgspec.structs.replace(settings, budget_s=settings.budget_s - FINDING_S * 0.75)
            trials = arguments.trials and arguments.trials / f"{row.name}-{network}{arguments.allow}.jsonl"
            head = {
                "row": row.name,
                "network": network,
                "allow": arguments.allow,
                "small": arguments.small,
                "ranks_per_device": _sharing(),
                **stamp(command),
            }
            try:
                with network_of(network):
                    found = run(row, settings, network, arguments.small, arguments.minutes, trials)
            except CannotShape as error:
                found = {"impossible": str(error)}
            append(arguments.out, {**head, **found})
            print(told_row(row.name, {**head, **found}), flush=True)


if __name__ == "__main__":
    main()
