"""Records that the hooks in a script wrote: one for each process that made or trained something with torch."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import field

from steptune.tuner.errors import RunnerError
from steptune.tuner.records.base import Record

SETTINGS, COMPLETE, NO_VIEW, TEXTS, STATUS = "settings.json", "complete", "no-view", "texts.json", "status"
"""Names of files in the folder of the records: the hooks' settings; the mark that every rank was recorded; the reason
why there is no view; texts that replace those of files in the view; the exit status of a command whose frozen copies
continue.
"""


class ScriptStep(Record):
    """The step of a loop.

    Attributes:
        optimizers: Numbers of the optimizers that step, in order; empty where a backward pass is a step, None where no
            period was found.
        kinds: Classes of these optimizers.
        num_backwards: Backward passes in the most frequent kind of step.
        num_batches: Batches from loaders in such a step.
        share: Share of the steps that are of this kind.
        place: Line of the user's code that ends a step.
    """

    optimizers: tuple[int, ...] | None
    kinds: tuple[str, ...]
    num_backwards: int
    num_batches: int
    share: float
    place: str


class ScriptLoader(Record):
    """A `DataLoader`.

    Attributes:
        number: Number in the order of creation, which is the same in every run.
        place: Line of the user's code that made it; empty where none is known.
        batch_size: Samples of a batch; None where batches are made in another way.
        num_batches: Length of an epoch; None where it has none.
        num_backwards: Backward passes whose last batch came from it.
        sample_ns: Mean time in which one process made a sample; None if it was not measured.
    """

    number: int
    place: str
    kind: str
    dataset: str
    iterable: bool
    batch_size: int | None
    num_batches: int | None
    num_workers: int
    pin_memory: bool
    prefetch_factor: int | None
    persistent_workers: bool
    num_backwards: int
    sample_ns: int | None = None


class ScriptOptimizer(Record):
    """An optimizer.

    Attributes:
        implementation: "fused", "foreach", "capturable"; empty for torch's default.
        in_step: Whether it takes part in the step.
        implementations: Implementations that its class supports.
        module: Module in which its class is defined.
    """

    number: int
    place: str
    kind: str
    num_parameters: int
    num_groups: int
    implementation: str
    in_step: bool
    implementations: tuple[str, ...] = ()
    module: str = ""


class ScriptModel(Record):
    """An outermost module that was called with gradients enabled, or that owns trained parameters.

    Attributes:
        num_in_optimizer: Number of parameters that the step's optimizers update.
        dtypes: Number of parameters by dtype.
        num_calls: Number of calls in the first steps; None where the module was found without being called.
        sparse: Whether a part makes sparse gradients.
        num_tensors: Number of parameter tensors.
        module_types: Number of its parts by class.
        place: Line of the user's code that calls it; empty where none is known.
    """

    kind: str
    num_parameters: int
    num_trained: int
    num_in_optimizer: int
    dtypes: dict[str, int]
    device: str
    num_calls: int | None
    wrappers: tuple[str, ...]
    compiled: bool
    checkpointed: bool
    sparse: bool
    channels_last: bool
    num_tensors: int = 0
    module_types: dict[str, int] = field(default_factory=dict)
    place: str = ""


class ScriptTrainer(Record):
    """A library that owns the loop.

    Attributes:
        settings: Settings that matter for speed, as text.
        overrides: Methods that the user's subclass changes.
    """

    library: str
    kind: str
    settings: dict[str, str]
    overrides: tuple[str, ...]


class Place(Record):
    """First point of training at which a trial could be forked.

    Attributes:
        what: "loader", before its iterator is made, or "forward", before the first one with gradients.
        number: Number of the loader.
        after_ns: Time since torch was imported.
        cuda: Whether CUDA was initialised, after which no fork may use it.
        process_group: Whether a process group existed.
        num_threads: Number of Python threads; a fork has one.
    """

    what: str
    number: int
    after_ns: int
    cuda: bool
    process_group: bool
    num_threads: int


class CopyPlace(Record):
    """Point in the script at which a frozen copy of its process was made, or the reason why there is none.

    Attributes:
        what: "loader", before its iterator is made; "forward", before the first one with gradients; "cuda", before it
            is initialised.
        number: Number of the loader.
        copy: Folder of the copy beside the record; empty where there is none.
        at_ns: Time on the system's monotonic clock.
    """

    what: str
    number: int
    copy: str
    reason: str
    at_ns: int


class ScriptRecord(Record):
    """Record of one process of the script.

    Attributes:
        complete: Whether its steps were recorded to the end of the window.
        refusal: Reason why they were not; empty where the process ended before.
        num_steps: Number of steps with a known time: all but the first few.
        num_steps_needed: Number of steps that a recording needs: if they are long, and if they are short.
        step_time_ns: Step time without the profiler, before and after the recorded steps; None where the process ended
            before it was measured.
        step_time_before_ns, step_time_after_ns: Each of the two; None where it was not measured.
        recorded_step_ns: Step time under the profiler.
        notes: Number of uses by kind and feature; kinds are "autocast", "scalers", "clipping", "schedulers",
            "compiled", "saves", "closures".
        num_calls_without_grad: Number of calls of outermost modules without gradients, in the first steps.
        settings: Settings of torch: threads, precision of FP32 matmuls, cuDNN.
        copies: Frozen copies from which trials can start, in the order of creation.
    """

    pid: int
    command: tuple[str, ...]
    folder: str
    python: str
    torch: str
    rank: int
    num_ranks: int
    complete: bool
    refusal: str
    num_steps: int
    num_steps_needed: tuple[int, int]
    num_backwards: int
    num_optimizer_steps: int
    step_time_ns: float | None
    step_times_ns: tuple[int, ...]
    recorded_step_ns: tuple[int, ...]
    places: tuple[Place, ...]
    device: str
    device_name: str
    step: ScriptStep
    loaders: tuple[ScriptLoader, ...]
    models: tuple[ScriptModel, ...]
    optimizers: tuple[ScriptOptimizer, ...]
    notes: dict[str, dict[str, int]] = field(default_factory=dict)
    num_calls_without_grad: int = 0
    trainer: ScriptTrainer | None = None
    settings: dict[str, int | str | bool] = field(default_factory=dict)
    copies: tuple[CopyPlace, ...] = ()
    step_time_before_ns: float | None = None
    step_time_after_ns: float | None = None

    @property
    def num_made(self) -> int:
        """Number of steps that the script made, including those before the loop's period was found."""
        optimizers = self.step.optimizers
        return self.num_optimizer_steps // len(optimizers) if optimizers else self.num_backwards

    @property
    def training_loader(self) -> ScriptLoader | None:
        """Loader that provided the batches for most backward passes; None if no loader is in the loop."""
        most = max(self.loaders, key=lambda loader: loader.num_backwards, default=None)
        return most if most is not None and most.num_backwards and self.step.num_batches else None


def read_records(folder: Path) -> tuple[ScriptRecord, ...]:
    """Read the records of a script's processes from a folder. Processes that trained come first, in the order of their
    ranks.

    Raises:
        RunnerError: A record cannot be read.
    """
    records = []
    for path in folder.glob("record-*.json"):
        try:
            records.append(msgspec.json.decode(path.read_bytes(), type=ScriptRecord))
        except msgspec.DecodeError as error:
            raise RunnerError(f"the record {path.name} of the script cannot be read: {error}") from error
    return tuple(sorted(records, key=lambda record: (not record.complete, -record.num_steps, record.rank)))
