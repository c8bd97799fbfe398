"""Requests of clients, checked on arrival. Fields that would be ignored are refused."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from steptune.service.alike import record_like
from steptune.tuner.errors import ChoiceError
from steptune.tuner.objectives import check_device, parse_objective
from steptune.tuner.records import MeasureSettings, Numerics, StudySettings
from steptune.tuner.search.searches import check_search
from steptune.tuner.search.space import check_names

MAX_NUM_RANKS = 64
Text = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]*$")]
Tag = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z][0-9A-Za-z._:/-]{0,39}$")]
Notes = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f]*$")]
"""Text that may have several lines."""
Id = Annotated[str, StringConstraints(pattern=r"^[0-9a-z]{1,64}$")]
Reference = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x20\x7f]+$", max_length=500)]
OptionalReference = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]*$", max_length=500)]
StrategyName = Annotated[str, StringConstraints(pattern=r"^([a-z][a-z_]{0,60}|knobs\.[A-Za-z][A-Za-z0-9_]{0,60})$")]
MAX_PRIORITY = 100


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


class Constraints(Body):
    """Constraints that a configuration must meet."""

    memory_limit_bytes: int | None = Field(
        default=None,
        ge=1 << 20,
        le=1 << 50,
        description="Memory limit of a trial in bytes; a trial that needs more counts as out of memory.",
        examples=[8 << 30],
    )


class StudyRequest(Body):
    """A study to be run. Give `workload`, or the `workload_id` of an uploaded workload."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"workload": "zoo:synthetic", "budget_s": 60}]})

    workload: Reference | None = Field(
        default=None,
        description="A zoo entry (`zoo:NAME?argument=value`), or a class on the workers (`package.module:Class`).",
        examples=["zoo:synthetic"],
    )
    workload_id: Id | None = Field(default=None, description="Id of one of your workloads, from `POST /workloads`.")
    title: Text = Field(default="", max_length=200, description="For people.", examples=["ViT-L, two GPUs"])
    budget_s: float = Field(
        default=300.0, ge=1.0, le=14 * 86400.0, description="Time limit of the search in seconds.", examples=[300.0]
    )
    max_trials: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description="Maximum number of trials; null for as many as the budget allows.",
    )
    allow: list[Annotated[Numerics, Field(strict=False)]] = Field(
        default_factory=list,
        max_length=len(Numerics),
        description="Numerics that need consent: `lossy` (information is dropped), `recipe` (another training recipe).",
        examples=[["lossy"]],
    )
    only: list[StrategyName] = Field(
        default_factory=list, max_length=100, description="Try these strategies only.", examples=[["precision"]]
    )
    skip: list[StrategyName] = Field(
        default_factory=list, max_length=100, description="Do not try these strategies.", examples=[["compile"]]
    )
    search: Text = Field(
        default="model",
        min_length=1,
        max_length=100,
        description="Search algorithm that proposes the trials: `model`, `tpe`, `gp`, `random`, or another that is "
        "installed on the worker.",
        examples=["model"],
    )
    seed: int = Field(default=0, ge=0, lt=1 << 31, description="Seed of the search, the samples and the initial state.")
    num_ranks: int = Field(
        default=1,
        ge=1,
        le=MAX_NUM_RANKS,
        description="Number of training processes; on CUDA each uses a device of its own.",
    )
    num_hosts: int = Field(
        default=1,
        ge=1,
        le=MAX_NUM_RANKS,
        description="Number of hosts, each with the same number of processes. A study on several hosts waits for a "
        "worker whose cluster can reserve them.",
    )
    device: Literal["cpu", "cuda"] | None = Field(
        default=None, description="Device to train on; null for CUDA if the worker has it."
    )
    objective: Text = Field(
        default="throughput",
        min_length=1,
        max_length=60,
        description="Objective: `throughput` (samples or tokens per second), `steps:N` (the time to train N steps, "
        "including compilation), `energy` (of a GPU, reported by its driver), or `cost:PRICE` (per device and "
        "hour). A memory limit in the constraints applies to every objective.",
        examples=["steps:20000"],
    )
    constraints: Constraints = Field(
        default_factory=Constraints, description="Limits that every trial, and thus the recommendation, must meet."
    )
    hardware: Text | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="Fingerprint of the hardware profile to run on, or a part of its label. The study waits until a "
        "worker has this hardware.",
        examples=["H100"],
    )
    priority: int = Field(
        default=0,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Priority among your own studies; higher ones run first.",
    )
    foreign_cpu_share: float = Field(
        default=MeasureSettings().foreign_cpu_share,
        ge=0,
        le=1000,
        description="Share of the worker's cores that other programs may use while a window is timed. A window with a "
        "larger share is marked, and counts only if there are too few unmarked windows.",
    )
    quiet_machine: bool = Field(
        default=False, description="Never count marked windows: a study on a busy machine fails instead."
    )

    def settings(self) -> StudySettings:
        """Return the request's settings as the `StudySettings` of the tuning engine."""
        return record_like(
            StudySettings,
            self,
            allow=tuple(dict.fromkeys(self.allow)),
            only=tuple(self.only),
            skip=tuple(self.skip),
            memory_limit_bytes=self.constraints.memory_limit_bytes,
            measure=MeasureSettings(foreign_cpu_share=self.foreign_cpu_share, quiet_machine=self.quiet_machine),
        )

    @field_validator("only", "skip")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        check_names(names, ())
        return names

    @field_validator("search")
    @classmethod
    def _known_search(cls, name: str) -> str:
        check_search(name)
        return name

    @field_validator("objective")
    @classmethod
    def _known_objective(cls, text: str) -> str:
        parse_objective(text)
        return text

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_names(self.only, self.skip)
        check_device(parse_objective(self.objective), self.device)
        return self

    @model_validator(mode="after")
    def _one_workload(self) -> Self:
        if (self.workload is None) == (self.workload_id is None):
            raise ValueError("give either `workload` or `workload_id`")
        if self.num_ranks > 1 and self.device is None:
            raise ValueError("`num_ranks` above 1 needs `device`: give `cpu`, or `cuda` for one GPU per rank")
        if self.num_ranks % self.num_hosts:
            raise ValueError(
                f"`num_ranks` must be a multiple of `num_hosts`, got {self.num_ranks} ranks on {self.num_hosts} hosts"
            )
        return self


def check_of_a_script(request: StudyRequest) -> None:
    """Refuse fields that do not apply to a study of a script.

    Raises:
        ChoiceError: Such a field is set; the message names it.
    """
    if request.num_hosts > 1:
        raise ChoiceError("`num_hosts` must be 1 for a script, which is tuned on one host")
    if request.constraints.memory_limit_bytes is not None:
        raise ChoiceError(
            "`memory_limit_bytes` cannot be set for a script, because Steptune cannot limit a script's memory: "
            "leave it out"
        )


class StudyChange(Body):
    """Changes of a study; omitted fields keep their values."""

    title: Text | None = Field(default=None, max_length=200, description="For people.", examples=["ViT-L, again"])
    priority: int | None = Field(
        default=None,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Priority among your own studies; higher ones run first.",
        examples=[10],
    )
    tags: list[Tag] | None = Field(
        default=None,
        max_length=20,
        description="New tags to find the study by; they replace the current ones.",
        examples=[["vit"]],
    )
    notes: Notes | None = Field(default=None, max_length=4000, description="New notes; they replace the current ones.")


class UploadForm(Body):
    """A workload as a file."""

    file: Text = Field(
        min_length=1,
        max_length=200,
        description="A Python file, or an archive (tar, tar.gz, tar.xz, tar.bz2, zip).",
        json_schema_extra={"format": "binary"},
    )
    entry: OptionalReference = Field(
        default="",
        description="The workload within the upload, as in `folder/train.py:MyWorkload?batch=8`; may be left out if "
        "there is only one. For a script, its command, as in `-- python train.py`.",
    )
    name: Text = Field(default="", max_length=200, description="Display name; by default the name of the file.")


class WorkloadRequest(Body):
    """A workload that is on the workers already. Files and archives are uploaded as `multipart/form-data`."""

    entry: Reference = Field(
        description="A zoo entry (`zoo:NAME?argument=value`), or a class on the workers (`package.module:Class`).",
        examples=["zoo:synthetic"],
    )
    name: Text = Field(default="", max_length=200, description="Display name; by default the entry.")
