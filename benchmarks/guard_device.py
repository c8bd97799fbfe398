"""Planted faults that the guard rejects on a GPU, and correct changes that it rejects wrongly: the product's verdicts.

Small trainings (`tests/support/guarded_trainings.py`) run the guard's protocol, held to a reference in FP32: in FP32,
TF32, bfloat16 (O1, O2) and float16, with recorded steps, and on two ranks that share one device; with the optimizer's
forms, micro-batches, layouts and checkpointing, and with one thing wrong. Each run ends with the verdict that a trial
of it would have had, and with what its checks saw: those that reject, and those beyond their limit that are only shown
on this device.

A fault counts where it is one (ten steps in FP64 end elsewhere) and where it is material: it moves weights or
statistics in ten steps, on the device and with the same settings, by more than the precision does. Some faults are in
Python that a recorded step never runs again, and move nothing there. Rows are appended as they come. What does not
begin within the time is left out and counted, and runs that the file of rows has are not made again.

No limit is fitted here: they are those of `benchmarks/guard_power.py`, which were fitted on a CPU.

    python benchmarks/guard_device.py --rows rows.jsonl --seconds 240     # and writes results/guard_device.json
    python benchmarks/guard_device.py --device cpu --rows rows.jsonl --seconds 60 --output guard_device.json
    python benchmarks/guard_device.py --trainings Causal --rows causal.jsonl     # of several processes on one GPU each
                                     # a part; their rows together, with --seconds 0, make the results
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from guard_effects import NO_EFFECT, effect_of, end_of, moves_of, rounding_of
from msgspec.structs import replace
from stamp import RESULTS, hardware, stamp

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from guarded import BF16, FP32, PROTOCOL, Study, join_study, make_files, make_study
from guarded_trainings import FAULTS, Causal, Convolutional, Masked, Patches, Training, WideCausal

from steptune.tuner.emulation import DEVICES_VARIABLE
from steptune.tuner.hardware import describe_environment
from steptune.tuner.trials.rank_device import rank_device

OUTPUT = RESULTS / "guard_device.json"
TF32 = FP16 = 2.0**-11
TRAININGS: tuple[type[Training], ...] = (WideCausal, Convolutional, Masked, Patches, Causal)
RANDOM = (Patches, Causal)
CONVOLVES = (Convolutional, Patches)
"""Convolutions on a GPU use TF32 unless told otherwise."""
O1 = {"precision": {"level": "O1", "dtype": "bfloat16"}}
RECORDED = {"cuda_graph": {"scope": "step"}}
PRECISIONS: dict[str, tuple[dict[str, Any], float]] = {
    "bf16": (O1, BF16),
    "O2": ({"precision": {"level": "O2", "dtype": "bfloat16"}}, BF16),
    "tf32": ({"precision": {"level": "tf32", "dtype": None}}, TF32),
    "fp32": ({}, FP32),
    "fp16": ({"precision": {"level": "O1", "dtype": "float16"}}, FP16),
    "bf16, recorded": ({**O1, **RECORDED}, BF16),
    "tf32, recorded": ({"precision": {"level": "tf32", "dtype": None}, **RECORDED}, TF32),
}
LAST = ("fp32", "fp16")
"""Precisions that are run once all others were."""
ON_RANKS = ("bf16", "O2", "tf32", "fp32")
"""Precisions of two ranks."""
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
LOOPBACK = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
}
"""Ranks meet on a host that has no network."""
OF_RECORDED = ("unchanged", "foreach", "fused")
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
    "gradient of one tensor 10 % larger",
    "gradients not cleared",
    "batch of the step before",
    "statistics updated 10 % too fast",
    "dropout off",
    "dropout of a half",
    "stochastic depth off",
)


class Run:
    """One training in one arithmetic, correct or with a planted fault."""

    def __init__(self, training: type[Training], precision: str, name: str, *, is_fault: bool, num_ranks: int) -> None:
        self.training, self.precision, self.name, self.is_fault = training, precision, name, is_fault
        self.num_ranks = num_ranks

    @property
    def key(self) -> dict[str, Any]:
        context = self.precision + (", two ranks" if self.num_ranks > 1 else "")
        return {"training": self.training.__name__, "context": context, "run": self.name, "fault": self.is_fault}

    @property
    def choices(self) -> dict[str, Any]:
        return {**PRECISIONS[self.precision][0], **({} if self.is_fault else CHANGES[self.name])}

    def planted(self) -> type[Training] | None:
        """The training as it runs; None where the fault means nothing there."""
        if not self.is_fault:
            return self.training
        return next(fault for fault in FAULTS if fault.name == self.name).plant(self.training)


def runs(trainings: Sequence[type[Training]], num_ranks: int, *, recorded: bool) -> Iterator[Run]:
    """All of these trainings in turns, faults and changes in turns, so that any part has some of each."""
    first = [name for name in (ON_RANKS if num_ranks > 1 else PRECISIONS) if name not in LAST]
    alternating = itertools.chain(*itertools.zip_longest(((n, False) for n in CHANGES), ((n, True) for n in PLANTED)))
    named = list(filter(None, alternating))
    for precisions in (first, LAST if num_ranks == 1 else LAST[:1]):
        for (name, is_fault), precision, training in itertools.product(named, precisions, trainings):
            if name == "micro-batches" and training is Convolutional:
                continue  # its statistics would be those of smaller batches
            if name == "halves weighted alike" and training is Convolutional and num_ranks > 1:
                continue  # two passes in one step: DDP sends statistics that the first one's backward needs
            if precision.endswith("recorded") and not (recorded and (is_fault or name in OF_RECORDED)):
                continue
            run = Run(training, precision, name, is_fault=is_fault, num_ranks=num_ranks)
            if run.planted() is not None:
                yield run


class Rows:
    """The file of rows, which grows as rows come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.kept = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self._known = {self._key(row) for row in self.kept}

    @staticmethod
    def _key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("training", "context", "run", "fault"))

    def has(self, run: Run) -> bool:
        return self._key(run.key) in self._known

    def append(self, row: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


class Bench:
    """Studies of the trainings on this many ranks, of which this process is one."""

    def __init__(self, folder: Path, device: str, rank: int = 0, num_ranks: int = 1) -> None:
        self._folder, self._device = folder, device
        self._rank, self._num_ranks = rank, num_ranks
        self._studies: dict[type[Training], Study] = {}

    def study(self, training: type[Training]) -> Study:
        """The study of a training, whose reference is made at its first run."""
        if training not in self._studies:
            protocol = replace(PROTOCOL, num_pointwise=4, num_curve=8 if training in RANDOM else 0, num_horizon=0)
            directory = self._folder / training.__name__
            options: dict[str, Any] = {
                "protocol": protocol,
                "unit_roundoffs": (FP32, TF32, BF16),
                "device": self._device,
                "bias_corrections": True,
                "own_roundoff": self._own_roundoff(training),
            }
            if self._num_ranks > 1:
                study = join_study(directory, training, self._rank, self._num_ranks, **options)
            else:
                study = make_study(directory, training, **options)
            self._studies[training] = study
        return self._studies[training]

    def row(self, run: Run) -> dict[str, Any]:
        """Run the guard, and see what a fault does in ten steps; the row of rank 0 has the verdict."""
        roundoff = max(PRECISIONS[run.precision][1], self._own_roundoff(run.training))
        planted = run.planted()
        assert planted is not None
        began = time.perf_counter()
        try:
            with own_formats():
                study = self.study(run.training)
                job = study.job(planted(), **run.choices)
                judged = study.judged(job, unit_roundoff=roundoff, choices=run.choices)
                material = self._material(run, planted) if run.is_fault else {}
        except Exception as error:  # what a device or a choice refuses is a row, too
            return {**run.key, "error": f"{type(error).__name__}: {error}"[:200]}
        return {
            **run.key,
            "rejected_by": [check.name for check in judged.checks if not check.passed],
            "beyond": [check.name for check in judged.checks if check.passed and check.observed > check.tolerance],
            "checks": {check.name: [_short(check.observed), _short(check.tolerance)] for check in judged.checks},
            "notes": list(judged.notes),
            **material,
            "s": round(time.perf_counter() - began, 2),
        }

    def _own_roundoff(self, training: type[Training]) -> float:
        return TF32 if self._device == "cuda" and training in CONVOLVES else FP32

    def _material(self, run: Run, planted: type[Training]) -> dict[str, Any]:
        plain = run.precision.removesuffix(", recorded")  # a recording draws other masks: that is no rounding
        rounding = rounding_of(self._end(run.training, plain), self._end(run.training, "exact"))
        end = end_of(self.study(run.training), planted(), run.choices)
        moves = moves_of(end, self._end(run.training, run.precision), rounding)
        return {"moves": _short(moves), "effect": _short(self._effect(run.training, run.name))}

    @cache  # noqa: B019 (a bench lives as long as its process)
    def _end(self, training: type[Training], precision: str) -> dict[str, torch.Tensor]:
        """Where the training ends without a fault; "exact" is FP32 without TF32."""
        with own_formats():
            if precision != "exact":
                return end_of(self.study(training), training(), PRECISIONS[precision][0])
            torch.backends.cudnn.allow_tf32 = False
            return end_of(self.study(training), training(), {})

    @cache  # noqa: B019
    def _effect(self, training: type[Training], name: str) -> float:
        planted = Run(training, "fp32", name, is_fault=True, num_ranks=1).planted()
        assert planted is not None
        return effect_of(self.study(training), training, planted)


@contextmanager
def own_formats() -> Iterator[None]:
    """The number formats of a fresh process: a run in TF32 allows it to the whole process."""
    _set_own_formats()
    try:
        yield
    finally:
        _set_own_formats()


def _set_own_formats() -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


def _short(value: float) -> float:
    return float(f"{value:.3g}")


# --- running ----------------------------------------------------------------------------------


def run_here(trainings: Sequence[type[Training]], rows: Rows, device: str, deadline: float) -> int:
    """Make the runs of one rank; return how many were left out."""
    left_out = 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), device)
        for run in runs(trainings, 1, recorded=device == "cuda"):
            if rows.has(run):
                continue
            if time.monotonic() > deadline:
                left_out += 1
            else:
                rows.append(bench.row(run))
    return left_out


def run_on_ranks(trainings: Sequence[type[Training]], rows: Rows, device: str, deadline: float) -> int:
    """Make the runs of two ranks, each a process; return how many were left out."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        for training in trainings:
            make_files(Path(folder) / training.__name__, training)
        queue = context.SimpleQueue()
        arguments = [(rank, trainings, Path(folder), device, rows, deadline, queue) for rank in range(2)]
        processes = [context.Process(target=_rank, args=each, daemon=True) for each in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(1.0, deadline + 60 - time.monotonic()))
            process.kill()
        return queue.get() if not queue.empty() else -1


def _rank(
    rank: int,
    trainings: Sequence[type[Training]],
    folder: Path,
    device: str,
    rows: Rows,
    deadline: float,
    queue: Any,
) -> None:
    if device == "cuda":
        os.environ[DEVICES_VARIABLE] = "2"
    os.environ.update(LOOPBACK)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank_device(device, rank)
    bench = Bench(folder, device, rank, 2)
    left_out = 0
    for number, training in enumerate(trainings):  # one after the other: ranks are together in one study at a time
        share = (deadline - time.monotonic()) / (len(trainings) - number)
        until = time.monotonic() + share
        for run in (run for run in runs([training], 2, recorded=False) if not rows.has(run)):
            coordinator = bench.study(training).coordinator
            assert coordinator is not None
            if coordinator.agree(time.monotonic() > until):
                left_out += 1
                continue
            row = bench.row(run)
            if rank == 0:
                rows.append(row)
        bench = Bench(folder, device, rank, 2)
        gc.collect()  # before the group, whose destructor may wait for a thread that waits for this one
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if rank == 0:
        queue.put(left_out)


# --- the summary ------------------------------------------------------------------------------


def is_material(row: dict[str, Any]) -> bool:
    return bool(row["fault"]) and row["effect"] >= NO_EFFECT and row["moves"] > 1


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Counts by context: material faults and all faults caught, correct changes rejected, and by which layers."""
    result = []
    for context in dict.fromkeys(row["context"] for row in rows):
        own = [row for row in rows if row["context"] == context]
        judged = [row for row in own if "error" not in row]
        faults = [row for row in judged if row["fault"] and row["effect"] >= NO_EFFECT]
        material = [row for row in faults if is_material(row)]
        correct = [row for row in judged if not row["fault"]]
        result.append(
            {
                "context": context,
                "material": len(material),
                "material_caught": sum(bool(row["rejected_by"]) for row in material),
                "material_caught_or_shown": sum(bool(row["rejected_by"] or row["beyond"]) for row in material),
                "material_missed": [_named(row) for row in material if not row["rejected_by"]],
                "immaterial": len(faults) - len(material),
                "immaterial_caught": sum(bool(row["rejected_by"]) for row in faults if not is_material(row)),
                "caught_by": dict(Counter(layer for row in material for layer in row["rejected_by"])),
                "caught_alone": dict(Counter(r["rejected_by"][0] for r in material if len(r["rejected_by"]) == 1)),
                "correct": len(correct),
                "correct_rejected": [f"{_named(row)} by {row['rejected_by']}" for row in correct if row["rejected_by"]],
                "correct_beyond": [f"{_named(row)} by {row['beyond']}" for row in correct if row["beyond"]],
                "largest_of_correct": largest_of_correct(correct),
                "refused": [f"{_named(row)}: {row['error']}" for row in own if "error" in row],
            }
        )
    return result


def largest_of_correct(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the largest share of its limit that each check reaches in correct runs."""
    largest: dict[str, float] = {}
    for row in rows:
        for name, (observed, limit) in row["checks"].items():
            if limit:
                largest[name] = max(largest.get(name, 0.0), _short(observed / limit))
    return largest


def _named(row: dict[str, Any]) -> str:
    return f"{row['training']}, {row['run']}"


def text_of(result: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    head = json.dumps({name: value for name, value in result.items() if name != "rows"}, indent=1)
    rows = ",\n".join(f"  {json.dumps(row)}" for row in result["rows"])
    return f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines of all runs, which grow")
    names = [training.__name__ for training in TRAININGS]
    parser.add_argument("--trainings", nargs="*", choices=names, default=names, help="run only these")
    parser.add_argument("--seconds", type=float, default=240.0, help="after which no further run begins")
    parser.add_argument("--share-of-ranks", type=float, default=0.4, help="of the seconds, for two ranks")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began = time.monotonic()
    rows = Rows(arguments.rows)
    trainings = [training for training in TRAININGS if training.__name__ in arguments.trainings]
    middle = began + (1 - arguments.share_of_ranks) * arguments.seconds
    left_out = {
        "one rank": run_here(trainings, rows, arguments.device, middle),
        "two ranks": run_on_ranks(trainings, rows, arguments.device, began + arguments.seconds),
    }
    kept = Rows(arguments.rows).kept
    result = {
        **stamp("python benchmarks/guard_device.py", ("tuner", "tests", "benchmarks")),
        "hardware": hardware(describe_environment(arguments.device, Path(tempfile.gettempdir()), 1)),
        "seconds": round(time.monotonic() - began, 1),
        "left_out": left_out,
        "correct_changes": len({(row["run"], row["context"]) for row in kept if not row["fault"]}),
        "summary": summary(kept),
        "rows": kept,
    }
    arguments.output.write_text(text_of(result))
    for line in result["summary"]:
        print(json.dumps(line))
    print(f"{len(kept)} runs, left out: {left_out}")


if __name__ == "__main__":
    main()
