"""The records that cross every process boundary: rank, server, parent, store, dashboard, export.

Each is frozen, keyword-only and plain data, so it travels as JSON and can be stored and replayed.
Names carry units (`step_time_ns`, `peak_memory_bytes`); shares and bounds are fractions of one.
The words (workload, strategy, choice, candidate, trial, study, ...) are those of docs/glossary.md.

Import the records from this package. Inside it, a file holds one noun and uses only files on lower lines:

    studies, recommendations
    decisions
    trials
    environment, workload_facts, measurements, breakdowns, profiles, guard, compilation
    hardware, topology, choices
    base, ids

msgspec resolves the types of a record's fields when it first encodes or decodes one, by the names in its file: these
names are imported at runtime, never under TYPE_CHECKING.
"""

from steptune.tuner.records.base import SCHEMA_VERSION, Record
from steptune.tuner.records.breakdowns import (
    Breakdown,
    CaptureQuality,
    Finding,
    Replay,
    Stall,
    Stalls,
    StepFacts,
    StepPhase,
)
from steptune.tuner.records.choices import BASELINE, Candidate, Choice, Move, Numerics, Scalar, choice_label
from steptune.tuner.records.compilation import Compilation, CompilationEvent
from steptune.tuner.records.decisions import Decision, Suggestion
from steptune.tuner.records.environment import Environment
from steptune.tuner.records.guard import GuardCheck, GuardVerdict
from steptune.tuner.records.hardware import Calibration, Device, HardwareProfile
from steptune.tuner.records.ids import new_id
from steptune.tuner.records.measurements import (
    DeviceReading,
    InputActivity,
    MeasureSettings,
    MemoryPeak,
    Startup,
    Window,
)
from steptune.tuner.records.profiles import CollectiveStats, GapSite, KernelStats, TrialProfile
from steptune.tuner.records.recommendations import (
    Alternative,
    Certificate,
    Cost,
    Gain,
    Interval,
    Part,
    Recommendation,
    ScriptChanges,
    Verdict,
)
from steptune.tuner.records.studies import Artifact, Event, Study, StudySettings, StudyState
from steptune.tuner.records.topology import CollectiveTiming, Link, Topology
from steptune.tuner.records.trials import (
    Attempt,
    Deadlines,
    Effect,
    Failure,
    FailureKind,
    Phase,
    Purpose,
    Trial,
    TrialResult,
    TrialSpec,
    TrialState,
)
from steptune.tuner.records.workload_facts import (
    DatasetFacts,
    KnobFacts,
    ModelFacts,
    OptimizerFacts,
    SampleUnit,
    ScriptFacts,
    UnitFacts,
    WorkloadFacts,
)

__all__ = [
    "BASELINE",
    "SCHEMA_VERSION",
    "Alternative",
    "Artifact",
    "Attempt",
    "Breakdown",
    "Calibration",
    "Candidate",
    "CaptureQuality",
    "Certificate",
    "Choice",
    "CollectiveStats",
    "CollectiveTiming",
    "Compilation",
    "CompilationEvent",
    "Cost",
    "DatasetFacts",
    "Deadlines",
    "Decision",
    "Device",
    "DeviceReading",
    "Effect",
    "Environment",
    "Event",
    "Failure",
    "FailureKind",
    "Finding",
    "Gain",
    "GapSite",
    "GuardCheck",
    "GuardVerdict",
    "HardwareProfile",
    "InputActivity",
    "Interval",
    "KernelStats",
    "KnobFacts",
    "Link",
    "MeasureSettings",
    "MemoryPeak",
    "ModelFacts",
    "Move",
    "Numerics",
    "OptimizerFacts",
    "Part",
    "Phase",
    "Purpose",
    "Recommendation",
    "Record",
    "Replay",
    "SampleUnit",
    "Scalar",
    "ScriptChanges",
    "ScriptFacts",
    "Stall",
    "Stalls",
    "Startup",
    "StepFacts",
    "StepPhase",
    "Study",
    "StudySettings",
    "StudyState",
    "Suggestion",
    "Topology",
    "Trial",
    "TrialProfile",
    "TrialResult",
    "TrialSpec",
    "TrialState",
    "UnitFacts",
    "Verdict",
    "Window",
    "WorkloadFacts",
    "choice_label",
    "new_id",
]
