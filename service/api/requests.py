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
        description="Most memory that a trial may use; trials that need more count as out of memory.",
        examples=[8 << 30],
    )


class StudyRequest(Body):
    """A study to be run. Give `workload`, or `workload_id` of one that was uploaded."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"workload": "zoo:synthetic", "budget_s": 60}]})

    workload: Reference | None = Field(
        default=None,
        description="A zoo entry (`zoo:NAME?argument=value`), or a class on the workers (`package.module:Class`).",
        examples=["zoo:synthetic"],
    )
    workload_id: Id | None = Field(default=None, description="A workload of yours, from `POST /workloads`.")
    title: Text = Field(default="", max_length=200, description="For people.", examples=["ViT-L, two GPUs"])
    budget_s: float = Field(
        default=300.0, ge=1.0, le=14 * 86400.0, description="Seconds that the search may take.", examples=[300.0]
    )
    max_trials: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description="Most trials that it may run; null for as many as the budget allows.",
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
        description="Search that proposes the trials: `model`, `tpe`, `gp`, `random`, or one that the worker has.",
        examples=["model"],
    )
    seed: int = Field(default=0, ge=0, lt=1 << 31, description="Seeds the search, the samples and the initial state.")
    num_ranks: int = Field(
        default=1,
        ge=1,
        le=MAX_NUM_RANKS,
        description="Processes of the training; on CUDA each has a device of its own.",
    )
    num_hosts: int = Field(
        default=1,
        ge=1,
        le=MAX_NUM_RANKS,
        description="Hosts that they are on, as many on each. A study on several waits for a worker whose cluster "
        "reserves as many.",
    )
    device: Literal["cpu", "cuda"] | None = Field(
        default=None, description="Device on which it trains; null for CUDA where the worker has it."
    )
    objective: Text = Field(
        default="throughput",
        min_length=1,
        max_length=60,
        description="Objective: `throughput` (samples or tokens per second), `steps:N` (the time to train N "
        "steps, compilation counted), `energy` (of a GPU, by its driver), or `cost:PRICE` (per device and hour). A "
        "limit of memory among the constraints caps any of them.",
        examples=["steps:20000"],
    )
    constraints: Constraints = Field(
        default_factory=Constraints, description="Limits of every trial, and so of the answer."
    )
    hardware: Text | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="Fingerprint of the hardware profile to run on, or a part of its label. A study whose hardware is "
        "absent waits.",
        examples=["H100"],
    )
    priority: int = Field(
        default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Among your own studies, higher ones run first."
    )
    foreign_cpu_share: float = Field(
        default=MeasureSettings().foreign_cpu_share,
        ge=0,
        le=1000,
        description="Share of the worker's cores that other programs may use while a window is timed; with more it is "
        "marked, and counts only where there are too few others.",
    )
    quiet_machine: bool = Field(
        default=False, description="Leaves out marked windows in any case: a busy machine fails the study."
    )

    def settings(self) -> StudySettings:
        """Return the settings in the engine's form."""
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
            raise ValueError("give `workload` or `workload_id`, and not both")
        if self.num_ranks > 1 and self.device is None:
            raise ValueError("`num_ranks` above 1 needs `device`: on CUDA each rank has a GPU of its own")
        if self.num_ranks % self.num_hosts:
            raise ValueError(
                f"{self.num_ranks} ranks cannot be spread evenly over {self.num_hosts} hosts: give `num_ranks` as a "
                "multiple of `num_hosts`"
            )
        return self


def check_of_a_script(request: StudyRequest) -> None:
    """Refuse fields that the command of a script decides itself.

    Raises:
        ChoiceError: Names the field.
    """
    if request.num_hosts > 1:
        raise ChoiceError("`num_hosts` is for workloads: a script is tuned on one host")
    if request.constraints.memory_limit_bytes is not None:
        raise ChoiceError("`memory_limit_bytes` is for workloads: a script takes the memory that it takes")


class StudyChange(Body):
    """Changes of a study. What is left out stays."""

    title: Text | None = Field(default=None, max_length=200, description="For people.", examples=["ViT-L, again"])
    priority: int | None = Field(
        default=None,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Among your own studies, higher ones run first.",
        examples=[10],
    )
    tags: list[Tag] | None = Field(
        default=None, max_length=20, description="Words to find it by, in place of those before.", examples=[["vit"]]
    )
    notes: Notes | None = Field(default=None, max_length=4000, description="For people, in place of those before.")


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
        description="The workload within it, as in `folder/train.py:MyWorkload?batch=8`; may be left out where there "
        "is only one. Of a script its command, as in `-- python train.py`.",
    )
    name: Text = Field(default="", max_length=200, description="For people; by default the file's.")


class WorkloadRequest(Body):
    """A workload that is on the workers already. Files and archives are uploaded as `multipart/form-data`."""

    entry: Reference = Field(
        description="A zoo entry (`zoo:NAME?argument=value`), or a class on the workers (`package.module:Class`).",
        examples=["zoo:synthetic"],
    )
    name: Text = Field(default="", max_length=200, description="For people; by default the entry.")
