"""`steptune.enable()`: a script trains with the changes of its trials, or is told why not."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import sample_recommendation
from msgspec.structs import replace
from script_runs import ROOT, ScriptFolder, Trials, TrialsOf, case, interpreter, losses

from steptune.tuner.export.native import NativeJson
from steptune.tuner.records import Choice, Recommendation

LINES = 'import steptune\n\nsteptune.enable("steptune.json")\n'
FUSED: dict[str, Choice] = {"optimizer_implementation": {"implementation": "fused"}}
WORKER: dict[str, Choice] = {"data_loading": {"num_workers": 1}}
PLAIN = pytest.mark.xdist_group("plain.py")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
CASES = [
    case("plain.py", WORKER | FUSED, (), None, id="plain"),
    case("own_trainer.py", {"data_loading": {"num_workers": 2}}, (), None, id="own_trainer"),
    case("detection.py", WORKER, (), None, id="detection"),
    case("own_batches.py", {"backend_flags": {"flush_denormals": True}}, (), None, id="own_batches"),
    case("gan.py", FUSED, (), None, id="gan"),
    case("two_ranks.py", FUSED, TORCHRUN, None, id="two_ranks"),
    case("hf_trainer.py", WORKER, (), "transformers", id="hf_trainer"),
]
TOLERANCE = 1e-3
"""Rounding, grown over the steps of a fixture."""


def enabled(script: str) -> None:
    """Put the line into a script, below its docstring."""
    path = Path(script)
    docstring, end, rest = path.read_text().partition('"""\n')
    path.write_text(f"{docstring}{end}\n{LINES}{rest}")


def trained(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def written(recommendation: Recommendation) -> None:
    Path("steptune.json").write_text(NativeJson().export(recommendation))


@pytest.mark.parametrize(("script", "choices", "launcher", "library"), CASES)
def test_one_line_trains_the_same_with_the_changes(
    folder: ScriptFolder,
    trials_of: TrialsOf,
    script: str,
    choices: dict[str, Choice],
    launcher: tuple[str, ...],
    library: str | None,
) -> None:
    command = (interpreter(library), *launcher, script)
    trials = trials_of(*command)
    plain = folder.plain(*command)
    written(trials.recommended(**choices))
    enabled(script)

    done = trained(*command)

    told = [line for line in done.stderr.splitlines() if line.startswith("steptune")]
    assert len(told) == 1, "one line, and nothing that was not changed"
    words = trials.recommended(**choices).in_script.words
    assert all(word in told[0] for word in words)
    seen, wanted = _numbers(done), _numbers(plain)
    assert seen[:32] == pytest.approx(wanted[:32], rel=TOLERANCE)
    assert len(seen) == len(wanted)


def _of_other_torch(recommendation: Recommendation) -> Recommendation:
    return replace(recommendation, hardware=replace(recommendation.hardware, versions={"torch": "2.9.0"}))


def _of_other_device(recommendation: Recommendation) -> Recommendation:
    changes = recommendation.in_script
    script = replace(changes.script, device="cuda", device_name="NVIDIA H100")
    return replace(recommendation, in_script=replace(changes, script=script))


@PLAIN
@pytest.mark.parametrize(
    ("other", "message"),
    [
        pytest.param(_of_other_torch, "measured with torch 2.9.0, but this process has torch", id="torch"),
        pytest.param(_of_other_device, "measured on cuda (NVIDIA H100), but the script trains on cpu", id="device"),
        pytest.param(lambda r: replace(r, num_ranks=2), "measured with 2 ranks, but this job has 1", id="ranks"),
        pytest.param(
            lambda r: replace(r, environment_variables={"A_B": "1"}),
            "set this variable before the script starts",
            id="env",
        ),
        pytest.param(
            lambda r: replace(r, in_script=None), "is not a recommendation for a training script", id="workload"
        ),
    ],
)
def test_another_machine_is_refused_in_words(
    plain: Trials,
    other: Callable[[Recommendation], Recommendation],
    message: str,
) -> None:
    written(other(plain.recommended(**FUSED)))
    enabled("plain.py")

    done = trained(*plain.look.command)

    assert done.returncode == 1
    assert "RecommendationError" in done.stderr.splitlines()[-1]
    assert message in done.stderr.splitlines()[-1]
    assert not losses(done.stdout)


@PLAIN
def test_an_edited_script_is_refused_and_the_line_itself_is_no_edit(plain: Trials) -> None:
    written(plain.recommended(**FUSED))
    enabled("plain.py")
    path = Path("plain.py")
    path.write_text(path.read_text().replace("batch_size=8", "batch_size=4"))

    done = trained(*plain.look.command)

    assert "plain.py has changed since it was tuned" in done.stderr.splitlines()[-1]
    assert not losses(done.stdout)


def test_without_the_file_the_script_trains_as_it_is_and_says_so(folder: ScriptFolder) -> None:
    folder.add("plain.py")
    enabled("plain.py")

    done = trained(interpreter(None), "plain.py")

    assert done.returncode == 0
    assert done.stderr == "steptune: nothing was changed, because steptune.json does not exist\n"


@PLAIN
def test_a_process_that_only_starts_others_says_so_and_those_say_nothing(plain: Trials) -> None:
    written(plain.recommended(**FUSED))
    Path("start.py").write_text(
        f"import multiprocessing\n{LINES}\nif __name__ == '__main__':\n"
        "    started = multiprocessing.get_context('spawn').Process(target=print)\n"
        "    started.start()\n    started.join()\n"
    )

    done = trained(interpreter(None), "start.py")

    first, second = done.stderr.splitlines()
    assert "AdamW(fused=True)" in first
    assert second == "steptune: nothing was changed, because this process did no training"


def test_checkpoints_load_out_of_the_change_and_into_it(folder: ScriptFolder, tmp_path: Path) -> None:
    command = (interpreter(None), folder.add("continued.py"))
    channels_last: dict[str, Choice] = {"memory_format": {"layout": "channels_last"}}
    recommendation = Trials(folder.path, tmp_path / "study", command).recommended(**FUSED, **channels_last)
    plain = [number for _ in range(2) for number in _numbers(trained(*command))]
    enabled("continued.py")

    for changed_first in (True, False):
        Path("last.pt").unlink()
        seen = []
        for changed in (changed_first, not changed_first):
            Path("steptune.json").unlink(missing_ok=True)
            if changed:
                written(recommendation)
            seen += _numbers(trained(*command))

        assert len(seen) == 192
        assert seen == pytest.approx(plain, rel=TOLERANCE, abs=TOLERANCE)
        assert seen[96] < 0.9 * seen[0], "the second run went on where the first one ended"


def _numbers(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stderr
    return [float(line.split()[1]) for line in losses(done.stdout)]


def test_it_needs_none_of_the_packages_of_the_service(folder: ScriptFolder) -> None:
    written(sample_recommendation())  # refused, once it was read
    program = """
import sys, steptune
try:
    steptune.enable()
except steptune.tuner.errors.RecommendationError:
    print([*sys.modules])
"""

    done = trained(interpreter(None), "-c", program)

    loaded = {name.partition(".")[0] for name in done.stdout.strip("[]\n").replace("'", "").split(", ")}
    assert "torch" in loaded
    assert not loaded & {"msgspec", "yaml", "rich", "typer", "sqlalchemy", "scipy", "starlette", "fastapi"}
