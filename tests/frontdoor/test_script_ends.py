"""However a script ends, its own words come through, nothing stays behind, and the answer says what was seen."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest
from script_runs import ROOT, VARIABLES, ScriptFolder, interpreter, losses

from steptune.tuner.errors import PlatformError
from steptune.tuner.scripts.launch import ran_script
from steptune.tuner.scripts.recognised import remarks_on_processes

STEPTUNE = (sys.executable, "-m", "steptune", "profile")
ENVIRONMENT = {**os.environ, **VARIABLES, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}


def steptune(folder: ScriptFolder, *arguments: str) -> subprocess.CompletedProcess[str]:
    return folder.ran(*STEPTUNE, *arguments, env=ENVIRONMENT)


def test_the_command_prints_the_output_of_the_script_then_what_it_recognised_then_the_answer(
    folder: ScriptFolder,
) -> None:
    folder.add("plain.py")

    done = steptune(folder, "--", sys.executable, "plain.py", "--steps", "96")

    assert done.returncode == 0, done.stderr
    order = [done.stdout.index(part) for part in ("loss ", "recognised", "plain.py:33 in main", "a step, ", "Memory")]
    assert order == sorted(order)
    memory = " ".join(done.stdout[order[-1] :].split())
    assert all(f"{kind} 0" in memory for kind in ("parameters", "gradients", "optimizer state", "activations"))
    assert not done.stderr, "the profiler's own messages are none of the script's"
    assert list(folder.files()) == ["plain.py"]


def test_json_has_standard_output_for_itself(folder: ScriptFolder) -> None:
    folder.add("plain.py")

    done = steptune(folder, "--json", "--trace", "kept.json.gz", "--", sys.executable, "plain.py")

    answer = json.loads(done.stdout)
    assert answer["records"][0]["step"]["num_backwards"] == 1
    assert losses(done.stderr)
    assert sorted(folder.files()) == ["kept.json.gz", "plain.py"], "the trace is Steptune's file, not the script's"


def test_a_script_that_raises_shows_its_own_traceback_and_status(folder: ScriptFolder) -> None:
    command = (sys.executable, folder.add("raises.py"))
    plain = folder.plain(*command)

    run = folder.profiled(*command)

    assert run.profile.status == plain.returncode == 1
    assert run.err.replace(str(folder.path), "") == plain.stderr.replace(f"{folder.path}-plain", "")
    assert "ended with status 1" in run.profile.refusal


def test_the_status_of_a_script_is_the_commands(folder: ScriptFolder) -> None:
    done = steptune(folder, "--", "sh", "-c", "exit 7")

    assert done.returncode == 7
    assert "ended with status 7" in done.stdout


def test_a_script_that_never_trains_is_answered_in_words(folder: ScriptFolder) -> None:
    run = folder.profiled(sys.executable, folder.add("never_trains.py"))

    assert run.profile.status == 0
    assert "no process that Steptune sees ran a backward pass" in run.profile.refusal


def test_a_command_without_torch_is_answered_in_words(folder: ScriptFolder) -> None:
    run = folder.profiled(sys.executable, "-c", "print('hello')")

    assert run.out == "hello\n"
    assert "nothing was trained" in run.profile.refusal


def test_a_script_that_is_too_short_is_told_how_many_steps_are_needed(folder: ScriptFolder) -> None:
    run = folder.profiled(sys.executable, folder.add("plain.py"), "--steps", "9")

    assert run.out.endswith("the end\n")
    assert "ended after 9 steps; a recording needs 12 steps if" in run.profile.refusal


def test_a_full_run_is_the_scripts_own_run(folder: ScriptFolder) -> None:
    command = (sys.executable, folder.add("plain.py"))

    run = folder.profiled(*command, full=True)

    assert not run.profile.refusal
    assert run.out == folder.plain(*command).stdout
    assert {"out/last.pt", "log.txt"} < set(folder.files())


def test_where_there_can_be_no_view_the_script_does_not_run(
    folder: ScriptFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary directory lies below the folder, so that no overlay can be put over it."""
    inside = folder.path / "temporary"
    inside.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(inside))

    with pytest.raises(PlatformError, match=r"set TMPDIR.*--in-place"):
        folder.profiled(sys.executable, folder.add("plain.py"))
    assert list(folder.files()) == ["plain.py"]

    run = folder.profiled(sys.executable, "plain.py", in_place=True)
    assert not run.profile.refusal
    assert "log.txt" in folder.files()


def test_inputs_are_not_copied_and_absolute_paths_are_covered(folder: ScriptFolder) -> None:
    large = folder.path / "data" / "large.bin"
    large.parent.mkdir()
    with large.open("wb") as file:
        file.truncate(100 * 2**30)
    script = f"open({str(folder.path / 'out.txt')!r}, 'w').write(str(len(open('data/large.bin', 'rb').read(4))))\n"
    script += "import os; os.rename('data/small.txt', 'data/moved.txt'); os.remove('data/gone.txt')\n"
    script += "print(os.path.getsize('data/large.bin'), sorted(os.listdir('data')), open('out.txt').read())"
    (folder.path / "data" / "small.txt").write_text("small")
    (folder.path / "data" / "gone.txt").write_text("gone")
    before = folder.files()

    run = folder.profiled(sys.executable, "-c", script)

    assert run.out.startswith(f"{100 * 2**30} ['large.bin', 'moved.txt'] 4"), run.err
    assert folder.files() == before


def test_a_script_that_empties_the_temporary_directory_does_not_reach_the_folder(folder: ScriptFolder) -> None:
    (folder.path / "kept").mkdir()
    (folder.path / "kept" / "file").write_text("kept")
    temporary = folder.path.parent / "temporary"

    run = folder.profiled("sh", "-c", f"ls {temporary}/*/view; rm -rf {temporary}/*/view/original/*; ls kept")

    assert "original" in run.out
    assert run.out.endswith("file\n")
    assert (folder.path / "kept" / "file").read_text() == "kept"


def test_the_users_own_sitecustomize_runs(folder: ScriptFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    own = folder.path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins\nbuiltins.customised = __file__\n")
    monkeypatch.setenv("PYTHONPATH", str(own))

    run = folder.profiled(sys.executable, "-c", "import sitecustomize; print(customised, sitecustomize.__file__)")

    assert run.out.split() == [str(own / "sitecustomize.py")] * 2, run.err


def test_nothing_is_imported_before_torch(folder: ScriptFolder) -> None:
    program = "import sys; print(*sorted(name for name in sys.modules if 'steptune' in name or name == 'torch'))"

    run = folder.profiled(sys.executable, "-c", program)

    assert run.out.split() == ["_steptune_agent"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_leaves_no_process_behind(number: int, folder: ScriptFolder) -> None:
    folder.add("waits.py")
    process = subprocess.Popen(
        [*STEPTUNE, "--", sys.executable, "waits.py"],
        cwd=folder.path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    started = next(line for line in process.stdout if line.startswith("waiting "))
    script, child = map(int, started.split()[1:])
    family = [psutil.Process(pid) for pid in (script, child)] + psutil.Process(process.pid).children(recursive=True)

    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.kill()
    process.wait(60)
    process.stdout.close()

    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    assert list(folder.files()) == ["waits.py"]
    if number == signal.SIGINT:
        assert process.returncode == 130


@pytest.mark.parametrize(("arguments", "wrapper"), [("", "DistributedDataParallel"), (" --shard", "FSDP2")])
def test_two_ranks_under_torchrun_are_recorded_together(arguments: str, wrapper: str, folder: ScriptFolder) -> None:
    script = folder.add("two_ranks.py")
    before = folder.files()
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

    run = folder.profiled("sh", "-c", f"echo begin; {' '.join(torchrun)} {script}{arguments}")

    assert not run.profile.refusal, f"{run.profile.refusal}\n{run.err}"
    recorded = [record for record in run.profile.records if record.complete]
    assert [(record.rank, record.num_ranks) for record in recorded] == [(0, 2), (1, 2)]
    assert len({len(record.recorded_step_ns) for record in recorded}) == 1
    assert recorded[0].models[0].wrappers == (wrapper,)
    assert {breakdown.rank for breakdown in run.profile.breakdowns} == {0, 1}
    assert "Error" not in run.err
    assert folder.files() == before


def test_ranks_that_a_script_spawns_are_recorded(folder: ScriptFolder) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    run = folder.profiled(sys.executable, folder.add("spawned.py"), str(port))

    assert not run.profile.refusal, f"{run.profile.refusal}\n{run.err}"
    assert [record.rank for record in run.profile.records if record.complete] == [0, 1]
    assert run.profile.status == 0


def test_processes_that_update_the_same_parameters_are_told_of(folder: ScriptFolder) -> None:
    run = folder.profiled(sys.executable, folder.add("hogwild.py"))

    assert not run.profile.refusal, f"{run.profile.refusal}\n{run.err}"
    [remark] = remarks_on_processes([record for record in run.profile.records if record.num_backwards])
    assert "2 processes train without a process group" in remark


def test_a_command_that_does_not_exist_is_told(folder: ScriptFolder) -> None:
    done = steptune(folder, "--", "no-such-command")

    assert done.returncode == 127
    assert "no-such-command: command not found" in done.stderr


def test_accelerate_launch_is_armed_like_every_other_command(folder: ScriptFolder) -> None:
    python = interpreter("accelerate")
    launch = (python, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1")

    run = folder.profiled(*launch, folder.add("accelerated.py"))

    assert not run.profile.refusal, f"{run.profile.refusal}\n{run.err}"
    assert run.first.trainer is not None
    assert run.first.trainer.library == "accelerate"


def test_a_script_that_profiles_itself_is_refused_and_ended(folder: ScriptFolder) -> None:
    (folder.path / "own.py").write_text(
        "import runpy, torch\nwith torch.profiler.profile():\n    runpy.run_path('plain.py', run_name='__main__')\n"
    )
    folder.add("plain.py")

    run = folder.profiled(sys.executable, "own.py")

    assert "already runs torch.profiler" in run.profile.refusal
    assert "the end" not in run.out


def test_what_fails_inside_the_hooks_ends_the_inspection_not_the_script(folder: ScriptFolder) -> None:
    (folder.path / "odd.py").write_text(
        "import runpy, torch\n"
        "def odd(loader):\n"
        "    raise RuntimeError('no length for you')\n"
        "torch.utils.data.DataLoader.__len__ = odd\n"
        "runpy.run_path('plain.py', run_name='__main__')\n"
    )
    command = (sys.executable, "odd.py")
    folder.add("plain.py")

    run = folder.profiled(*command, full=True)

    assert run.profile.status == 0
    assert run.out == folder.plain(*command).stdout
    assert "the inspection itself failed" in run.profile.refusal
    assert "no length for you" in run.profile.refusal


def test_a_script_that_watches_itself_runs_on_and_says_the_answer_beside(folder: ScriptFolder) -> None:
    folder.add("watched.py")
    temporary = folder.path.parent / "temporary"
    own = {"cwd": folder.path, "env": {**ENVIRONMENT, "TMPDIR": str(temporary)}, "capture_output": True, "text": True}

    watched = subprocess.run([sys.executable, "watched.py", "--watch"], check=True, timeout=120, **own)
    plain = subprocess.run([sys.executable, "watched.py"], check=True, timeout=120, **own)
    short = subprocess.run([sys.executable, "watched.py", "--watch", "--short"], check=True, timeout=120, **own)

    assert watched.stdout == plain.stdout
    assert "one step of SGD, 1 backward pass, 1 batch; watched.py:24 in <module>" in watched.stderr
    assert "a step, " in watched.stderr
    assert "no profile: the script ended after 5 steps" in short.stderr
    assert not list(temporary.glob("steptune*"))


def test_under_the_command_a_script_that_watches_itself_is_watched_once(folder: ScriptFolder) -> None:
    run = folder.profiled(sys.executable, folder.add("watched.py"), "--watch")

    assert not run.profile.refusal, run.err
    assert "recognised" not in run.err


NOT_ROOTS_RIGHTS = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin") if os.geteuid() == 0 else ()


@pytest.mark.parametrize("wrapper", [("unshare", "--user", "--map-root-user", "--mount"), NOT_ROOTS_RIGHTS])
def test_what_is_mounted_below_is_covered_too(wrapper: tuple[str, ...], folder: ScriptFolder) -> None:
    """With the right to mount, and in a user namespace of the view's own."""
    (folder.path / "data").mkdir()
    (folder.path / "data" / "file").write_text("before\n")
    mounted = "unshare" in wrapper
    prepare = "mount -t tmpfs none data && echo before >data/file &&" if mounted else ""
    inside = "cat data/file; echo changed >data/file; cat data/file; rm -r data/file; mkdir data/file; ls -d data/*"
    command = f"{prepare} {' '.join(STEPTUNE)} -- sh -c '{inside}'; cat data/file"

    done = subprocess.run(
        [*wrapper, "sh", "-c", command], cwd=folder.path, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )

    lines = done.stdout.splitlines()
    assert lines[:3] == ["before", "changed", "data/file"], done.stderr
    assert lines[-1] == "before"


def test_workers_that_are_spawned_are_no_processes_that_train(folder: ScriptFolder) -> None:
    """Each is armed by the environment and imports torch; their end is not announced by a warning of leaks."""
    (folder.path / "spawns.py").write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "if __name__ == '__main__':\n"
        "    model = torch.nn.Linear(4, 1)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    data = TensorDataset(torch.randn(800, 4))\n"
        "    for (x,) in DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context='spawn'):\n"
        "        model(x).sum().backward()\n"
        "        optimizer.step()\n"
    )

    run = folder.profiled(sys.executable, "spawns.py")

    assert not run.profile.refusal
    assert len(run.profile.records) == 1
    assert not run.err


@pytest.mark.parametrize("name", ["statistics", "steps", "hooks", "steptune"])
def test_a_file_of_the_script_may_have_any_name(name: str, folder: ScriptFolder) -> None:
    """None of ours is shadowed by it, and none shadows it."""
    (folder.path / f"{name}.py").write_text("MINE = 'mine'\n")
    (folder.path / "train.py").write_text(
        f"import runpy, torch\nfrom {name} import MINE\nrunpy.run_path('plain.py', run_name='__main__')\n"
    )
    folder.add("plain.py")

    run = folder.profiled(sys.executable, "train.py")

    assert not run.profile.refusal, f"{run.profile.refusal}\n{run.err}"


def test_where_the_hooks_do_not_fit_the_script_runs_without_them(folder: ScriptFolder) -> None:
    """Hooks do not fit a version of torch that lacks what they wrap."""
    package = folder.path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("")

    run = folder.profiled(sys.executable, "-c", "import torch; print(torch.__file__)")

    assert run.out.endswith("torch/__init__.py\n")
    assert "steptune cannot observe process" in run.err


def test_a_reason_to_stop_ends_the_command_and_leaves_no_process(folder: ScriptFolder) -> None:
    """A worker has one where it is told that its study is cancelled."""
    looks = 0

    def check() -> None:
        nonlocal looks
        looks += 1
        if looks > 2:
            raise RuntimeError("cancelled")

    with pytest.raises(RuntimeError, match="cancelled"), ran_script(["sleep", "600"], check=check):
        raise AssertionError("it ended by itself")
    others = psutil.Process().children(recursive=True)  # servers of other tests, too
    left = [child.cmdline() for child in others if child.status() != psutil.STATUS_ZOMBIE]
    assert not [command for command in left if command[-2:] == ["sleep", "600"]]
