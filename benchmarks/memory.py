"""Does the memory model know what ranks will need? GPT-2 large and XL with AdamW on two ranks of 24 GB each.

    python benchmarks/memory.py --only gpt2_xl
    python benchmarks/memory.py --only gpt2_xl --study      # under the cap, one sample a rank
    python benchmarks/memory.py --summary
    python benchmarks/memory.py --small --minutes 4      # a dry run on a CPU: tensors are counted, over gloo

For every layout the largest batch that trains under the cap, found from what the memory model predicts, and the peak
of every size that was tried on the way; and the peak of one sample a rank by the least parameters of a unit (2,000 and
1,000,000), with one unit for all, and under DDP. The model begins with DDP without the cap at one and two samples, and
learns from each peak that is measured; every prediction was made before its measurement. `--study` tunes under the cap
instead: where DDP cannot train one sample a rank, the recommendation has to enable training.

Where there is one GPU, `STEPTUNE_EMULATED_DEVICES=2` lets both ranks share it.

A line is appended to the results file for each peak, and one for each layout's largest batch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from msgspec import structs
from rank_peaks import LIMIT_S, Configuration, largest_batch, measured
from stamp import RESULTS, stamp
from tuned import answer, settings_of, tuned

from steptune.tuner.records import (
    Candidate,
    Choice,
    DatasetFacts,
    Device,
    Environment,
    HardwareProfile,
    ModelFacts,
    OptimizerFacts,
    SampleUnit,
    StudySettings,
    UnitFacts,
    WorkloadFacts,
)
from steptune.tuner.search.rank_memory import RankMemory
from steptune.tuner.search.space import Space

TOLERANCE = 0.10
"""Share of a measured peak by which a prediction may miss it."""
STUDY_SHARE = 0.85
"""Share of the time for a study, which may end somewhat later than its budget."""
SMALL_LIMIT_S = 500.0
"""Seconds for a dry run, on a machine that may be busy."""
MOST = 64
"""Samples of a rank."""
GUESS_MARGIN = 0.04
"""Share of the cap that is left free when the largest batch is guessed: the allocator cannot use all."""
COMMON: dict[str, Choice] = {
    "precision": {"level": "O1", "dtype": "bfloat16"},
    "optimizer_implementation": {"implementation": "fused"},
}
LAYOUTS: dict[str, dict[str, Choice]] = {
    "DDP": {},
    "grad_op": {"sharding": {"mode": "grad_op", "wrap": "block"}},
    "full shard": {"sharding": {"mode": "full", "wrap": "block"}},
    "full shard, offload": {"sharding": {"mode": "full", "wrap": "block", "cpu_offload": True}},
}
SIZES = (2_000, 1_000_000)
WRAPS: dict[str, dict[str, Choice]] = {
    **{
        f"min_num_params {size:,}": {"sharding": {"mode": "full", "wrap": "size", "min_num_params": size}}
        for size in SIZES
    },
    "no wrap": {"sharding": {"mode": "full", "wrap": "root"}},
    "DDP": {},
}
_TINY = "sequence=64&n_layer=8&n_embd=128&n_head=4&vocab_size=1000&n_positions=64&bos_token_id=0&eos_token_id=0"
WORKLOADS = {"gpt2_large": "zoo:gpt2_large?sequence=1024", "gpt2_xl": "zoo:gpt2_xl?sequence=1024"}
SMALL = {
    "gpt2_large": (f"zoo:gpt2_large?{_TINY}", 40 * 10**6),
    "gpt2_xl": (f"zoo:gpt2_xl?{_TINY.replace('n_layer=8', 'n_layer=16')}", 40 * 10**6),
}
"""With its cap."""


@dataclass
class Bench:
    """The measurements of one model.

    Attributes:
        workload: Without its batch.
        memory: The model, which learns of every peak.
        lines: What was found so far.
    """

    name: str
    workload: str
    cap_bytes: int
    device: str
    num_ranks: int
    head: dict[str, Any]
    out: Path
    deadline: float
    lines: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = RankMemory(self.space())
        self._tried: dict[tuple[str, int], bool] = {}

    def run(self) -> None:
        for size in (1, 2):
            self.peak("DDP", {}, size, cap_bytes=None)
        for name, layout in WRAPS.items():
            self.peak(name, layout, 1)
        for name, layout in LAYOUTS.items():
            self.largest(name, layout)

    def space(self) -> Space:
        devices = (Device(kind="cuda", name="device", memory_bytes=self.cap_bytes),) * self.num_ranks
        hardware = HardwareProfile(devices=devices, num_cores=1, cpu_name="", memory_bytes=0)
        facts = facts_of(self.workload, self.num_ranks)
        return Space(Environment(hardware=hardware, num_ranks=self.num_ranks), facts, StudySettings())

    def peak(self, name: str, layout: dict[str, Choice], size: int, cap_bytes: int | None = -1) -> bool:
        """Measures one size once; whether it fits."""
        cap = self.cap_bytes if cap_bytes == -1 else cap_bytes
        key = (f"{name} {cap}", size)
        if key in self._tried:
            return self._tried[key]
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"no time is left for {name} with {size} samples")
        candidate = Candidate(choices={**COMMON, **layout})
        predicted = self.memory.predict(candidate, 1, size)
        found = measured(
            Configuration(
                workload=f"{self.workload}&batch={size * self.num_ranks}",
                choices=candidate.choices,
                num_ranks=self.num_ranks,
                device=self.device,
                cap_bytes=cap,
            ),
            limit_s=SMALL_LIMIT_S if self.device == "cpu" else LIMIT_S,
        )
        self._tried[key] = not found.failure
        line: dict[str, Any] = {
            "layout": name,
            "per_rank": size,
            "cap_bytes": cap,
            "predicted_bytes": predicted and round(predicted),
            "peak_bytes": [peak.num_bytes for peak in found.ranks],
            "device": found.ranks[0].device,
            "out_of_memory": found.out_of_memory,
            "failure": found.failure,
        }
        if not found.failure:
            self.memory.learn(candidate, 1, size, found.most_bytes)
            line["error"] = predicted and round(predicted / found.most_bytes - 1, 4)
        self.tell(line)
        return not found.failure

    def largest(self, name: str, layout: dict[str, Choice]) -> None:
        """The largest batch of a rank; 0 where not even one sample fits."""
        guess = self.guess(Candidate(choices={**COMMON, **layout}))
        most = largest_batch(lambda size: self.peak(name, layout, size), guess, MOST)
        self.tell({"layout": name, "largest_per_rank": most, "guessed_per_rank": guess, "cap_bytes": self.cap_bytes})

    def guess(self, candidate: Candidate) -> int:
        """The largest size that is predicted to fit; at least one."""
        limit = (1 - GUESS_MARGIN) * self.cap_bytes
        fitting = [
            size for size in range(1, MOST + 1) if (self.memory.predict(candidate, 1, size) or float("inf")) <= limit
        ]
        return max(fitting, default=1)

    def tell(self, line: dict[str, Any]) -> None:
        line = {"row": self.name, **self.head, **line}
        self.lines.append(line)
        with self.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(_told(line), flush=True)


def study(name: str, workload: str, cap_bytes: int, num_ranks: int, minutes: float, device: str) -> dict[str, Any]:
    """Answer of `steptune tune` under the memory cap, for one sample per rank."""
    limit = cap_bytes if device == "cuda" else None  # on a CPU it would count the interpreter, too
    settings = structs.replace(
        settings_of(minutes, foreign_load=1.0), num_ranks=num_ranks, memory_limit_bytes=limit, device=device
    )
    with tuned(f"{workload}&batch={num_ranks}", settings, say=f"{name}  ") as found:
        failed = [
            {"choices": trial.candidate.choices, "failure": trial.result.failure.message[:300]}
            for trial in found.store.trials(found.study.study_id)
            if trial.result and trial.result.failure
        ]
        return {"study": answer(found), "failed": failed, "cap_bytes": cap_bytes}


def facts_of(workload: str, num_ranks: int) -> WorkloadFacts:
    """Facts for the memory model, found on tensors without storage in a separate process."""
    code = "import memory, sys; memory.print_facts(sys.argv[1], int(sys.argv[2]))"
    found = subprocess.run(
        [sys.executable, "-c", code, workload, str(num_ranks)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
    )
    parameters, size, states, units = json.loads(found.stdout.splitlines()[-1])
    return WorkloadFacts(
        reference=workload,
        name=workload,
        signature="",
        global_batch=num_ranks,
        sample_unit=SampleUnit.TOKEN,
        dataset=DatasetFacts(
            kind="map", length=None, sample_bytes=None, sample_ns=None, deterministic=True, splits=False
        ),
        model=ModelFacts(
            num_parameters=parameters,
            parameter_bytes=size,
            num_parameter_tensors=0,
            num_blocks=2,
            shard_units={key: UnitFacts(largest=largest, root=root) for key, (largest, root) in units.items()},
        ),
        optimizer=OptimizerFacts(name="AdamW", module="torch.optim", implementation="foreach", state_bytes=states),
    )


def print_facts(workload: str, num_ranks: int) -> None:
    import torch

    from steptune.tuner.training.sharding import sizes_of_units
    from steptune.tuner.trials.model_look import state_bytes
    from steptune.tuner.workloads.loading import load_workload

    loaded = load_workload(f"{workload}&batch={num_ranks}")
    with torch.device("meta"):
        model = loaded.model()
    parameters = list(model.parameters())
    wraps: list[tuple[str, str, int]] = [("root", "root", 0), ("block", "block", 0)]
    wraps += [(f"size {size}", "size", size) for size in SIZES]
    job: Any = SimpleNamespace(model=model, workload=loaded)
    print(
        json.dumps(
            [
                sum(p.numel() for p in parameters),
                sum(p.numel() * p.element_size() for p in parameters),
                state_bytes(job),
                {key: sizes_of_units(model, loaded, wrap, size) for key, wrap, size in wraps},
            ]
        )
    )


# --- the summary ------------------------------------------------------------------------------


def _told(line: dict[str, Any]) -> str:
    if "study" in line:
        found = line["study"]
        return (
            f"{line['row']:11} tuned under {line['cap_bytes'] / 1e9:g} GB: {found['verdict']}, "
            f"{found['recommended']}, {found['peak_mib']} MiB"
        )
    if "largest_per_rank" in line:
        return f"{line['row']:11} {line['layout']:24} largest batch of a rank: {line['largest_per_rank']}"
    predicted = f"{line['predicted_bytes'] / 1e9:.4g}" if line["predicted_bytes"] else "nothing"
    where = f"{line['row']:11} {line['layout']:24} {line['per_rank']:3} a rank, predicted {predicted} GB"
    if line["failure"]:
        return f"{where}: {'out of memory' if line['out_of_memory'] else line['failure']}"
    return f"{where}, peak {max(line['peak_bytes']) / 1e9:.4g} GB" + (
        f", {line['error']:+.1%}" if line.get("error") is not None else ""
    )


def summary(lines: list[dict[str, Any]]) -> str:
    """Largest batches, peaks by layout, the worst error, and what is missing."""
    text = []
    for name in WORKLOADS:
        own = [line for line in lines if line["row"] == name]
        studies = [line for line in own if "study" in line]
        capped = [line for line in own if line.get("cap_bytes") is not None and "study" not in line]
        text.append(_told(studies[-1]) if studies else f"{name:11} tuned under the cap: missing")
        for layout in LAYOUTS:
            found = [line for line in capped if line["layout"] == layout and "largest_per_rank" in line]
            text.append(_told(found[-1]) if found else f"{name:11} {layout:24} largest batch: missing")
        for wrap in WRAPS:
            found = [line for line in capped if line["layout"] == wrap and line.get("per_rank") == 1]
            text.append(_told(found[-1]) if found else f"{name:11} {wrap:24} peak: missing")
        errors = [line["error"] for line in capped if line.get("error") is not None]
        blind = sum(1 for line in capped if "error" in line and line["error"] is None)
        if errors:
            worst = max(errors, key=abs)
            verdict = "reached" if abs(worst) <= TOLERANCE and not blind else "NOT reached"
            text.append(f"{name:11} {len(errors)} peaks, worst error {worst:+.1%}, {blind} not predicted: {verdict}")
    return "\n".join(text)


def measure_rows(arguments: argparse.Namespace) -> None:
    """Appends what was measured of each model; those that no time is left for are named."""
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", "benchmarks/memory.py", *sys.argv[1:]])
    end = time.monotonic() + 60 * arguments.minutes
    device = "cpu" if arguments.small else "cuda"
    for number, name in enumerate(arguments.only):
        left = end - time.monotonic()
        workload, cap = SMALL[name] if arguments.small else (WORKLOADS[name], int(arguments.cap_gb * 1e9))
        head = {"small": arguments.small, "ranks": arguments.ranks, **stamp(command)}
        try:
            if left <= 0:
                raise TimeoutError(f"no time is left for {name}")
            if arguments.study:
                found = study(name, workload, cap, arguments.ranks, STUDY_SHARE * left / 60, device)
                with arguments.out.open("a") as file:
                    file.write(json.dumps({"row": name, **head, **found}) + "\n")
                continue
            Bench(
                name=name,
                workload=workload,
                cap_bytes=cap,
                device=device,
                num_ranks=arguments.ranks,
                head=head,
                out=arguments.out,
                deadline=time.monotonic() + left / (len(arguments.only) - number),
            ).run()
        except TimeoutError as error:
            print(error, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cap-gb", type=float, default=24.0, help="of each rank's device")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all models together")
    parser.add_argument("--study", action="store_true", help="tune under the cap instead")
    parser.add_argument("--small", action="store_true", help="models and a cap for a dry run on a CPU")
    parser.add_argument("--summary", action="store_true", help="only say what the results file holds")
    parser.add_argument("--out", type=Path, default=RESULTS / "memory.jsonl")
    arguments = parser.parse_args()
    if not arguments.summary:
        measure_rows(arguments)
    lines = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    print(summary([line for line in lines if line["small"] == arguments.small]))


if __name__ == "__main__":
    main()
