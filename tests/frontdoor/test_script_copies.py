"""Trials that start from a frozen copy of a script's process: what they save, and that they train the same."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from script_runs import SCRIPTS, ScriptFolder, Trials

from steptune.tuner.records import Candidate, Choice
from steptune.tuner.scripts.agent import copies
from steptune.tuner.scripts.agent.others_files import TICK_NS, end_at_others_files
from steptune.tuner.scripts.copies import CopyError, FrozenCopy, place_to_start_from
from steptune.tuner.scripts.guard import ScriptGuard
from steptune.tuner.scripts.guard_files import SEEN
from steptune.tuner.scripts.launch import Ended
from steptune.tuner.strategies.api import FP32_ROUNDOFF

FUSED: dict[str, Choice] = {"optimizer_implementation": {"implementation": "fused"}}
BOUND: dict[str, Choice] = {"cpu_threads": {"bind": "close", "num_threads": 2}}


@pytest.fixture
def loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in which the script notes each time that it was loaded."""
    monkeypatch.setenv("LOADS", str(tmp_path / "loads"))
    return tmp_path / "loads"


@contextlib.contextmanager
def trials_of(folder: ScriptFolder, study: Path, *arguments: str, forked: bool = True) -> Iterator[Trials]:
    command = (sys.executable, folder.add("loaded.py"), *arguments)
    with contextlib.closing(Trials(folder.path, study, command, forked=forked)) as trials:
        yield trials


def test_a_script_is_loaded_once_for_all_trials_but_those_of_another_process(
    folder: ScriptFolder, tmp_path: Path, loads: Path
) -> None:
    before = folder.files()
    others = set(psutil.Process().children(recursive=True))  # of other tests
    with trials_of(folder, tmp_path / "study") as trials:
        found = [trials.run(), trials.run(**FUSED)]
        trials.reference(FP32_ROUNDOFF)
        found += [trials.run(**FUSED), trials.run(data_loading={"num_workers": 1})]
        assert len(loads.read_text().splitlines()) == 1
        bound = trials.run(**BOUND)
        costs_s = [trials.space.trial_cost_s(Candidate(choices=choices)) for choices in (FUSED, BOUND)]
        spared_s = trials.look.facts.fork_spares_ns / 1e9
        family = set(psutil.Process().children(recursive=True)) - others

    assert {result.interpreter for result in found} == {"forked"}, trials.look.why_no_copy
    assert [result.failure for result in (*found, bound)] == [None] * 5
    assert bound.interpreter == "started"
    assert costs_s[1] - costs_s[0] == pytest.approx(spared_s)
    assert spared_s > 0
    assert len(loads.read_text().splitlines()) == 2
    assert not psutil.wait_procs(list(family), timeout=30)[1]
    assert {name: size for name, size in folder.files().items() if name != "loaded.py"} == before


def test_a_crash_of_the_profiler_costs_neither_the_candidate_nor_the_copy(folder: ScriptFolder, tmp_path: Path) -> None:
    text = (SCRIPTS / "faulty.py").read_text()
    (folder.path / "faulty.py").write_text(text.replace('fault == "crashes"', 'optimizer.param_groups[0].get("fused")'))
    command = (sys.executable, "faulty.py")
    with contextlib.closing(Trials(folder.path, tmp_path / "study", command, forked=True)) as trials:
        trials.reference(FP32_ROUNDOFF)
        found = [trials.asked_for_a_profile(**FUSED), trials.run(**FUSED)]

    assert [(result.ok, result.interpreter) for result in found] == [(True, "forked")] * 2, trials.look.why_no_copy
    assert [attempt.failure.signal for attempt in found[0].repeated] == [signal.SIGSEGV]
    assert found[0].breakdowns == ()


def test_runs_of_the_reference_go_on_from_a_copy_at_the_same_time(
    folder: ScriptFolder, tmp_path: Path, loads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not timed. One that fails beside others is made again alone."""
    running, most, lock, ran = [0], [0], threading.Lock(), FrozenCopy.ran

    @contextlib.contextmanager
    def counted(copy: FrozenCopy, trial: Any, *arguments: Any) -> Iterator[Ended]:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        with ran(copy, trial, *arguments) as ended:
            if running[0] > 1 and trial["guard"]["noise"] == 2:
                (ended.folder / SEEN).unlink()
            running[0] -= 1
            yield ended

    monkeypatch.setattr(FrozenCopy, "ran", counted)
    monkeypatch.setattr(ScriptGuard, "_num_together", lambda guard: 3)
    with trials_of(folder, tmp_path / "study") as trials:
        trials.run()
        trials.reference(FP32_ROUNDOFF)
        verdict = trials.run(**FUSED).guard
        made = {path.name.partition("-")[0] for path in (tmp_path / "study" / "guarded").iterdir()}

    assert most == [2]
    assert made == {"today", "repeated", "disturbed"}
    assert verdict is not None
    assert verdict.passed, verdict.reason
    assert len(loads.read_text().splitlines()) == 1


def test_an_interrupt_ends_all_runs_of_the_reference(
    folder: ScriptFolder, tmp_path: Path, loads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ended = threading.Event(), []

    @contextlib.contextmanager
    def endless(copy: FrozenCopy, trial: Any, log: Path, longest_s: float | None, check: Any) -> Iterator[Ended]:
        if trial["guard"]["noise"] == 1:
            began.wait()
            raise KeyboardInterrupt
        began.set()
        try:
            for _ in range(2000):
                time.sleep(0.01)
                check()
        except CopyError:
            ended.append(trial["guard"]["noise"])
        raise CopyError("it ended")
        yield

    monkeypatch.setattr(ScriptGuard, "_num_together", lambda guard: 3)
    with trials_of(folder, tmp_path / "study") as trials:
        trials.run()
        monkeypatch.setattr(FrozenCopy, "ran", endless)
        with pytest.raises(KeyboardInterrupt):
            trials.reference(FP32_ROUNDOFF)
    assert ended == [2]


def test_a_request_that_comes_after_another_one_was_read_is_not_lost(tmp_path: Path) -> None:
    pipe = tmp_path / "request"
    os.mkfifo(pipe)
    requests, found = copies.requests_of(pipe), []
    reader = threading.Thread(target=lambda: found.append(next(requests)))
    reader.start()
    pipe.write_text('{"number": 1}\n')
    reader.join()
    with os.fdopen(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w") as stream:
        stream.write('{"number": 2}\n')
    found.append(next(requests))
    requests.close()
    assert found == [{"number": 1}, {"number": 2}]


def test_a_trial_that_was_given_up_before_the_copy_read_its_request_does_not_begin(tmp_path: Path) -> None:
    pipe = tmp_path / "request"
    os.mkfifo(pipe)
    requests = copies.requests_of(pipe)
    kept = {"trial": {}, "folder": str(tmp_path)}
    with os.fdopen(os.open(pipe, os.O_RDWR), "r+b", buffering=0) as stream:
        stream.write(json.dumps({"trial": {}, "folder": str(tmp_path / "removed")}).encode() + b"\n")
        stream.write(json.dumps(kept).encode() + b"\n")
        assert next(requests) == kept
    requests.close()


def test_a_fork_trains_what_a_start_trains_digit_by_digit(folder: ScriptFolder, tmp_path: Path, loads: Path) -> None:
    """Also where the script reads on from a file that it opened before, and draws masks of dropout."""
    with trials_of(folder, tmp_path / "forks") as trials:
        trials.run()
        forks = [trials.log(trials.run(**FUSED)) for _ in range(2)]
    with trials_of(folder, tmp_path / "starts", forked=False) as trials:
        start = trials.log(trials.run(**FUSED))

    assert len(start) >= 4
    num = min(map(len, (start, *forks)))
    assert [fork[:num] for fork in forks] == [start[:num]] * 2


def test_a_script_with_a_thread_starts_anew_and_says_why(folder: ScriptFolder, tmp_path: Path, loads: Path) -> None:
    with trials_of(folder, tmp_path / "study", "--thread") as trials:
        result = trials.run()

    assert trials.look.why_no_copy == "a frozen copy cannot have threads, but the script has one (writer)"
    assert result.failure is None
    assert result.interpreter == "started"


def test_a_script_that_does_not_bear_to_go_on_twice_starts_anew(
    folder: ScriptFolder, tmp_path: Path, loads: Path
) -> None:
    """It makes a folder, which must not be there, after the copy was made: the look has made it."""
    with trials_of(folder, tmp_path / "study", "--folder") as trials:
        first, second = trials.run(), trials.run(**FUSED)

    assert [first.failure, second.failure] == [None, None]
    assert [first.interpreter, second.interpreter] == ["started", "started"]
    assert "File exists" in trials.look.why_no_copy


def test_a_trial_does_not_go_on_from_the_checkpoint_of_another(
    folder: ScriptFolder, tmp_path: Path, loads: Path
) -> None:
    """All forks of a copy share the view in which the look has written one."""
    with trials_of(folder, tmp_path / "study", "--resume") as trials:
        results = [trials.run(), trials.run(**FUSED)]
        second = trials.log(results[1])
    with trials_of(folder, tmp_path / "starts", "--resume", forked=False) as starts:
        start = starts.log(starts.run(**FUSED))

    assert [result.failure for result in results] == [None, None]
    assert [result.interpreter for result in results] == ["started", "started"]
    assert "the script reads last.pt" in trials.look.why_no_copy
    num = min(len(second), len(start))
    assert num >= 4
    assert second[:num] == start[:num]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "modes", "ends"),
    [
        ("view/others", "r", True),
        ("view/others", "r+", True),
        ("view/link", "r", True),
        ("view/others", "a", False),
        ("view/others", "wr", False),
        ("view/earlier", "r", False),
        ("view/own", "wr", False),
        ("view/__pycache__/others", "r", False),
        ("outside", "r", False),
    ],
)
def test_a_trial_ends_where_it_reads_what_another_has_written(
    name: str, modes: str, ends: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Files that it writes over, adds to or has written itself are its own."""
    (tmp_path / "view" / "__pycache__").mkdir(parents=True)
    (tmp_path / "view" / "earlier").touch()
    time.sleep(2 * TICK_NS / 1e9)
    frozen_ns = time.time_ns()
    time.sleep(2 * TICK_NS / 1e9)
    for other in ("view/others", "view/__pycache__/others", "outside"):
        (tmp_path / other).touch()
    (tmp_path / "view" / "link").symlink_to("others")
    time.sleep(3 * TICK_NS / 1e9)
    child = os.fork()
    if child == 0:
        end_at_others_files(str(tmp_path / "view"), frozen_ns)
        for mode in [modes] if modes == "r+" else modes:
            (tmp_path / name).open(mode).close()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert status == int(ends)
    assert ("which an earlier run of the same copy wrote" in capfd.readouterr().err) == ends


def test_what_the_script_sets_of_threads_comes_into_effect_where_training_begins(
    folder: ScriptFolder, tmp_path: Path, loads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forked after a team of threads had worked, the trial would hang."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with trials_of(folder, tmp_path / "study") as trials:
        result = trials.run()

    assert result.interpreter == "forked", trials.look.why_no_copy
    assert {line.split()[-1] for line in trials.log(result)} == {"2"}


def test_one_thread_is_held_whatever_is_set() -> None:
    before = torch.get_num_threads()
    held = copies.OneThread()
    try:
        torch.set_num_threads(3)
        seen = torch.get_num_threads()
    finally:
        held.end()
    after = torch.get_num_threads()
    torch.set_num_threads(before)

    assert (seen, after) == (3, 3)


def test_files_have_positions_of_their_own_after_they_are_opened_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"0123456789")
    with path.open("rb", buffering=0) as file:
        file.read(4)
        known = [each for each in copies.open_files() if each[0] == file.fileno()]
        file.read(3)
        copies.reopen(known)
        assert file.read() == b"456789"


def test_the_place_is_the_last_one_before_the_training_loader_is_iterated(folder: ScriptFolder, tmp_path: Path) -> None:
    """A change at the loader must still be ahead."""
    command = (sys.executable, folder.add("plain.py"))
    with contextlib.closing(Trials(folder.path, tmp_path / "study", command, forked=True)) as trials:
        record = trials.look.record

    assert [(place.what, bool(place.copy)) for place in record.copies] == [("loader", True), ("forward", True)]
    assert place_to_start_from(record) == record.copies[0]


def test_a_thread_of_the_own_process_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = copies.Copies(str(tmp_path))
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="writer")
    thread.start()
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread(), thread])  # none of other tests
    try:
        assert asked.freeze("loader", 0, is_last=True) is None
    finally:
        end.set()
        thread.join()
    (place,) = asked.places
    assert place["copy"] == ""
    assert place["reason"] == "a frozen copy cannot have threads, but the script has one (writer)"


@pytest.mark.xdist_group("plain.py")
def test_without_a_place_there_is_no_copy(plain: Trials) -> None:
    with pytest.raises(CopyError, match="never reached a point"):
        place_to_start_from(plain.look.record)
