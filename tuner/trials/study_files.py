"""Files of one study that all of its trials share.

data/                   what the workload prepared
initial_state.tensors   parameters and buffers before the first step
order.npz               the fixed order of batches
guard.tensors           the guard's batches
reference.json          the reference curves and tolerances
reference.tensors       the reference's first update
gradients.tensors       its gradients, and what rounding does to each
compile_cache/          torch.compile's caches
compiler_headers/       its precompiled headers, where a sandbox keeps them apart from those of others
trials/<id>/            a trial's trace
imports.json            modules that the workload imported during its inspection
logs/                   what user code printed
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steptune.tuner.training.structure import flatten, unflatten
from steptune.tuner.training.tensor_file import map_tensors, save_tensors
from steptune.tuner.workloads.batches import EndlessBatches, load_batches, part_of_rank

MAX_FILLED_BATCHES = 128


@dataclass(frozen=True)
class StudyFiles:
    """Paths under a study's directory, and readers of its files."""

    directory: Path

    def make_folders(self) -> None:
        """Create the folders into which trials write, so that these folders can be given to the trials' user in
        advance.
        """
        for folder in (self.logs, self.compile_cache, self.compiler_headers):
            folder.mkdir(exist_ok=True)

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def initial_state(self) -> Path:
        return self.directory / "initial_state.tensors"

    @property
    def order_file(self) -> Path:
        return self.directory / "order.npz"

    @property
    def guard_batches_file(self) -> Path:
        return self.directory / "guard.tensors"

    @property
    def reference(self) -> Path:
        return self.directory / "reference.json"

    @property
    def reference_update(self) -> Path:
        return self.directory / "reference.tensors"

    @property
    def reference_gradients(self) -> Path:
        return self.directory / "gradients.tensors"

    @property
    def imports(self) -> Path:
        return self.directory / "imports.json"

    @property
    def compile_cache(self) -> Path:
        return self.directory / "compile_cache"

    @property
    def compiler_headers(self) -> Path:
        return self.directory / "compiler_headers"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    def trial_directory(self, trial_id: str) -> Path:
        return self.directory / "trials" / trial_id

    def trace(self, trial_id: str, rank: int = 0) -> Path:
        return self.trial_directory(trial_id) / f"rank{rank}.trace.json"

    def timelines(self, trial_id: str) -> Path:
        """Return the path of the file with the devices' activity in the profiled steps, reduced for a figure: a list of
        `Timeline`.
        """
        return self.trial_directory(trial_id) / "timelines.json"

    def analysis(self, trial_id: str) -> Path:
        """Return the path of the file with the analysis of the ranks' profiles, without timelines and lanes: a
        `TraceAnalysis`.
        """
        return self.trial_directory(trial_id) / "analysis.json"

    def lanes(self, trial_id: str) -> Path:
        """Return the path of the file with all events in the profiled steps, by device, stream and thread: a list of
        `Lane`.
        """
        return self.trial_directory(trial_id) / "lanes.json"

    def order(self, rank: int, num_ranks: int) -> EndlessBatches | None:
        """Return the fixed order of batches as one rank sees it; None for a dataset that determines its own order."""
        if not self.order_file.exists():
            return None
        return EndlessBatches(load_batches(self.order_file), rank, num_ranks)

    def first_indices(self, num_batches: int = MAX_FILLED_BATCHES) -> list[int]:
        """Return the indices of the samples that the timing windows may use, without duplicates."""
        batches = load_batches(self.order_file)[:num_batches]
        return list(dict.fromkeys(index for batch in batches for index in batch))

    def save_guard_batches(self, batches: list[Any]) -> None:
        tensors, description = flatten(batches)
        save_tensors(self.guard_batches_file, tensors, {"structure": description})

    def guard_batches(self, rank: int = 0, num_ranks: int = 1) -> list[Any]:
        """Return the guard's batches; with several ranks, the rank's slice of each batch."""
        tensors, metadata = map_tensors(self.guard_batches_file)
        batches: list[Any] = unflatten(tensors, metadata["structure"])
        if num_ranks == 1:
            return batches
        from steptune.tuner.training.structure import map_structure

        def part(leaf: Any) -> Any:
            return leaf[part_of_rank(len(leaf), rank, num_ranks)] if getattr(leaf, "shape", ()) else leaf

        return [map_structure(part, batch) for batch in batches]

    def is_cold(self, candidate_key: str) -> bool:
        """Say whether this candidate has not been compiled in this study yet."""
        return not (self.compile_cache / "warm" / candidate_key).exists()

    def mark_warm(self, candidate_key: str) -> None:
        folder = self.compile_cache / "warm"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / candidate_key).touch()
