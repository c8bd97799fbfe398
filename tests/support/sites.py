"""A database, a data directory, and workers as processes."""

import os
import subprocess
import sys
from pathlib import Path

from marked import VARIABLE, marked, new_mark, wait_until

from steptune.service.database import open_store
from steptune.service.queue import QueueEntry, StudyQueue
from steptune.service.settings import Settings
from steptune.service.submission import new_study
from steptune.tuner.records import MeasureSettings, StudySettings, StudyState, TrialState, new_id

ROOT = Path(__file__).parents[2]
WORKLOAD = "zoo:synthetic?batch=4&load_ms=1&compute_ms=1&length=64"
QUICK = MeasureSettings(window_s=0.02, min_rounds=2, max_rounds=2, cap_s=0.2, foreign_cpu_share=1000)
LEASE_S = 20.0
"""Long enough for a busy machine, short enough to wait for its end."""


class Site:
    """A database, a data directory, and workers as processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder}/steptune.db"
        self.settings = Settings(_env_file=None, database_url=self.url, data_directory=folder / "data")
        self.store = open_store(self.url)
        self.queue = StudyQueue(self.store.engine, lease_s=LEASE_S)
        self.mark = new_mark()
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.processes: list[subprocess.Popen[bytes]] = []

    def environment(self) -> dict[str, str]:
        settings = {"database_url": self.url, "data_directory": self.folder / "data", "lease_s": LEASE_S}
        settings |= {"heartbeat_s": 0.3, "poll_s": 0.2}
        return {
            **os.environ,
            **{f"STEPTUNE_{name.upper()}": str(value) for name, value in settings.items()},
            VARIABLE: self.mark,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "TMPDIR": str(self.temporary),
        }

    def worker(self, *arguments: str, isolation: str = "none") -> subprocess.Popen[bytes]:
        with (self.folder / "worker.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "steptune", "worker", "--isolation", isolation, *arguments],
                cwd=self.folder,
                env=self.environment(),
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    def submit(
        self,
        workload: str = WORKLOAD,
        *,
        trials: int = 4,
        finalists: int = 0,
        digest: str | None = None,
        **requirements,
    ) -> str:
        """Args:
        finalists: 0 where no recommendation is asserted: gains of a millisecond on a busy machine take the most blocks
            to tell, half a minute of them.
        requirements: Of the queue, as `StudyQueue.submit` has them.
        """
        settings = StudySettings(
            budget_s=3600,
            max_trials=trials,
            only=("optimizer_implementation", "data_loading"),
            device=requirements.get("required_device_kind", "cpu"),
            num_ranks=requirements.get("num_devices", 1),
            confirm_blocks=2,
            num_finalists=finalists,
            measure=QUICK,
        )
        study = new_study(new_id(), workload, settings, self.folder / "data", uploaded_digest=digest)
        self.queue.submit(study, owner_id=requirements.pop("owner_id", None), **requirements)
        return study.study_id

    def entry(self, study_id: str) -> QueueEntry:
        return self.queue.entry(study_id)

    def num_complete(self, study_id: str) -> int:
        return sum(trial.state is TrialState.COMPLETED for trial in self.store.trials(study_id))

    def await_trials(self, study_id: str, count: int) -> None:
        def reached() -> bool:
            assert any(process.poll() is None for process in self.processes), self.log()
            return self.num_complete(study_id) >= count

        wait_until(reached, f"{count} trials are complete", deadline_s=600)

    def await_state(self, study_id: str, state: StudyState) -> QueueEntry:
        wait_until(lambda: self.entry(study_id).state is state, f"{study_id} is {state}: {self.log()}", deadline_s=600)
        return self.entry(study_id)

    def log(self) -> str:
        return (self.folder / "worker.log").read_text(errors="replace")

    def close(self) -> None:
        for process in marked(self.mark):
            process.kill()
        for started in self.processes:
            started.wait()
        self.store.close()
