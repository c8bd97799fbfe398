"""Windows of trials that take turns last equally long, whatever their steps take."""

from types import SimpleNamespace

import pytest

from steptune.tuner.records import Candidate, MeasureSettings, Phase, Purpose, TrialSpec
from steptune.tuner.trials.fake import known_window
from steptune.tuner.trials.group import GroupRun, Member
from steptune.tuner.trials.messages import TakeWindow, WindowTaken

SLOW_NS, FAST_NS = 95_000_000, 9_000_000
NUM_POSITIONS = 1000


class Board:
    """Answers every command at once, and keeps it."""

    def __init__(self, step_ns):
        self.step_ns, self.commands = step_ns, {name: [] for name in step_ns}

    def tell(self, job, command):
        self.commands[job.name].append(command)

    def next_message(self, job):
        return WindowTaken(window=known_window(self.commands[job.name][-1].round, self.step_ns[job.name]))


def member(name, step_ns):
    spec = TrialSpec(trial_id=name, workload="fake:surface", candidate=Candidate(), choices={}, study_directory="")
    job = SimpleNamespace(name=name, failure=None, ended=False, phase=Phase.MEASURE, pause=lambda: None)
    found = Member(spec, Purpose.EXPLORE, job)
    found.ready = SimpleNamespace(step_time_ns=step_ns, num_positions=NUM_POSITIONS)
    return found


@pytest.fixture
def commands():
    board = Board({"slow": SLOW_NS, "fast": FAST_NS})
    group = GroupRun(board, None, MeasureSettings(window_s=0.2), lambda progress: None, seed=0)
    group.members = [member("slow", SLOW_NS), member("fast", FAST_NS)]
    group._take_rounds()
    assert all(isinstance(command, TakeWindow) for taken in board.commands.values() for command in taken)
    return board.commands


def test_the_faster_trial_takes_more_steps(commands):
    """Beside steps of 95 ms it would else be timed for a tenth of the time."""
    assert {command.num_steps for command in commands["slow"]} == {3}
    assert {command.num_steps for command in commands["fast"]} == {23}


def test_windows_of_a_round_begin_at_one_batch_and_no_two_of_a_trial_overlap(commands):
    starts = [command.position for command in commands["slow"]]
    assert starts == [command.position for command in commands["fast"]]
    ends = [command.position + command.num_steps for command in commands["fast"]]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert len(starts) >= 5
