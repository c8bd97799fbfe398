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
that the study found.
What drops information is by hand only where the study may do so, too.

Two hosts are emulated (`STEPTUNE_EMULATED_HOSTS`): ranks send between them through sockets over loopback. `two_25gbit`
shapes the loopback interface to the 25 Gbit/s of each host's port, both ways together, which needs root and `tc`.

Where there is one GPU, `STEPTUNE_EMULATED_DEVICES=2` lets two ranks share it, on two emulated hosts. Under NVIDIA's MPS
their kernels run at the same time; without it they take turns, and each exchange waits for some. Such rows stand in
tables of their own.

`vit_huge_largest` has the largest batch that DDP at O1 fits into memory, which is found first.

`predicted_units_per_s` is what `steptune predict` says of a by-hand configuration that computes as today's does.

One JSON line a row is appended to the results file; rows may come from several sittings, and the last of a row counts.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from by_hand_rows import (
    SMALL_RESNET,
    SMALL_VIT,
    Choices,
    add_arguments,
    append,
    distinct,
    kept_lines,
    legal,
    of_every_column,
    reached,
)
from rank_peaks import Configuration, largest_batch, measured
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

from tuner.emulation import HOSTS_VARIABLE, ranks_per_device
from tuner.errors import ChoiceError, StoreError
from tuner.hardware import SHARED
from tuner.prediction.basis import basis_of
from tuner.prediction.plans import COMMUNICATION
from tuner.records import Candidate, StudySettings, TrialResult

WORKLOAD = f"{ROOT}/benchmarks/workloads/mixed_precision.py:mixed_precision"
DDP = "DDP 25 MiB"
WANTED = {("two", "lossy", "vit_large"): 2.5, ("two", "", "vit_large"): 1.5}
"""Times DDP's default."""
WANTED_LARGEST = 2.2
MOST_EXPOSED = 0.10
"""Exposed communication of a step on one host."""
IMAGENET = 1_281_167
NETWORKS = ("one", "two", "two_25gbit")
PORT_GBITS = 25
NUM_CONTENDERS = 2
"""Of the fastest by hand that are started again."""
FINDING_S = 100.0
"""What looking for the largest batch may take."""

O1: Choices = {"precision": {"level": "O1", "dtype": "bfloat16"}}
O2: Choices = {"precision": {"level": "O2", "dtype": "bfloat16"}}
SOCKETS: Choices = {"nccl_settings": {"socket_threads": 4, "sockets_per_thread": 4}}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One workload.

    Attributes:
        workload: An entry of the zoo, without its batch.
        per_gpu: Samples of a step on one GPU; None for the most that DDP at O1 fits.
        small: The workload of a dry run, without its batch.
        image: Its samples are images.
        convolves: It has convolutions, for which cuDNN's benchmark is on.
    """

    name: str
    workload: str
    per_gpu: int | None
    small: str
    image: bool = True
    convolves: bool = True

    def reference(self, batch: int, *, small: bool) -> str:
        entry = self.small if small else self.workload
        return f"{WORKLOAD}?entry={entry.replace('?', '&')}&batch={batch}"


_GPT = "sequence=32&n_layer=2&n_embd=32&n_head=2&vocab_size=256&n_positions=32&bos_token_id=0&eos_token_id=0"
_BERT = "sequence=32&hidden_size=32&num_hidden_layers=2&num_attention_heads=2&intermediate_size=64&vocab_size=256"
_VGG = "image_size=32&divisor=8&hidden=64&num_labels=10"
ROWS: tuple[Row, ...] = (
    Row(name="vit_large", workload="vit_large", per_gpu=64, small=f"vit_large?{SMALL_VIT}&patch_size=8"),
    Row(name="vit_huge", workload="vit_huge", per_gpu=32, small=f"vit_huge?{SMALL_VIT}&patch_size=8"),
    Row(name="vit_huge_largest", workload="vit_huge", per_gpu=None, small=f"vit_huge?{SMALL_VIT}&patch_size=8"),
    Row(
        name="gpt2_large",
        workload="gpt2_large?sequence=1024",
        per_gpu=4,
        small=f"gpt2_large?{_GPT}",
        image=False,
        convolves=False,
    ),
    Row(name="resnet50", workload="resnet50", per_gpu=64, small=f"resnet50?{SMALL_RESNET}"),
    Row(name="vgg16", workload="vgg16", per_gpu=64, small=f"vgg16?{_VGG}"),
    Row(
        name="bert_large",
        workload="bert_large?sequence=512",
        per_gpu=16,
        small=f"bert_large?{_BERT}",
        image=False,
        convolves=False,
    ),
)
SMALL_PER_GPU, SMALL_MOST = 4, 16
PLANNED = {
    ("one", ""): [row.name for row in ROWS],
    ("two", ""): ["vit_large"],
    ("two", "lossy"): [row.name for row in ROWS if row.per_gpu],
}
"""Rows that the table is to have, by network and consent; it shows others, too, once they are measured."""


def by_hand(row: Row, *, network: str, lossy: bool, on_cpu: bool) -> dict[str, Choices]:
    """The columns of the table, the default first and then the most promising."""
    common = of_every_column(convolves=row.convolves, on_cpu=on_cpu)

    def sharded(mode: str, **more: bool | str) -> Choices:
        return {**O2, "sharding": {"mode": mode, "wrap": "block", "ignored": "norms", **more}}

    bf16: Choices = {"gradient_compression": {"method": "bf16"}}
    hierarchical: Choices = {"hierarchical_allreduce": {"levels": 2}}
    columns: dict[str, Choices] = {DDP: O1}
    if network != "one":
        hybrid = sharded("hybrid", reshard=False)
        columns |= {
            "hierarchical": {**O1, **hierarchical},
            "hybrid sharding": hybrid,
            "DDP, 4 x 4 sockets": {**O1, **SOCKETS},
            "hybrid sharding, 4 x 4 sockets": {**hybrid, **SOCKETS},
        }
        if lossy:
            columns |= {
                "hybrid sharding, bf16 reduction": {**hybrid, **bf16},
                "hierarchical, bf16 between hosts": {**O1, **hierarchical, **bf16},
            }
    if lossy:
        columns |= {
            "PowerSGD 4": {**O1, "gradient_compression": {"method": "powersgd", "rank": 4}},
            "DDP, bf16 hook": {**O1, **bf16},
        }
    columns |= {
        "FSDP2 per block": sharded("full"),
        "FSDP2 per block, grad_op": sharded("grad_op"),
        "DDP 200 MiB": {**O1, "ddp_buckets": {"bucket_cap_mb": 200}},
    }
    return {name: {**common, **choices} for name, choices in columns.items()}


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
    """What `steptune predict` says of a configuration, from the profile of today's and the measured links: of such as
    communicate in another way and else compute as today, over links as they were measured.
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
    """What the trials of the study saw of NCCL."""
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
    return {"per_gpu": size, "largest_peaks_mib": _mib(peaks)}


def _mib(peaks: Mapping[int, int]) -> dict[int, int]:
    return {size: found >> 20 for size, found in peaks.items()}


# --- the machine ------------------------------------------------------------------------------


def _asked(expression: str) -> int:
    """Of torch, which this process does not import."""
    code = f"import torch; print({expression})"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def _num_gpus() -> int:
    """Visible ones, or the parts of them that are taken for devices."""
    visible = _asked("torch.cuda.device_count()")
    return visible * ranks_per_device(visible)


def _gpu_bytes() -> int:
    return _asked("torch.cuda.get_device_properties(0).total_memory")


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


# --- the summary ------------------------------------------------------------------------------


def best_by_hand(line: dict) -> tuple[str, dict] | None:
    """The column against which ours is slowest."""
    found = [(name, column) for name, column in line.get("by_hand", {}).items() if column.get("ratio")]
    return min(found, key=lambda pair: pair[1]["ratio"], default=None)


def verdicts(line: dict) -> dict[str, bool]:
    """What a row has to show, and whether it did."""
    best, default = best_by_hand(line), line.get("by_hand", {}).get(DDP, {})
    shown: dict[str, bool] = {}
    if best is not None:
        shown["at least the best by hand"] = reached(best[1])
    wanted = WANTED.get((line["network"], line["allow"], line["row"]))
    if line["row"] == "vit_huge_largest":
        wanted = WANTED_LARGEST
    if wanted is not None and default.get("ratio"):
        shown[f"{wanted} times DDP's default"] = default["ratio"] >= wanted
    if line["network"] == "one" and "exposed_communication" in line:
        shown["exposed communication below 10 %"] = line["exposed_communication"] < MOST_EXPOSED
    return shown


def summary(lines: Sequence[dict]) -> str:
    """A table for each network and consent, and what is missing; tables of their own where ranks shared a device."""
    text = []
    for shared in (False, True):
        for network, allow in itertools.product(NETWORKS, ("", "lossy")):
            of_table = [
                line for line in lines if (line["network"], line["allow"], _shared(line)) == (network, allow, shared)
            ]
            last = {line["row"]: line for line in of_table}
            planned = () if shared else PLANNED.get((network, allow), ())
            shown = [row.name for row in ROWS if row.name in {*last, *planned}]
            if shown:
                where = ", ranks share a device" if shared else ""
                text.append(f"{network}, allowed: {allow or 'nothing'}{where}")
                text += [_told_row(name, last.get(name)) for name in shown]
    return "\n".join(text)


def _shared(line: dict) -> bool:
    return any(SHARED in name for name in line.get("hardware", {}).get("devices", ()))


def _told_row(name: str, line: dict | None) -> str:
    if line is None:
        return f"  {name:16} missing"
    if "impossible" in line:
        return f"  {name:16} impossible: {line['impossible']}"
    best, default = best_by_hand(line), line["by_hand"].get(DDP, {})
    if best is None:
        return f"  {name:16} missing: no by-hand figure to compare with"
    ratio = default.get("ratio")
    parts = [
        f"  {name:16} {line['ranks']} ranks, {line['beside']['units_per_s'] or 0:10.0f} {line['unit']}s/s",
        f"{best[1]['ratio']:.3f} {best[1]['interval'] or ''} of {best[0]}",
        f"{ratio:.2f} of DDP" if ratio else "no figure of DDP",
        f"{line['exposed_communication']:.1%} exposed",
        f"{line['trials']} trials in {line['tuning_s']:.0f} s",
        f"guard {line['guard_verdicts']['passed']} of {sum(line['guard_verdicts'].values())}",
        f"peaks {line['beside']['peak_mib_by_rank']} MiB",
    ]
    if "hours_per_imagenet_epoch" in line:
        parts.append(f"{line['hours_per_imagenet_epoch']:.3f} h per epoch of ImageNet")
    missed = [goal for goal, shown in verdicts(line).items() if not shown]
    return ", ".join(parts) + (f": NOT {'; NOT '.join(missed)}" if missed else ": reached")


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
                **stamp(command),
            }
            try:
                with network_of(network):
                    found = run(row, settings, network, arguments.small, arguments.minutes, trials)
            except CannotShape as error:
                found = {"impossible": str(error)}
            append(arguments.out, {**head, **found})
            print(_told_row(row.name, {**head, **found}), flush=True)


if __name__ == "__main__":
    main()
