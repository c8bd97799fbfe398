"""Candidates that the guard rejects while others use the machine: the numbers differ all the same."""

from msgspec.structs import replace
from search_builders import SMALL, Machine, StudyRun

from steptune.tuner.records import GuardVerdict


class OtherTraining(Machine):
    """A machine on which more loader workers give other batches."""

    busy = False

    def run(self, specs, purposes, settings, group, listener):
        results = super().run(specs, purposes, settings, group, listener)
        return [replace(self._judged(result), contended=self.busy) for result in results]

    def _judged(self, result):
        if "loader" not in result.candidate.choices:
            return result
        return replace(result, guard=GuardVerdict(passed=False, num_steps=4))


def story(*, busy: bool) -> list[tuple[str, str]]:
    machine = OtherTraining(SMALL)
    machine.busy = busy
    study = StudyRun(machine)
    study.run()
    return [(d.candidate.label, d.verdict) for d in study.decisions if d.trial_ids]


def test_a_rejection_counts_whether_or_not_the_machine_is_busy() -> None:
    calm, busy = story(busy=False), story(busy=True)
    assert "guard_rejected" in {verdict for _, verdict in calm}
    assert busy == calm
