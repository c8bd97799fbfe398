"""The simulation of a fleet in its short form: nothing is lost, and the model of `docs/scale.md` holds."""

import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from postgres import PostgresServer

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # for the processes of the fleet, too

from fleet_crew import Member, MemberLostError
from fleet_simulation import simulate

STUDIES, TRIALS = 10, 3


@pytest.fixture(scope="module")
def fleet(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return simulate(
        postgres_server.create("fleet"),
        tmp_path_factory.mktemp("fleet"),
        studies=STUDIES,
        workers=STUDIES,
        processes=2,
        trial_s=1.0,
        max_trials=TRIALS,
        ramp_s=2.0,
        deadline_s=300.0,
    )


class TestFleet:
    def test_every_study_ends_and_every_event_arrives(self, fleet: dict[str, Any]) -> None:
        assert fleet["states"] == {"completed": STUDIES}
        assert fleet["trials"] == STUDIES * TRIALS
        assert fleet["lost"] == {"studies": 0, "trials": 0, "claims": 0, "events": 0}

    def test_followers_get_the_events_of_their_studies_and_no_others(self, fleet: dict[str, Any]) -> None:
        """An administrator gets all; five users get those of their study of ten."""
        stored = fleet["tables"]["events"]["rows"]
        assert stored < fleet["event_lag"]["delivered"] < 2 * stored

    def test_rows_and_bytes_of_a_trial_are_those_of_the_model(self, fleet: dict[str, Any]) -> None:
        for quantity in ("rows", "bytes"):
            assert fleet["per_trial"][quantity] == pytest.approx(fleet["model"][quantity], rel=0.1), quantity

    def test_idle_claims_are_timed_by_a_process_of_their_own(self, fleet: dict[str, Any]) -> None:
        assert fleet["claims"]["number"] > 0
        assert fleet["claims_in_threads"]["number"] == STUDIES


def dies(pipe: Connection) -> None:
    pipe.poll(None)
    os.kill(os.getpid(), signal.SIGKILL)


def counts(pipe: Connection) -> None:
    pipe.poll(None)
    pipe.send("counts")


class TestMember:
    def test_sends_its_counts_when_it_is_told_to_end(self) -> None:
        member = Member(counts)
        member.check()
        member.tell()
        assert member.counted() == "counts"

    def test_that_dies_is_no_reason_to_wait(self) -> None:
        """Neither while it is told to end, nor for its counts."""
        member = Member(dies)
        member.tell()
        with pytest.raises(MemberLostError, match="has sent no counts"):
            member.counted()
        member.process.join()
        with pytest.raises(MemberLostError, match="ended with -9 before it was told to"):
            member.check()
        member.tell()
