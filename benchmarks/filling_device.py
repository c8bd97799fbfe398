"""Is a job tuned that takes most of its device? A transformer in FP32 whose batch is sized to shares of the memory.

    python benchmarks/filling_device.py                       # 60 % and 90 % of a GPU, 90 s of tuning each
    python benchmarks/filling_device.py --small               # a dry run on a CPU, under a memory limit

One JSON row each: the share that the baseline's peak really took, the verdict, how many trials ran out of memory, how
many were repeated alone, and what was recommended with its gain. A study that fails has a row with its error.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from stamp import RESULTS, stamp

from steptune.tuner.errors import SteptuneError
from steptune.tuner.memory_store import MemoryStudyStore
from steptune.tuner.records import FailureKind, Recommendation, Study, StudySettings, Trial, new_id
from steptune.tuner.search.driver import StudyDriver
from steptune.tuner.search.view import StudyView
from steptune.tuner.trials.runner import LocalRunner
from steptune.tuner.workloads.reference import format_reference, parse_reference

WORKLOAD = Path(__file__).with_name("workloads") / "filling.py"
SMALL_LIMIT_BYTES = 1 << 30
SMALL_SHAPE = {"width": 16, "depth": 1, "sequence": 64, "vocabulary": 64}
PROBED = (32, 96)
"""Batches whose peaks tell that of any other."""
PROBE = """
import sys, torch
sys.path.insert(0, {folder!r})
from filling import Filling
device = torch.device({device!r})
workload = Filling(batch={batch}, **{shape!r})
model = workload.model().to(device)
optimizer = workload.optimizer(model.named_parameters())
batch = [tensor[: workload.global_batch].to(device) for tensor in workload.dataset().tensors]
for _ in range(2):
    workload.loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
if device.type == "cuda":
    print(torch.cuda.max_memory_reserved(), torch.cuda.get_device_properties(0).total_memory)
else:
    status = open("/proc/self/status").read().split("VmHWM:")[1]
    print(1024 * int(status.split()[0]), {limit})
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="on a CPU, whose memory is taken to be 1 GiB")
    parser.add_argument("--shares", type=float, nargs="+", help="of the device's memory; default 0.6 0.9")
    parser.add_argument("--seconds", type=float, default=90.0, help="budget of each study")
    parser.add_argument("--out", type=Path, default=RESULTS / "filling_device.jsonl")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    shares = arguments.shares or ([0.6, 0.75] if arguments.small else [0.6, 0.9])
    for share in shares:
        row = measured(share, arguments.seconds, small=arguments.small)
        row |= stamp(" ".join(["python", "benchmarks/filling_device.py", *sys.argv[1:]]))
        print(json.dumps(row, indent=2), flush=True)
        with arguments.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")


def measured(share: float, seconds: float, *, small: bool) -> dict:
    """One study of a workload that takes this share of the device."""
    device, shape = ("cpu", SMALL_SHAPE) if small else ("cuda", {})
    row: dict = {"asked_share": share, "budget_s": seconds}
    try:
        batch, capacity = sized(share, device, shape)
    except subprocess.CalledProcessError as error:
        return row | {"error": f"could not be sized: {error.stderr[-500:]}"}
    query = "&".join(f"{name}={value}" for name, value in {"batch": batch, **shape}.items())
    settings = StudySettings(budget_s=seconds, device=device, memory_limit_bytes=SMALL_LIMIT_BYTES if small else None)
    row |= {"batch": batch, "device_bytes": capacity}
    with tempfile.TemporaryDirectory(prefix="steptune-bench-") as folder:
        return row | tuned(f"{WORKLOAD}:Filling?{query}", settings, Path(folder), capacity)


def sized(share: float, device: str, shape: dict[str, int]) -> tuple[int, int]:
    """The batch whose step takes this share of the memory, by the line through two measured peaks; and the memory."""
    (first, capacity), (second, _) = (probed(batch, device, shape) for batch in PROBED)
    per_sample = (second - first) / (PROBED[1] - PROBED[0])
    batch = PROBED[0] + int((share * capacity - first) / per_sample)
    with suppress(subprocess.CalledProcessError):  # the allocator takes more than the line says
        peak, _ = probed(batch, device, shape)
        batch -= max(0, int((peak - share * capacity) / per_sample))
    return max(1, batch), capacity


def probed(batch: int, device: str, shape: dict[str, int]) -> tuple[int, int]:
    """Peak bytes of two steps in a process of their own, and the bytes that there are."""
    code = PROBE.format(folder=str(WORKLOAD.parent), device=device, batch=batch, shape=shape, limit=SMALL_LIMIT_BYTES)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    peak, capacity = done.stdout.split()
    return int(peak), int(capacity)


def tuned(workload: str, settings: StudySettings, folder: Path, capacity: int) -> dict:
    """Figures of the study and its answer."""
    study = Study(
        study_id=new_id(),
        workload=format_reference(parse_reference(workload)),
        settings=settings,
        created_at=datetime.now(UTC).isoformat(),
        directory=str(folder),
    )
    store = MemoryStudyStore()
    store.create_study(study)
    runner = LocalRunner(
        workload=study.workload,
        directory=folder,
        device=settings.device or "",
        memory_limit_bytes=settings.memory_limit_bytes,
    )
    stages: list[str] = []

    def tell(view: StudyView) -> None:
        if stages[-1:] != [view.stage]:
            stages.append(view.stage)
            print(f"{view.elapsed_s:6.0f} s  {view.stage}", flush=True)

    began = time.monotonic()
    row: dict = {}
    try:
        row = _answer(StudyDriver(study, store, runner, on_change=tell).run())
    except SteptuneError as error:
        row = {"error": str(error)}
    finally:
        runner.close()
    row["seconds"] = round(time.monotonic() - began, 1)
    return row | _trials(store.trials(study.study_id), capacity)


def _answer(recommendation: Recommendation) -> dict:
    gain = recommendation.gain
    return {
        "verdict": recommendation.verdict.value,
        "recommended": recommendation.candidate.label,
        "gain": None if gain is None else round(gain.ratio, 3),
        "interval": None if gain is None else [round(gain.interval.low, 3), round(gain.interval.high, 3)],
        "recommended_peak_bytes": recommendation.peak_memory_bytes,
        "ended": recommendation.certificate.ended,
    }


def _trials(trials: list[Trial], capacity: int) -> dict:
    results = list(_results(trials))
    peak = max((r.peak_memory_bytes for r in results if r.candidate.is_baseline), default=0)
    out_of_memory = [r for r in results if r.failure and r.failure.kind is FailureKind.OUT_OF_MEMORY]
    groups = [trial.group for trial in trials]
    return {
        "baseline_share": round(peak / capacity, 3),
        "num_trials": len(trials),
        "num_in_turns": sum(groups.count(group) > 1 for group in groups),
        "num_out_of_memory": len(out_of_memory),
        "baseline_out_of_memory": sum(r.candidate.is_baseline for r in out_of_memory),
        "num_repeated": sum(bool(r.repeated) for r in results),
        "repeated_because": sorted({attempt.failure.message[:200] for r in results for attempt in r.repeated}),
    }


def _results(trials: list[Trial]) -> Iterator:
    return (trial.result for trial in trials if trial.result is not None)


if __name__ == "__main__":
    main()
