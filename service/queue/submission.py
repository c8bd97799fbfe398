"""Checks of a study before it waits for a worker: its requirements, and its owner's quota."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from steptune.service.models import StudyRow, UserRow
from steptune.service.places import CUDA
from steptune.service.queue.records import Quotas
from steptune.service.queue.usage import limits_of
from steptune.tuner.errors import ChoiceError, QuotaExceededError
from steptune.tuner.records import StudyState


def check_requirements(kind: str | None, hardware: str | None, num_devices: int) -> None:
    """Check what a study requires of its worker: device kind, hardware and number of devices.

    Raises:
        ChoiceError: No worker can ever meet them.
    """
    if kind not in (None, "cpu", CUDA):
        raise ChoiceError(f"the required device must be `cpu` or `cuda`, got {kind!r}")
    if hardware is not None and not hardware.strip():
        raise ChoiceError(
            "the required hardware must not be empty: give a fingerprint or a part of a label, or leave it out"
        )
    if num_devices < 1 or (kind == "cpu" and num_devices > 1):
        raise ChoiceError(
            f"the number of required devices must be at least 1, and exactly 1 on the CPU, got {num_devices}"
        )


def check_queued(session: Session, owner_id: str | None, quotas: Quotas) -> None:
    """Check that an owner may have another study waiting.

    Raises:
        QuotaExceededError: The owner has as many studies waiting as allowed.
    """
    user = session.get(UserRow, owner_id, with_for_update=True) if owner_id is not None else None
    limit = limits_of(user, quotas).max_queued
    waiting = select(func.count()).where(StudyRow.owner_id == owner_id, StudyRow.state == StudyState.QUEUED.value)
    num_waiting = session.scalar(waiting) or 0
    if limit is not None and num_waiting >= limit:
        raise QuotaExceededError(
            f"{num_waiting} studies are already waiting in the queue, but the limit is {limit}: cancel one, or wait",
            quota="max_queued",
            value=num_waiting + 1,
            limit=limit,
        )
