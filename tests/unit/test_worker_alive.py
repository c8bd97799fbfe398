"""The file by which a health check tells that a worker is alive."""

import time

from steptune.service.fencing import Lease
from steptune.service.settings import Settings
from steptune.service.worker.keeper import LeaseKeeper
from steptune.service.worker.loop import Worker
from steptune.tuner.errors import LeaseLostError, StoreUnavailableError


def test_an_idle_worker_touches_its_file(tmp_path):
    settings = Settings(_env_file=None, alive_file=tmp_path / "alive", data_directory=tmp_path / "data")
    Worker(None, settings, None, None)._wait(0)
    assert (tmp_path / "alive").exists()


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path):
    settings = Settings(_env_file=None, alive_file=tmp_path / "absent" / "alive", data_directory=tmp_path / "data")
    Worker(None, settings, None, None)._wait(0)


def test_with_a_study_each_heartbeat_that_arrives_is_a_sign_of_life():
    answers = iter(["", StoreUnavailableError("it restarts"), "", LeaseLostError("that is enough")])
    seen = []

    class Queue:
        def heartbeat(self, *_: object, **__: object) -> str:
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

    LeaseKeeper(
        Queue(),
        Lease(study_id="study", worker_id="worker", fence=1),
        lease_s=60,
        heartbeat_s=0.001,
        claimed_s=time.monotonic(),
        kill=lambda: None,
        on_beat=lambda: seen.append(True),
    )._beat()
    assert len(seen) == 2
