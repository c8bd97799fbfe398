"""Add studies, trials with all their results, decisions, recommendations, artifacts, events

Revision ID: 0001
Revises:
Created: 2026-11-21
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

COUNTER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    _create_what_studies_refer_to()
    _create_studies()
    _create_trials()
    _create_what_trials_show()
    _create_what_was_decided()
    _create_artifacts_and_events()


def _text(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.Text(), nullable=nullable)


def _int(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.BigInteger(), nullable=nullable)


def _float(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.Double(), nullable=nullable)


def _time(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _key(table: str, *columns: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint(*columns, name=f"pk_{table}")


def _of_study(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["study_id"], ["studies.study_id"], name=f"fk_{table}_study_id", ondelete="CASCADE"
    )


def _of_trial(table: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["trial_id"], ["trials.trial_id"], name=f"fk_{table}_trial_id", ondelete="CASCADE"
    )


def _index(table: str, *columns: str) -> None:
    op.create_index(f"ix_{table}_{'_'.join(columns)}", table, list(columns))


def _create_what_studies_refer_to() -> None:
    op.create_table(
        "workloads",
        _text("workload_id"),
        _text("reference"),
        _text("name"),
        _text("signature"),
        _int("global_batch"),
        _text("record"),
        _key("workloads", "workload_id"),
        sa.UniqueConstraint("reference", "signature", name="uq_workloads_reference_signature"),
    )
    _index("workloads", "signature")
    op.create_table(
        "hardware_profiles",
        _text("fingerprint"),
        _text("device_kind"),
        _text("label"),
        _text("record"),
        _key("hardware_profiles", "fingerprint"),
    )
    _index("hardware_profiles", "device_kind")


def _create_studies() -> None:
    op.create_table(
        "studies",
        _text("study_id"),
        _text("workload"),
        _text("workload_id", nullable=True),
        _text("hardware_fingerprint", nullable=True),
        _text("state"),
        _time("created_at"),
        _text("record"),
        _key("studies", "study_id"),
        sa.ForeignKeyConstraint(["workload_id"], ["workloads.workload_id"], name="fk_studies_workload_id"),
        sa.ForeignKeyConstraint(
            ["hardware_fingerprint"], ["hardware_profiles.fingerprint"], name="fk_studies_hardware_fingerprint"
        ),
    )
    _index("studies", "workload_id")
    _index("studies", "hardware_fingerprint")
    _index("studies", "state")
    _index("studies", "created_at")


def _create_trials() -> None:
    op.create_table(
        "trials",
        _text("trial_id"),
        _text("study_id"),
        _int("sequence"),
        _text("candidate_key"),
        _text("purpose"),
        _text("trial_group"),
        _int("replicate"),
        _text("state"),
        _text("failure_kind", nullable=True),
        _text("record"),
        _text("result", nullable=True),
        _key("trials", "trial_id"),
        _of_study("trials"),
        sa.UniqueConstraint("study_id", "sequence", name="uq_trials_study_id_sequence"),
    )
    _index("trials", "study_id", "state")
    _index("trials", "candidate_key")
    op.create_table(
        "trial_attempts",
        _text("trial_id"),
        _int("number"),
        _text("outcome"),
        _time("started_at"),
        _time("ended_at", nullable=True),
        _key("trial_attempts", "trial_id", "number"),
        _of_trial("trial_attempts"),
    )


def _create_what_trials_show() -> None:
    op.create_table(
        "windows",
        _text("trial_id"),
        _int("number"),
        _int("round"),
        _int("position"),
        _int("num_steps"),
        _int("num_samples"),
        _int("num_units"),
        _int("duration_ns"),
        _int("step_p20_ns"),
        _int("step_p50_ns"),
        _int("step_p80_ns"),
        _int("queue_depth_start"),
        _int("queue_depth_end"),
        _float("foreign_cpu_share"),
        _text("void", nullable=True),
        _key("windows", "trial_id", "number"),
        _of_trial("windows"),
    )
    op.create_table(
        "breakdowns",
        _text("trial_id"),
        _int("rank"),
        _text("device"),
        _text("category"),
        _int("num_steps"),
        _int("ns"),
        _int("rescaled_ns", nullable=True),
        _key("breakdowns", "trial_id", "rank", "device", "category"),
        _of_trial("breakdowns"),
    )
    _index("breakdowns", "category")
    op.create_table(
        "guard_checks",
        _text("trial_id"),
        _int("number"),
        _text("name"),
        _text("kind"),
        sa.Column("passed", sa.Boolean(), nullable=False),
        _float("observed", nullable=True),
        _float("tolerance", nullable=True),
        _text("record"),
        _key("guard_checks", "trial_id", "number"),
        _of_trial("guard_checks"),
    )
    op.create_table(
        "findings",
        _text("trial_id"),
        _int("number"),
        _text("rule"),
        _text("severity"),
        _float("bound", nullable=True),
        _text("record"),
        _key("findings", "trial_id", "number"),
        _of_trial("findings"),
    )
    _index("findings", "rule")


def _create_what_was_decided() -> None:
    op.create_table(
        "decisions",
        _text("study_id"),
        _int("sequence"),
        _text("stage"),
        _text("verdict"),
        _text("candidate_key", nullable=True),
        _float("predicted_bound", nullable=True),
        _float("measured_gain", nullable=True),
        _text("record"),
        _key("decisions", "study_id", "sequence"),
        _of_study("decisions"),
    )
    _index("decisions", "candidate_key")
    op.create_table(
        "recommendations",
        _text("study_id"),
        _time("created_at"),
        _text("workload_signature"),
        _text("device_kind"),
        _text("verdict"),
        _text("candidate_key"),
        _float("gain", nullable=True),
        _text("record"),
        _key("recommendations", "study_id"),
        _of_study("recommendations"),
    )
    _index("recommendations", "workload_signature", "device_kind")


def _create_artifacts_and_events() -> None:
    op.create_table(
        "artifacts",
        sa.Column("artifact_id", COUNTER, nullable=False),
        _text("study_id"),
        _text("trial_id", nullable=True),
        _text("kind"),
        _text("digest"),
        _int("size_bytes"),
        _time("created_at"),
        _key("artifacts", "artifact_id"),
        _of_study("artifacts"),
        _of_trial("artifacts"),
        sqlite_autoincrement=True,
    )
    _index("artifacts", "study_id")
    _index("artifacts", "trial_id")
    _index("artifacts", "digest")
    op.create_table(
        "events",
        sa.Column("event_id", COUNTER, nullable=False),
        _text("study_id"),
        _text("kind"),
        _time("at"),
        _text("record"),
        _key("events", "event_id"),
        _of_study("events"),
        sqlite_autoincrement=True,
    )
    _index("events", "study_id", "event_id")
