"""`steptune tune -- COMMAND`: what a user sees, and what is left when it ends, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import msgspec
import psutil
import pytest
from script_runs import ROOT, VARIABLES, ScriptFolder

from steptune.tuner.scripts.verification import ScriptVerification

STEPTUNE = (sys.executable, "-m", "steptune")
SCREEN_LINES = 24
LONGEST_S = 280.0


def environment(folder: ScriptFolder) -> dict[str, str]:
    own = {**VARIABLES, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100"}
    own["TMPDIR"] = str(folder.path.parent / "temporary")
    own |= {"STEPTUNE_DATA_DIRECTORY": str(folder.path.parent / "data")}
    return {**os.environ, **own, "STEPTUNE_DATABASE_URL": f"sqlite:///{folder.path.parent}/studies.db"}


def steptune(folder: ScriptFolder, *arguments: str) -> subprocess.CompletedProcess[str]:
    return folder.ran(*STEPTUNE, *arguments, env=environment(folder), within_s=LONGEST_S)


def test_a_user_sees_what_was_recognised_what_is_tried_and_the_answer_on_a_screen(folder: ScriptFolder) -> None:
    folder.add("faulty.py")
    output = str(folder.path.parent / "results")
    options = ("--budget", "200s", "--trials", "1", "--only", "optimizer_implementation", "--output", output)

    done = steptune(folder, "tune", *options, "--", sys.executable, "faulty.py", "--seed", "3", "--epochs", "500")

    assert done.returncode == 0, done.stderr
    for part in ("one step of AdamW", "the script gets --seed", "tried", "implementation=fused", "needs a Workload"):
        assert part in done.stderr
    assert "loss 0" not in done.stderr + done.stdout, "what the script prints is in the logs of its trials"
    assert "faulty.py" in done.stdout.splitlines()[0]
    assert len(done.stdout.splitlines()) <= SCREEN_LINES
    assert list(folder.files()) == ["faulty.py"]
    assert not list((folder.path.parent / "temporary").glob("steptune*"))

    shown = steptune(folder, "show", "last")
    assert shown.stdout.splitlines()[:2] == done.stdout.splitlines()[:2], "the same words, later"
    refused = steptune(folder, "export", "last", "--format", "torchrun", "--output", output)
    assert refused.returncode == 2
    assert "cannot change a training script" in " ".join(refused.stderr.split())
    assert "tuned a script" in steptune(folder, "show", "last", "--plan").stderr


SLOW_STORAGE = """
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.full((8,), index / 4000)


model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(Slow(), batch_size=8):
    (model(batch) - batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_an_answer_is_verified_in_the_script_by_the_same_command(folder: ScriptFolder) -> None:
    """Loader workers that sleep take no core, so that they gain on a busy machine, too."""
    (folder.path / "slow.py").write_text(SLOW_STORAGE)
    output = folder.path.parent / "results"
    options = ("--budget", "200s", "--trials", "3", "--only", "data_loading", "--output", str(output))

    done = steptune(folder, "tune", *options, "--verify", "1s", "--", sys.executable, "slow.py")

    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("own")] == [
        ["own", "speed"],
        ["own", "loss"],
    ]
    found = msgspec.json.decode((output / "verification.json").read_bytes(), type=ScriptVerification)
    assert found.same
    assert found.gain.num_blocks == 2
    assert found.gain.ratio > 1.2
    refused = steptune(folder, "tune", "--verify", "1s", "slow.py:Slow")
    assert refused.returncode == 2
    assert "--verify is for scripts only" in refused.stderr


def test_a_script_that_fails_comes_through_word_by_word(folder: ScriptFolder) -> None:
    folder.add("raises.py")
    plain = folder.plain(sys.executable, "raises.py")

    done = steptune(folder, "tune", "--", sys.executable, "raises.py")

    assert done.returncode == plain.returncode
    assert plain.stderr.splitlines()[-1] in done.stderr.splitlines()
    assert "no steps were recorded: the command ended with status 1" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_in_a_trial_leaves_no_process_and_no_file(number: int, folder: ScriptFolder) -> None:
    folder.add("waits_in_trials.py")
    process = subprocess.Popen(
        [*STEPTUNE, "tune", "--budget", "200s", "--", sys.executable, "waits_in_trials.py"],
        cwd=folder.path,
        env=environment(folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    family = _waiting_family(folder, process)

    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.kill()
    _, said = process.communicate(timeout=60)

    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    assert list(folder.files()) == ["waits_in_trials.py"]
    assert not list((folder.path.parent / "temporary").glob("steptune*"))
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "continue with `steptune resume" in said


def _waiting_family(folder: ScriptFolder, process: subprocess.Popen[str]) -> list[psutil.Process]:
    """All processes of a study whose trial has begun to wait."""
    end_s = time.monotonic() + LONGEST_S
    while time.monotonic() < end_s and process.poll() is None:
        for log in (folder.path.parent / "data").rglob("*.log"):
            line = next((line for line in log.read_text().splitlines() if line.startswith("waiting ")), "")
            if line:
                own = [psutil.Process(int(pid)) for pid in line.split()[1:]]
                return own + psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.2)
    raise AssertionError(f"no trial began; status {process.poll()}")
