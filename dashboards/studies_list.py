"""The list of studies: one row for each, with its result."""

from __future__ import annotations

from typing import NamedTuple

from steptune.dashboards import units


class ListedStudy(NamedTuple):
    """A row of the list of studies. Values that are not known, or not yet, are None.

    `device_hours` are those of the workers that held it; `tuning_s` is the time of its search.
    """

    study_id: str
    title: str
    workload: str
    state: str
    created_at: str
    hardware: str | None
    verdict: str | None
    gain: float | None
    bottleneck_before: str | None
    bottleneck_after: str | None
    tuning_s: float | None
    device_hours: float | None
    tags: tuple[str, ...] = ()
    notes: str = ""
    submitted: bool = False
    """True if the study was submitted to the service; the service shows all other studies read-only."""

    @property
    def answer(self) -> str:
        """Return the answer in short: `2.42×`, `no significant gain`, or an empty text."""
        if self.verdict is None:
            return ""
        if self.verdict == "faster" and self.gain is not None:
            return units.ratio(self.gain)
        return units.words(self.verdict)

    @property
    def cost(self) -> str:
        if self.tuning_s is not None:
            return units.duration(self.tuning_s)
        return units.duration(self.device_hours * 3600) if self.device_hours else ""


SORTS: dict[str, str] = {
    "newest": "newest first",
    "gain": "largest gain first",
    "cost": "longest search first",
    "workload": "by workload",
}
